package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/onsi/ginkgo/v2"
	"github.com/onsi/ginkgo/v2/formatter"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"sigs.k8s.io/yaml"

	"github.com/csi-prepare/csi-prepare/sanity"
	"github.com/csi-prepare/csi-prepare/sanity/report"
	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

// settings are the flags of run and executor.
type settings struct {
	config sanity.Config

	driver, exec   string
	grants, ids    []string
	exports        []string
	reports        string
	junit          string
	features       string
	known          string
	secrets        string
	parameters     string
	snapshots      string
	mutable        string
	accessType     string
	focus, skip    []string
	labels         string
	randomize      bool
	verbose        bool
	seedSet        bool
	stagingDir     string
	removeWhenDone string
}

func newRun() *cobra.Command {
	var s settings
	cmd := &cobra.Command{
		Use:   "run [flags]",
		Short: "Test a plugin",
		Long: `run tests a plugin: one that runs already (--csi.endpoint), one that it starts
itself and may kill and start again (--exec), or without either the reference
driver, in directories that are removed afterwards.

A plugin whose volumes are directories the operator granted it needs --grant, so
that the suite can perform its mount specs as a CO would.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if done, err := rootless(cmd.OutOrStdout()); done {
				return err
			}
			s.seedSet = cmd.Flags().Changed("seed") || cmd.Flags().Changed("ginkgo.seed")
			if s.config.Endpoint == "" && s.exec == "" {
				if err := s.embed(); err != nil {
					return err
				}
				defer func() { _ = os.RemoveAll(s.removeWhenDone) }()
			}
			name := s.driver
			if (s.config.Endpoint != "" || s.exec != "") && !cmd.Flags().Changed("driver") {
				name = ""
			}
			return s.run(cmd, name)
		},
	}
	f := cmd.Flags()
	f.SortFlags = false
	f.StringVar(&s.config.Endpoint, "csi.endpoint", "", "`endpoint` of the plugin: a path, unix:///PATH or dns:///HOST:PORT")
	f.StringVar(&s.config.ControllerEndpoint, "csi.controllerendpoint", "", "`endpoint` of its Controller service, if elsewhere")
	f.StringVar(&s.exec, "exec", "", "`command` that starts the plugin; $CSI_ENDPOINT and {endpoint} tell it where to listen")
	f.StringVar(&s.driver, "driver", "hostpath", "reference `driver` to test if neither is given")
	f.StringArrayVar(&s.grants, "grant", nil, "`NAME=DIR`: a directory the operator granted; may be repeated")
	f.StringArrayVar(&s.exports, "export", nil, "`HOST:PATH=DIR`: a directory behind network filesystems, as it is reached at the server; may be repeated")
	f.StringVar(&s.config.StateDir, "state-dir", "", "`directory` of the plugin's state, to be searched for secrets")
	f.StringArrayVar(&s.config.DataDirs, "data-dir", nil, "`directory` of files that the plugin attaches as loop devices; may be repeated")
	f.StringArrayVar(&s.config.VolumeIDs, "volume-id", nil, "`id` of a volume that exists, for a plugin that creates none; two let every spec run")
	f.StringVar(&s.config.WorkDir, "csi.mountdir", "", "as --work-dir")
	f.StringVar(&s.stagingDir, "csi.stagingdir", "", "as --work-dir")
	f.StringVar(&s.secrets, "csi.secrets", "", "YAML `file` of secrets, by the keys of csi-sanity and NodePrepareVolumeSecret")
	f.Int64Var(&s.config.VolumeSize, "csi.testvolumesize", 0, "`bytes` of volumes to create; 0 asks for no size")
	f.StringVar(&s.parameters, "csi.testvolumeparameters", "", "YAML `file` of parameters of CreateVolume")
	f.StringVar(&s.snapshots, "csi.testsnapshotparameters", "", "YAML `file` of parameters of CreateSnapshot")
	f.StringVar(&s.mutable, "csi.testvolumemutableparameters", "", "YAML `file` of parameters of ControllerModifyVolume")
	f.StringVar(&s.accessType, "csi.testvolumeaccesstype", "mount", "access `type` of the volumes, mount or block; the reports of block are named NAME-raw")
	addRunFlags(f, &s)
	return cmd
}

func newExecutor() *cobra.Command {
	var s settings
	cmd := &cobra.Command{
		Use:   "executor [flags]",
		Short: "Test whoever performs mount specs",
		Long: `executor tests who performs mount specs and undoes them: a process that serves
csi.prepare.testing.v1alpha1.Performer at a unix socket, on this machine and in
its initial pid namespace. Without --performer and --exec it is the reference
executor.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if done, err := rootless(cmd.OutOrStdout()); done {
				return err
			}
			s.seedSet = cmd.Flags().Changed("seed") || cmd.Flags().Changed("ginkgo.seed")
			name := "executor"
			if s.config.Performer == "" && s.exec == "" {
				if err := s.embedExecutor(); err != nil {
					return err
				}
				defer func() { _ = os.RemoveAll(s.removeWhenDone) }()
			}
			if s.config.Performer == "" {
				s.config.Performer = "new"
			}
			if s.config.Name == "" && s.exec != "" {
				s.config.Name = filepath.Base(strings.Fields(s.exec + " x")[0])
			}
			return s.run(cmd, name)
		},
	}
	f := cmd.Flags()
	f.SortFlags = false
	f.StringVar(&s.config.Performer, "performer", "", "`endpoint` of the performer, unix:///PATH; \"new\" with --exec makes one up")
	f.StringVar(&s.exec, "exec", "", "`command` that starts it; $CSI_ENDPOINT and {endpoint} tell it where to listen")
	addRunFlags(f, &s)
	return cmd
}

func addRunFlags(f *pflag.FlagSet, s *settings) {
	f.StringSliceVar(&s.ids, "id", nil, "test these `requirements` only")
	f.StringVar(&s.config.Profile, "profile", "", "test this `profile`, all of which has to be claimed: "+profileText())
	f.StringVar(&s.features, "features", "", "YAML `file` with a list of what the plugin is meant to claim; it has to claim that and no more")
	f.StringVar(&s.known, "known-failing", "", "YAML `file`, requirement: reason; these may fail, and have to")
	f.StringVar(&s.reports, "report", "", "`directory` for sanity-NAME.html, sanity-NAME.json and sanity-NAME.xml (JUnit)")
	f.StringVar(&s.junit, "csi.junitfile", "", "`file` for JUnit alone")
	f.Int64Var(&s.config.Seed, "seed", 0, "`number` that data and ids come from; if given, the specs run in an order of its own")
	f.StringVar(&s.config.WorkDir, "work-dir", "", "`directory` to work in, the same for the plugin; default the system's temporary one")
	f.DurationVar(&s.config.Timeout, "timeout", sanity.DefaultTimeout, "deadline of each call")
	f.DurationVar(&s.config.ReadyTimeout, "ready-timeout", sanity.DefaultReadyTimeout, "how long the first answer may take")
	f.BoolVarP(&s.verbose, "verbose", "v", false, "show the output of what --exec starts")
	f.StringSliceVar(&s.focus, "ginkgo.focus", nil, "test only specs whose text matches")
	f.StringSliceVar(&s.skip, "ginkgo.skip", nil, "leave out specs whose text matches")
	f.StringVar(&s.labels, "ginkgo.label-filter", "", "test only specs whose labels, their requirements, match")
	f.Int64Var(&s.config.Seed, "ginkgo.seed", 0, "as --seed")
	f.BoolVar(&s.randomize, "ginkgo.randomize-all", false, "run the specs in random order")
	f.StringVar(&s.junit, "ginkgo.junit-report", "", "as --csi.junitfile")
	for _, name := range []string{"csi.junitfile", "ginkgo.seed", "ginkgo.junit-report"} {
		f.Lookup(name).Hidden = true
	}
}

func profileText() string {
	return strings.Join(profileNames(), ", ")
}

func profileNames() []string {
	var names []string
	for name := range sanity.Profiles() {
		names = append(names, string(name))
	}
	slices.Sort(names)
	return names
}

// failed is what Ginkgo tells of failures.
type failed bool

// Fail implements ginkgo.GinkgoTestingT.
func (f *failed) Fail() { *f = true }

func (s *settings) run(cmd *cobra.Command, name string) error {
	if err := s.read(); err != nil {
		return err
	}
	out := cmd.OutOrStdout()
	progress := &report.Progress{Out: out, Terminal: isTerminal(out)}
	c := &s.config
	if s.verbose {
		c.Log = cmd.ErrOrStderr()
	}
	var result *report.Report
	var wrong failed
	c.Report = func(r *report.Report) error { result = r; return s.write(r, name) }
	c.Progress = progress.Show
	if c.Endpoint != "" || c.Performer != "" {
		c.Rerun = rerunOf(os.Args[1:])
	}
	if len(c.Exec) > 0 {
		c.Rerun = rerunOf(os.Args[1:])
	}
	begun := time.Now()
	suite := sanity.Register(c)
	if err := suite.Start(cmd.Context()); err != nil {
		suite.Stop()
		return err
	}
	plugin, version := suite.Plugin()
	if name == "" {
		name = fileName(plugin)
	}
	if c.Block {
		name += "-raw"
	}
	progress.Total = suite.Total()
	fmt.Fprintf(out, "Testing %s against SPEC.md, %d specs, seed %d.\n\n", strings.TrimSpace(plugin+" "+version), progress.Total, suite.Seed())
	// Ginkgo's own reporter would show each failure a second time.
	formatter.ColorableStdOut = io.Discard
	suiteConfig, reporterConfig := ginkgo.GinkgoConfiguration()
	suiteConfig.RandomSeed = suite.Seed()
	suiteConfig.RandomizeAllSpecs = s.seedSet || s.randomize
	suiteConfig.FocusStrings, suiteConfig.SkipStrings, suiteConfig.LabelFilter = s.focus, s.skip, s.labels
	suiteConfig.GracePeriod = 20 * time.Second
	passed := ginkgo.RunSpecs(&wrong, "csi-prepare", suiteConfig, reporterConfig)
	progress.End()
	if result == nil {
		return exit{1, errors.New("the suite ended without a report")}
	}
	result.WriteOpen(out)
	fmt.Fprintln(out)
	result.WriteTable(out)
	fmt.Fprintf(out, "\nThe suite's own overhead was %.1f ms for a spec (median); all took %.1f s.\n", 1000*suite.Overhead().Seconds(), time.Since(begun).Seconds())
	if s.reports != "" {
		fmt.Fprintf(out, "Report: %s\n", filepath.Join(s.reports, "sanity-"+name+".html"))
	}
	result.WriteVerdict(out)
	switch {
	case suite.Err() != nil:
		return exit{1, suite.Err()}
	case result.AnyFailed():
		return exit{code: 1}
	case !result.Ran():
		return exit{code: 3}
	case !passed:
		return exit{1, errors.New("interrupted")}
	}
	return nil
}

// read reads the files that flags name.
func (s *settings) read() error {
	c := &s.config
	if s.exec != "" {
		c.Exec = []string{"sh", "-c", "exec " + s.exec}
	}
	for _, text := range s.exports {
		i := strings.LastIndexByte(text, '=')
		if i < 0 {
			return fmt.Errorf("--export %s: write it as HOST:PATH=DIR", text)
		}
		if c.Exports == nil {
			c.Exports = map[string]string{}
		}
		c.Exports[text[:i]] = text[i+1:]
	}
	for _, g := range s.grants {
		name, dir, found := strings.Cut(g, "=")
		if !found || name == "" {
			return fmt.Errorf("--grant %s: is not NAME=DIR", g)
		}
		if c.Grants == nil {
			c.Grants = map[string]string{}
		}
		abs, err := filepath.Abs(dir)
		if err != nil {
			return fmt.Errorf("--grant %s: %w", g, err)
		}
		c.Grants[name] = abs
	}
	for _, id := range s.ids {
		c.Only = append(c.Only, requirement.ID(id))
	}
	switch s.accessType {
	case "", "mount":
	case "block":
		c.Block = true
	default:
		return fmt.Errorf("--csi.testvolumeaccesstype %s: has to be mount or block", s.accessType)
	}
	if c.WorkDir == "" {
		c.WorkDir = s.stagingDir
	}
	for _, f := range []struct {
		flag, path string
		into       any
	}{
		{"csi.secrets", s.secrets, &c.Secrets},
		{"csi.testvolumeparameters", s.parameters, &c.VolumeParameters},
		{"csi.testsnapshotparameters", s.snapshots, &c.SnapshotParameters},
		{"csi.testvolumemutableparameters", s.mutable, &c.MutableParameters},
		{"known-failing", s.known, &c.KnownFailing},
		{"features", s.features, &c.Features},
	} {
		if f.path == "" {
			continue
		}
		text, err := os.ReadFile(f.path)
		if err == nil {
			err = yaml.UnmarshalStrict(text, f.into)
		}
		if err != nil {
			return fmt.Errorf("--%s: %w", f.flag, err)
		}
	}
	return nil
}

func (s *settings) write(r *report.Report, name string) error {
	files := map[string]func(io.Writer) error{}
	if s.reports != "" {
		if err := os.MkdirAll(s.reports, 0o755); err != nil {
			return fmt.Errorf("making the directory of the report: %w", err)
		}
		files[filepath.Join(s.reports, "sanity-"+name+".json")] = r.WriteJSON
		files[filepath.Join(s.reports, "sanity-"+name+".xml")] = r.WriteJUnit
		files[filepath.Join(s.reports, "sanity-"+name+".html")] = r.WriteHTML
	}
	if s.junit != "" {
		files[s.junit] = r.WriteJUnit
	}
	for path, write := range files {
		f, err := os.Create(path)
		if err != nil {
			return fmt.Errorf("writing the report: %w", err)
		}
		if err := errors.Join(write(f), f.Close()); err != nil {
			return fmt.Errorf("writing %s: %w", path, err)
		}
	}
	return nil
}

// fileName turns the name of a plugin into part of a file's.
func fileName(plugin string) string {
	return strings.Map(func(r rune) rune {
		if r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || r == '.' || r == '-' {
			return r
		}
		return '_'
	}, plugin)
}

// rerunOf is the command line without what a repeat has values of its own
// for.
func rerunOf(args []string) string {
	own := map[string]bool{"id": true, "seed": true, "ginkgo.seed": true, "report": true}
	line := "prepare-sanity"
	for i := 0; i < len(args); i++ {
		flag, _, joined := strings.Cut(strings.TrimLeft(args[i], "-"), "=")
		if strings.HasPrefix(args[i], "-") && own[flag] {
			if !joined {
				i++
			}
			continue
		}
		word := args[i]
		if strings.ContainsAny(word, " '\"$\\*?;&|<>()`") {
			word = "'" + strings.ReplaceAll(word, "'", `'\''`) + "'"
		}
		line += " " + word
	}
	return line
}

func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	if !ok {
		return false
	}
	info, err := f.Stat()
	return err == nil && info.Mode()&os.ModeCharDevice != 0 && os.Getenv("CI") == "" && os.Getenv("TERM") != "dumb"
}
