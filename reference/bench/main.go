// Command bench measures the executor and the audit against their peers, in
// one process and one run: raw mount(2) as the floor, moby/sys/mount,
// containerd's core/mount and k8s.io/mount-utils.
//
// Within a round every variant runs once, in rotating order, and ratios are
// taken within the round; what is printed as a ratio is the median of those.
// Absolute times are those of this machine, busy as it is. docs/performance.md
// describes the method.
package main

import (
	"flag"
	"fmt"
	"io"
	"os"
	"regexp"
	"runtime"
	"runtime/debug"
	"strings"

	"golang.org/x/sys/unix"
)

func init() {
	// The namespaces of threads are what is measured: main stays on the
	// thread-group leader, whose mount namespace is the process's.
	runtime.LockOSThread()
}

func main() {
	var o options
	flag.StringVar(&o.json, "json", "", "write goals and ratios to this file")
	flag.StringVar(&o.chart, "chart", "", "draw cost against number of mounts to this SVG file")
	focus := flag.String("focus", "", "run only the sections that match this regular expression")
	flag.IntVar(&o.rounds, "rounds", 15, "rounds of each case (a third of them with 30000 mounts)")
	flag.Usage = func() {
		fmt.Fprintf(flag.CommandLine.Output(), "Usage: bench [flags]\n\nMeasures the executor against its peers; needs root.\n\n")
		flag.PrintDefaults()
	}
	flag.Parse()
	match, err := regexp.Compile("(?i)" + *focus)
	if err != nil || flag.NArg() > 0 || o.rounds < 3 {
		fmt.Fprintf(os.Stderr, "bench: bad usage: %v %q; -rounds is at least 3\n", err, flag.Args())
		os.Exit(2)
	}
	o.focus = match
	met, err := run(os.Stdout, o)
	switch {
	case err != nil:
		fmt.Fprintf(os.Stderr, "bench: %v\n", err)
		os.Exit(2)
	case !met:
		os.Exit(1)
	}
}

type options struct {
	json, chart string
	focus       *regexp.Regexp
	rounds      int
}

// run measures every section in focus. It reports whether every goal is met
// by the median of its rounds, or shown to be out of reach of the system calls
// it takes. A goal that is missed otherwise gets its case measured once more
// and is failed only by two misses in a row.
func run(w io.Writer, o options) (met bool, err error) {
	ground, err := newGround()
	if err != nil {
		return false, err
	}
	defer func() {
		if e := ground.Close(); e != nil && err == nil {
			err = e
		}
	}()
	header(w, o)
	suite, err := newSuite(ground, o.rounds)
	if err != nil {
		return false, err
	}
	defer func() {
		if e := suite.Close(); e != nil && err == nil {
			err = e
		}
	}()

	var results []Result
	section := ""
	for _, build := range suite.cases() {
		if !o.focus.MatchString(build.section) {
			continue
		}
		if build.section != section {
			section = build.section
			printHead(w, section)
		}
		r, err := measureJudged(build, suite.goals())
		if err != nil {
			return false, err
		}
		printCase(w, r, suite.goals())
		results = append(results, r)
	}
	var verdicts []Verdict
	met = true
	for _, g := range suite.goals() {
		v := judge(g, results)
		if v.Missing == "not measured" && o.focus.String() != "(?i)" {
			continue // out of focus
		}
		verdicts = append(verdicts, v)
		met = met && (v.Missing != "" || v.Met() || v.Bounded())
	}
	once := append(growth(results), allocations(suite, o.focus)...)
	for _, v := range append(once, shims(suite, o.focus)...) {
		verdicts = append(verdicts, v)
		met = met && (v.Missing != "" || v.Met())
	}
	printVerdicts(w, verdicts)
	if o.json != "" {
		if err := writeJSON(o.json, verdicts); err != nil {
			return false, err
		}
		fmt.Fprintf(w, "\nwritten: %s\n", o.json)
	}
	if o.chart != "" {
		err := chart(
			o.chart,
			panelOf("One read-only bind, performed, verified and undone", ofCase(results, caseBind), atParent),
			panelOf("Which mount is new?", ofCase(results, caseIncremental)),
		)
		if err != nil {
			return false, err
		}
		fmt.Fprintf(w, "drawn: %s\n", o.chart)
	}
	return met, nil
}

// measureJudged measures a case, and once more if that missed one of its
// goals: a single miss on a shared machine says little.
func measureJudged(build builder, goals []Goal) (Result, error) {
	var r Result
	for range 2 {
		c, err := build.build()
		if err != nil {
			return r, fmt.Errorf("%s: %w", build.section, err)
		}
		if r, err = measure(c); err != nil {
			return r, err
		}
		missed := false
		for _, g := range goals {
			if v := judge(g, []Result{r}); v.Missing == "" && !v.Met() && !v.Bounded() {
				missed = true
			}
		}
		if !missed {
			break
		}
	}
	return r, nil
}

func ofCase(results []Result, name string) []Result {
	var of []Result
	for _, r := range results {
		if r.Case.Name == name {
			of = append(of, r)
		}
	}
	return of
}

// header says what was measured, and where.
func header(w io.Writer, o options) {
	var u unix.Utsname
	_ = unix.Uname(&u) // cannot fail with a valid pointer
	load, _ := os.ReadFile("/proc/loadavg")
	mounts, _ := mountCount()
	fmt.Fprintf(w, "# kernel %s, %d CPU, %s, load %s, %d mounts, propagation private, rounds %d\n",
		unix.ByteSliceToString(u.Release[:]), runtime.NumCPU(), runtime.Version(),
		strings.Join(strings.Fields(string(load))[:3], "/"), mounts, o.rounds)
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return
	}
	var peers []string
	for _, dep := range info.Deps {
		switch dep.Path {
		case "k8s.io/mount-utils", "github.com/containerd/containerd/v2", "github.com/moby/sys/mount",
			"github.com/moby/sys/mountinfo", "google.golang.org/grpc":
			peers = append(peers, dep.Path+" "+dep.Version)
		}
	}
	fmt.Fprintf(w, "# %s\n", strings.Join(peers, "  "))
}
