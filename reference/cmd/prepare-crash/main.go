// Command prepare-crash kills the reference CO and the reference drivers at
// every step and at random moments, and looks at what is left. It exits 0 if
// nothing was leaked, lost, wrong or stuck.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/csi-prepare/csi-prepare/reference/co/crash"
)

func main() {
	if os.Getuid() != 0 {
		fmt.Fprintln(os.Stderr, "prepare-crash: could not run: mount namespaces and loop devices need root")
		os.Exit(3)
	}
	crash.Main()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	if err := run(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "prepare-crash:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context) error {
	driver := flag.String("driver", "bin/prepare-driver", "`command` of the reference drivers")
	plugins := flag.String("plugins", "hostpath,block,fuse", "`drivers` to use, comma-separated")
	random := flag.Int("random", 1000, "`number` of random moments for the CO, and as many for the drivers")
	boundaries := flag.Bool("boundaries", true, "kill at every boundary between two steps besides")
	hold := flag.Int("hold", 1000, "`number` of volumes to hold and recover; 0 for none")
	out := flag.String("out", "", "JSON `file` to write the counts to")
	flag.Parse()
	command, err := filepath.Abs(*driver)
	if err != nil {
		return err
	}
	c := crash.Campaign{
		Driver: []string{command}, Plugins: strings.Split(*plugins, ","),
		Random: *random, Boundaries: *boundaries, Progress: os.Stdout,
	}
	result, err := c.Run(ctx)
	if err != nil {
		return err
	}
	fmt.Println(result)
	if *hold > 0 {
		held, err := crash.Hold(ctx, c.Driver, *hold)
		if held != nil {
			fmt.Println(held)
		}
		if err != nil {
			return fmt.Errorf("hold %d volumes: %w", *hold, err)
		}
	}
	if *out != "" {
		text, err := json.MarshalIndent(result, "", "  ")
		if err == nil {
			err = os.WriteFile(*out, append(text, '\n'), 0o644)
		}
		if err != nil {
			return err
		}
	}
	if !result.OK() {
		return errors.New("see above")
	}
	return nil
}
