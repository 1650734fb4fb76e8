// Command demo-fuse shows the workflow that takes no mount propagation and no
// privilege in the plugin: a FUSE volume in a container, mounted by the CO and
// served by an ordinary user's process, through the death of everything but the
// container. Each step says what it does and checks what it claims.
//
// It exits 0 if every claim held, 1 if one did not, and 3 where it cannot run.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/csi-prepare/csi-prepare/reference/co"
)

// consumerRole has this program be what runs in the container.
const consumerRole = "DEMO_FUSE_CONSUMER"

func main() {
	co.Child()
	if dir := os.Getenv(consumerRole); dir != "" {
		if err := consume(dir); err != nil {
			fmt.Fprintln(os.Stderr, "consumer:", err)
			os.Exit(1)
		}
		return
	}
	driver := flag.String("driver", "bin/prepare-driver", "`program` with the reference drivers")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	err := show(ctx, *driver)
	stop()
	switch {
	case errors.Is(err, errCannotRun):
		fmt.Fprintln(os.Stderr, "demo-fuse:", err)
		os.Exit(3)
	case err != nil:
		fmt.Fprintln(os.Stderr, "demo-fuse:", err)
		os.Exit(1)
	}
}

var errCannotRun = errors.New("cannot run here")

// show tells the story, and undoes what there is of it whatever happens.
func show(ctx context.Context, driver string) (err error) {
	if os.Geteuid() != 0 {
		return fmt.Errorf("%w: a CO needs root to make mounts for others", errCannotRun)
	}
	if _, err := os.Stat("/dev/fuse"); err != nil {
		return fmt.Errorf("%w: %w", errCannotRun, err)
	}
	s := &stage{driver: driver}
	defer func() { err = errors.Join(err, s.clear()) }()
	for _, act := range []struct {
		title string
		run   func(context.Context) error
	}{
		{"The plugin is an ordinary user's process", s.startPlugin},
		{"A container, whose mounts are its own", s.startContainer},
		{"The CO prepares and performs", s.up},
		{"Who sees a mount, and who serves it", s.look},
		{"The process behind the CSI socket is killed", s.killPlugin},
		{"The serving process is killed, ten times, under load", s.killServers},
		{"The CO is restarted, and then the server killed once more", s.restartCO},
		{"Down: the consumer ends, and nothing is left", s.down},
	} {
		s.chapter(act.title)
		if err := act.run(ctx); err != nil {
			return fmt.Errorf("%s: %w", act.title, err)
		}
	}
	fmt.Println("\nEvery claim held.")
	return nil
}
