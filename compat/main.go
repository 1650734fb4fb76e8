// Command compat runs what the world tests plugins with today, and a CO of
// today, against the reference drivers behind prepare-shim: upstream csi-sanity
// and the node plugin of Docker Swarm. It prints a table and exits 1 if
// something failed that is not explained.
//
//	compat -bin bin -json out/compat.json [-focus hostpath]
//
// It needs root, for mounts in a mount namespace of its own.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"regexp"
	"syscall"
	"text/tabwriter"

	"github.com/sirupsen/logrus"
	"google.golang.org/grpc/grpclog"

	"github.com/csi-prepare/csi-prepare/reference/co"
)

const insideVariable = "CSI_PREPARE_COMPAT_INSIDE"

func main() {
	co.Child()
	os.Exit(run())
}

func run() int {
	bin := flag.String("bin", "bin", "`directory` of prepare-driver, prepare-shim and csi-sanity")
	out := flag.String("json", "", "write the results to this `file`")
	focus := flag.String("focus", "", "run only what matches this `regexp`")
	verbose := flag.Bool("v", false, "show the logs of what failed")
	flag.Parse()
	match, err := regexp.Compile(*focus)
	if err != nil || flag.NArg() > 0 {
		fmt.Fprintln(os.Stderr, "compat: bad usage:", err, flag.Args())
		return 2
	}
	if os.Getenv(insideVariable) == "" {
		return inside()
	}
	if err := makeRoot(); err != nil {
		fmt.Fprintln(os.Stderr, "compat:", err)
		return 1
	}
	// Swarm tells of every step of a connection.
	logrus.SetLevel(logrus.ErrorLevel)
	grpclog.SetLoggerV2(grpclog.NewLoggerV2(io.Discard, io.Discard, io.Discard))
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	r := &runner{bin: *bin, verbose: *verbose}
	var results []Result
	for _, c := range cases() {
		if !match.MatchString(c.name()) || ctx.Err() != nil {
			continue
		}
		fmt.Fprintf(os.Stderr, "compat: %s\n", c.name())
		results = append(results, r.run(ctx, c))
	}
	code := table(os.Stdout, results)
	if *out != "" {
		if err := write(*out, results); err != nil {
			fmt.Fprintln(os.Stderr, "compat:", err)
			return 1
		}
	}
	if ctx.Err() != nil {
		return 1
	}
	return code
}

// inside runs this program again, in a mount namespace of its own.
func inside() int {
	signal.Ignore(syscall.SIGINT) // the child's to act upon
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.Env = append(os.Environ(), insideVariable+"=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
	err := cmd.Run()
	var ended *exec.ExitError
	switch {
	case errors.As(err, &ended):
		return ended.ExitCode()
	case err != nil:
		fmt.Fprintln(os.Stderr, "compat: a mount namespace of its own needs root:", err)
		return 3
	}
	return 0
}

// Result is what came of one case.
type Result struct {
	Suite  string `json:"suite"`
	Driver string `json:"driver"`
	Access string `json:"access"`
	// Outcome is passed, failed or could-not-run.
	Outcome   string      `json:"outcome"`
	Passed    int         `json:"passed"`
	Failed    int         `json:"failed"` // not explained
	Explained []Explained `json:"explained"`
	Skipped   int         `json:"skipped"` // of what the driver does not claim
	Pending   int         `json:"pending"`
	// Left is what was there afterwards and should not have been.
	Left    []string `json:"left"`
	Notes   []string `json:"notes"`
	Seconds float64  `json:"seconds"`
	// ShimRSS is the most memory the shim had resident, in bytes.
	ShimRSS int64 `json:"shim_rss"`
}

// Explained is a spec that fails for a reason that is not the shim's nor the
// driver's.
type Explained struct {
	Spec   string `json:"spec"`
	Reason string `json:"reason"`
}

func table(w io.Writer, results []Result) int {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "SUITE\tDRIVER\tACCESS\tOUTCOME\tPASSED\tFAILED\tEXPLAINED\tSKIPPED\tLEFT\tSHIM RSS\tSECONDS")
	code, ran := 0, false
	for _, r := range results {
		if r.Outcome == "failed" {
			code = 1
		}
		ran = ran || r.Outcome != "could-not-run"
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%d\t%d\t%d\t%d\t%d\t%.1f MiB\t%.1f\n", r.Suite, r.Driver, r.Access, r.Outcome,
			r.Passed, r.Failed, len(r.Explained), r.Skipped, len(r.Left), float64(r.ShimRSS)/(1<<20), r.Seconds)
	}
	_ = t.Flush()
	for _, r := range results {
		for _, e := range r.Explained {
			fmt.Fprintf(w, "\nexplained, %s %s: %s\n  %s\n", r.Driver, r.Access, e.Spec, e.Reason)
		}
		for _, n := range r.Notes {
			fmt.Fprintf(w, "\n%s %s %s: %s\n", r.Suite, r.Driver, r.Access, n)
		}
		for _, l := range r.Left {
			fmt.Fprintf(w, "\nleft, %s %s %s: %s\n", r.Suite, r.Driver, r.Access, l)
		}
	}
	if !ran && code == 0 {
		return 3
	}
	return code
}

func write(path string, results []Result) error {
	text, err := json.MarshalIndent(results, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(path, append(text, '\n'), 0o644)
}
