package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/reference/co"
	"github.com/csi-prepare/csi-prepare/reference/kernel"
	"github.com/csi-prepare/csi-prepare/reference/mountns"
)

// check is one thing the doctor has looked at.
type check struct {
	Name string `json:"check"`
	// Result is "ok", "warning", "failed" or "could not look".
	Result string `json:"result"`
	Detail string `json:"detail"`
	// Fix is what to do, "" where there is nothing.
	Fix string `json:"fix,omitempty"`
}

const (
	fine    = "ok"
	warning = "warning"
	failed  = "failed"
	blind   = "could not look"
)

type doctor struct {
	*asker
	dirs    *places
	machine *machine
	checks  []check
}

func (d *doctor) add(name, result, detail, fix string) {
	d.checks = append(d.checks, check{name, result, detail, fix})
}

func newDoctor() *cobra.Command {
	var endpoints []string
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "See whether this node is fit for volumes, before they are used",
		Long: `doctor looks at the kernel, at limits, at the directories of the CO and of a
kubelet and how they propagate, at the drivers in the ledger or behind
--endpoint, and at the mounts that ask a server. It changes nothing, and exits 1
if a check failed.`,
		Example: "  preparectl doctor\n  preparectl doctor --endpoint unix:///run/csi.sock -o json",
		Args:    cobra.NoArgs, ValidArgsFunction: cobra.NoFileCompletions,
	}
	cmd.Flags().StringArrayVar(&endpoints, "endpoint", nil, "a driver's `socket`, unix:///path; may be repeated")
	dirs, policy, print := bothDirs(cmd), policyFlag(cmd), output(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		ctx, cancel := context.WithTimeout(cmd.Context(), limit)
		defer cancel()
		d := &doctor{asker: &asker{}, dirs: dirs}
		defer d.close()
		p, err := policy()
		if err != nil {
			return failure{err}
		}
		if d.machine, err = readMachine(ctx); err != nil {
			return failure{err}
		}
		d.kernel()
		d.limits()
		d.filesystems(p)
		d.devices()
		d.stateDir()
		d.ledger(&endpoints)
		d.kubeletDir()
		for _, e := range endpoints {
			d.driver(ctx, e)
		}
		d.servers()
		d.processes(ctx)
		bad, rows := 0, [][]string{}
		for _, c := range d.checks {
			if c.Result == failed {
				bad++
			}
			rows = append(rows, []string{c.Name, c.Result, c.Detail, c.Fix})
		}
		if err := print(d.checks, "CHECK\tRESULT\tDETAIL\tFIX", rows); err != nil {
			return err
		}
		if bad > 0 {
			return failure{errors.New(plural(bad, "check", "checks") + " failed")}
		}
		return nil
	}
	return cmd
}

func (d *doctor) kernel() {
	if os.Geteuid() != 0 {
		d.add("privilege", failed, "not root", "run as root: only the own mount namespace can be seen, and nothing be performed")
	} else {
		d.add("privilege", fine, "root", "")
	}
	f := kernel.Probe()
	var lacks []string
	f.Each(func(name string, have bool) {
		if !have {
			lacks = append(lacks, name)
		}
	})
	switch {
	case !f.NewMountAPI || !f.MountSetattr:
		d.add("kernel", warning, "mount(2) only: what is performed is visible before it is narrowed", "Linux 5.12 or later")
	case !f.UniqueID || !f.Statmount || !f.Listmount:
		d.add("kernel", warning, "no unique mount ids: receipts are kept by ids that the kernel gives again", "Linux 6.13 or later")
	case len(lacks) > 0:
		d.add("kernel", fine, "works; lacks "+strings.Join(lacks, ", "), "")
	default:
		d.add("kernel", fine, "has all that is used", "")
	}
}

// integer reads a number of /proc; files there answer.
func integer(file string) (int, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return 0, err
	}
	return strconv.Atoi(strings.TrimSpace(string(text)))
}

func (d *doctor) limits() {
	most, at := 0, uint64(0)
	for _, s := range d.machine.spaces {
		if n := s.Table.Len(); n > most {
			most, at = n, s.ID
		}
	}
	allowed, err := integer("/proc/sys/fs/mount-max")
	detail := fmt.Sprintf("%d of %d mounts in namespace %d, the fullest of %d", most, allowed, at, len(d.machine.spaces))
	switch {
	case err != nil:
		d.add("mount limit", blind, err.Error(), "")
	case most > allowed*9/10:
		d.add("mount limit", failed, detail, "find what leaks (preparectl audit); raise it: sysctl fs.mount-max")
	case most > allowed/2:
		d.add("mount limit", warning, detail, "find what leaks: preparectl audit")
	default:
		d.add("mount limit", fine, detail, "")
	}
	for _, l := range []struct{ name, file, without, fix string }{
		{"mount namespaces", "/proc/sys/user/max_mnt_namespaces", "none can be made, and performing needs them", "sysctl user.max_mnt_namespaces"},
		{"user namespaces", "/proc/sys/user/max_user_namespaces", "none can be made: no ids are mapped", "sysctl user.max_user_namespaces"},
	} {
		n, err := integer(l.file)
		switch {
		case err != nil:
			d.add(l.name, blind, err.Error(), "")
		case n == 0:
			d.add(l.name, warning, l.without, l.fix)
		default:
			d.add(l.name, fine, fmt.Sprintf("at most %d", n), "")
		}
	}
}

// filesystems compares the types the operator allows with what the kernel has.
func (d *doctor) filesystems(p *co.Policy) {
	text, err := os.ReadFile("/proc/filesystems")
	if err != nil {
		d.add("filesystems", blind, err.Error(), "")
		return
	}
	has := strings.Fields(string(text))
	var there, lacks []string
	settings := p.For("")
	for _, t := range settings.FSTypes {
		if slices.Contains(has, t) {
			there = append(there, t)
		} else {
			lacks = append(lacks, t)
		}
	}
	if len(lacks) == 0 {
		d.add("filesystems", fine, strings.Join(there, " "), "")
		return
	}
	d.add("filesystems", warning, fmt.Sprintf("has %s; not loaded: %s", strings.Join(there, " "), strings.Join(lacks, " ")),
		"where a driver needs one: modprobe")
}

func (d *doctor) devices() {
	for _, dev := range []struct{ path, use string }{
		{"/dev/fuse", "FUSE volumes"}, {"/dev/loop-control", "volumes on loop devices"},
	} {
		a, err := d.ask("lstat", dev.path)
		switch {
		case err == nil && a.Mode&unix.S_IFMT == unix.S_IFCHR:
			d.add(dev.path, fine, "there", "")
		case err == nil || errors.Is(err, os.ErrNotExist):
			d.add(dev.path, warning, "not there: no "+dev.use, "modprobe fuse loop; or give this container the device")
		default:
			d.add(dev.path, blind, err.Error(), "")
		}
	}
}

// stateDir looks at the directory of the CO and how its mount propagates.
func (d *doctor) stateDir() {
	dir := d.dirs.state
	a, err := d.ask("lstat", dir)
	switch {
	case errors.Is(err, os.ErrNotExist):
		d.add("CO directory", fine, dir+" is not there yet", "")
	case err != nil:
		d.add("CO directory", failed, err.Error(), "")
	case !a.directory():
		d.add("CO directory", failed, dir+" is no directory", "choose another: --state-dir")
	case a.Mode&0o022 != 0:
		d.add("CO directory", failed, fmt.Sprintf("%s: others may write (mode %04o)", dir, a.Mode&0o7777), "chmod go-w "+dir)
	default:
		m, found := covering(d.machine.own().Table, dir)
		if !found {
			d.add("CO directory", blind, dir+": in no mount of the table", "")
			return
		}
		d.add("CO directory", fine, fmt.Sprintf("%s, on %s (%s)", dir, m.Type(), m.Propagation), "")
	}
}

func (d *doctor) ledger(endpoints *[]string) {
	records, err := d.dirs.records()
	for i := range records {
		if e := records[i].Endpoint; !slices.Contains(*endpoints, e) {
			*endpoints = append(*endpoints, e)
		}
	}
	if err != nil {
		d.add("ledger", failed, err.Error(), "preparectl audit")
		return
	}
	open := 0
	for i := range records {
		if records[i].Phase != co.Performed {
			open++
		}
	}
	detail := plural(len(records), "preparation", "preparations")
	if open > 0 {
		d.add("ledger", warning, fmt.Sprintf("%s, %d not at rest", detail, open), "preparectl audit")
		return
	}
	d.add("ledger", fine, detail, "")
}

// kubeletDir needs propagation, as drivers without NodePrepare mount below it.
func (d *doctor) kubeletDir() {
	if _, err := d.ask("lstat", d.dirs.kubelet); err != nil {
		if !errors.Is(err, os.ErrNotExist) {
			d.add("kubelet directory", failed, err.Error(), "")
		}
		return
	}
	m, found := covering(d.machine.own().Table, d.dirs.kubelet)
	switch {
	case !found:
		d.add("kubelet directory", blind, d.dirs.kubelet+": in no mount of the table", "")
	case m.Propagation&mountns.Shared == 0:
		d.add("kubelet directory", failed, fmt.Sprintf("%s is on %s: what drivers publish does not come out of their containers",
			d.dirs.kubelet, m), "mount --make-rshared "+m.Point)
	default:
		d.add("kubelet directory", fine, fmt.Sprintf("%s, on %s", d.dirs.kubelet, m), "")
	}
}

// servers asks every mount that asks somebody.
func (d *doctor) servers() {
	var asked []mountns.Mount
	for _, m := range d.machine.own().Table.Mounts {
		if needsServer(m.FSType) {
			asked = append(asked, m)
		}
	}
	answers := make([]string, len(asked))
	var g errgroup.Group
	g.SetLimit(16)
	for i := range asked {
		g.Go(func() error {
			answers[i] = d.health(asked[i].Point)
			return nil
		})
	}
	_ = g.Wait()
	bad := 0
	for i, a := range answers {
		if a == answersYes {
			continue
		}
		bad++
		d.add("servers", warning, fmt.Sprintf("%s: %s", asked[i], a), "preparectl why "+asked[i].Point)
	}
	if bad == 0 {
		d.add("servers", fine, plural(len(asked), "mount that asks a server answers", "mounts that ask servers answer"), "")
	}
}

// needsServer says that a filesystem asks a process or another machine.
func needsServer(fsType string) bool {
	switch fsType {
	case "fuse", "fuseblk", "nfs", "nfs4", "cifs", "smb3", "ceph", "9p", "virtiofs", "afs", "lustre", "gfs2", "ocfs2":
		return true
	}
	return false
}

// processes sees whether any hangs where it is looked into.
func (d *doctor) processes(ctx context.Context) {
	_, silent, err := uses(ctx, func(*mountns.Use) bool { return false })
	switch {
	case err != nil:
		d.add("processes", blind, err.Error(), "")
	case silent != "":
		d.add("processes", warning, silent, "see what they wait for: /proc/PID/stack")
	default:
		d.add("processes", fine, "all can be looked into", "")
	}
}
