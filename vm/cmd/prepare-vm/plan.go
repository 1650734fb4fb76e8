package main

import (
	"path"
	"regexp"
	"slices"

	"github.com/csi-prepare/csi-prepare/vm/job"
)

// step is one of a guest's, by what it takes.
type step struct {
	name string
	// test is a package whose tests are run, command a command of the
	// module; both are below the module's directory.
	test, command string
	args          []string
	// beside runs it beside an NFS server.
	beside bool
	// short says that it is run in short form too, with shortArgs.
	short     bool
	shortArgs []string
}

// guest is what runs in one boot. Guests run at the same time.
type guest struct {
	name    string
	modules []string
	steps   []step
}

const (
	suite     = "sanity/cmd/prepare-sanity"
	nfsServer = "vm/cmd/with-nfs-server"
)

// suiteArgs run the suite against a driver, with patience for a guest.
func suiteArgs(driver string, more ...string) []string {
	return append([]string{"run", "--driver", driver, "--timeout", "60s", "--ready-timeout", "60s"}, more...)
}

// exported is the export of nfsServer.
const exported = "--export=nfs-server:/export=/srv/nfs-server/export"

// files are what steps find beside programs in the payload.
var files = map[string]string{
	"version-3.yaml": "vers: \"3\"\n",
}

var guests = []guest{
	{
		name:    "nfs",
		modules: []string{"nfsd", "nfsv3", "nfsv4", "overlay", "veth", "ipv6", "fuse", "loop"},
		steps: []step{
			{name: "nfs-server", test: "vm/nfsd", short: true},
			{name: "nfs-driver", test: "drivers/nfs", short: true, shortArgs: []string{"-test.run", "TestData/(3|4.2)_10|TestServerStopped"}},
			{name: "nfs-4.2", command: suite, beside: true, args: suiteArgs("nfs", exported)},
			{name: "nfs-3", command: suite, beside: true, args: suiteArgs("nfs", exported, "--csi.testvolumeparameters", path.Join(job.Payload, "version-3.yaml"))},
		},
	},
	{
		name:    "old-kernel",
		modules: []string{"overlay", "fuse", "loop", "veth"},
		steps: []step{
			{name: "kernel", test: "reference/kernel", short: true},
			{name: "mountns", test: "reference/mountns"},
			{name: "handoff", test: "reference/handoff"},
			{name: "perform", test: "reference/perform", short: true, shortArgs: []string{"-test.run", "TestPerform$|TestUndoBusy|TestUndoOf"}},
			{name: "co", test: "reference/co"},
			{name: "executor", command: suite, args: []string{"executor", "--timeout", "60s", "--ready-timeout", "60s"}},
			{name: "hostpath", command: suite, args: suiteArgs("hostpath")},
			{name: "block", command: suite, args: suiteArgs("block")},
			{name: "fuse", command: suite, args: suiteArgs("fuse")},
		},
	},
}

// selected are the guests with the steps that are wanted, without those that
// have none.
func selected(only *regexp.Regexp, short bool) []guest {
	var all []guest
	for _, g := range guests {
		g.steps = slices.DeleteFunc(slices.Clone(g.steps), func(s step) bool {
			return short && !s.short || !only.MatchString(s.name)
		})
		if len(g.steps) > 0 {
			all = append(all, g)
		}
	}
	return all
}

// seconds a step may take, on a machine that does much else.
const seconds = 1500

// job makes a step of a guest's job of it, for programs in the payload.
func (s step) job(short bool) job.Step {
	j := job.Step{Name: s.name, Seconds: seconds}
	if s.beside {
		j.Argv = append(j.Argv, path.Join(job.Payload, path.Base(nfsServer)))
	}
	j.Argv = append(j.Argv, path.Join(job.Payload, s.program()))
	if s.test != "" {
		j.Argv = append(j.Argv, "-test.short", "-test.v", "-test.timeout", "24m")
		j.Env = []string{"CSI_PREPARE_GUEST=1"}
	}
	j.Argv = append(j.Argv, s.args...)
	if short {
		j.Argv = append(j.Argv, s.shortArgs...)
	}
	if s.command == suite {
		j.Argv = append(j.Argv, "--report", path.Join(job.Results, s.name))
	}
	return j
}

// program is the name of what the step runs, in the payload.
func (s step) program() string {
	if s.test != "" {
		return path.Base(s.test) + ".test"
	}
	return path.Base(s.command)
}
