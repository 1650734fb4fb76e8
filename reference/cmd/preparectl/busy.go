package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/reference/co"
	"github.com/csi-prepare/csi-prepare/reference/mountns"
)

// hold is one thing that keeps the subject in use.
type hold struct {
	// Kind is one of the constants below.
	Kind string `json:"kind"`
	// Namespace is the id of the mount namespace, 0 where none is meant.
	Namespace uint64 `json:"mntns_id,omitempty"`
	PID       int    `json:"pid,omitempty"`
	Command   string `json:"command,omitempty"`
	Container string `json:"container,omitempty"`
	// What is the file, the mount or the device.
	What string `json:"what"`
	// MountID is the mount that is kept, or that keeps.
	MountID uint64 `json:"mount_id,omitempty"`
	// Keeps says what is in use by it: "mount", "filesystem" or "device".
	Keeps string `json:"keeps"`

	record *co.Record
	table  *mountns.Mount
}

// The kinds of hold.
const (
	openFile      = "open file"
	workingDir    = "working directory"
	rootDir       = "root directory"
	program       = "running program"
	mappedFile    = "mapped file"
	detachedFile  = "file of a mount in no namespace" // unmounted lazily, or never attached
	mountBelow    = "mount below"
	mountCopy     = "copy of the mount"
	heldNamespace = "namespace held open"
	openDevice    = "open device"
	loopDevice    = "loop device"
	swapArea      = "swap"
	stackedDevice = "device on top"
)

var kindOfUse = map[string]string{
	"fd": openFile, "cwd": workingDir, "root": rootDir, "exe": program, "map": mappedFile,
}

// explanation is who keeps something busy.
type explanation struct {
	Subject *subject `json:"subject"`
	Holds   []hold   `json:"holds"`
	// Namespaces is how many mount namespaces were searched.
	Namespaces int `json:"namespaces"`
	// Answers is what the subject's root answers, "" if it was not asked.
	Answers string `json:"answers,omitempty"`
	// Unseen says what could not be searched, "" if nothing is known to be.
	Unseen string `json:"unseen,omitempty"`
	// Next is the one safe next step.
	Next string `json:"next"`
}

func newBusy() *cobra.Command {
	cmd := &cobra.Command{
		Use:     "explain-busy PATH|VOLUME|DEVICE",
		Aliases: []string{"busy"},
		Short:   "Say who keeps a mount, a volume or a device in use, and what to do next",
		Long: `explain-busy searches every mount namespace and every process for what keeps a
mount, a path, a volume or a device in use: open files, working directories,
programs, mounts below, copies in other namespaces, namespaces that only a
descriptor holds, loop devices, swap, devices on top. It asks no server, so that
one that is dead does not matter.

It cannot see a descriptor that is under way in a socket, files that io_uring
keeps, nor users in the kernel such as an NFS server: it says that nothing was
found, and never that there is nobody.`,
		Example: "  preparectl explain-busy /mnt/data\n  preparectl explain-busy --pid 4711 /data\n" +
			"  preparectl explain-busy /dev/sdb\n  preparectl explain-busy 8:16\n  preparectl explain-busy vol-1 -o json",
		Args: cobra.ExactArgs(1),
	}
	dirs, print := bothDirs(cmd), output(cmd)
	pid := cmd.Flags().Int("pid", 0, "`process` in whose mount namespace a path is")
	cmd.ValidArgsFunction = completeTargets(dirs)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		ctx, cancel := context.WithTimeout(cmd.Context(), limit)
		defer cancel()
		k := &asker{}
		defer k.close()
		e, err := explain(ctx, args[0], *pid, dirs, k)
		if err != nil {
			return failure{err}
		}
		rows := [][]string{}
		for _, h := range e.Holds {
			rows = append(rows, []string{h.Keeps, h.Kind, number(h.Namespace), number(uint64(h.PID)), h.Command, h.Container, h.What})
		}
		if err := print(e, "KEEPS\tBY\tNAMESPACE\tPID\tCOMMAND\tCONTAINER\tWHAT", rows); err != nil {
			return err
		}
		if cmd.Flag("output").Value.String() == "table" {
			e.finish(cmd)
		}
		return nil
	}
	return cmd
}

// finish prints what no table has a place for.
func (e *explanation) finish(cmd *cobra.Command) {
	w := cmd.OutOrStdout()
	fmt.Fprintf(w, "\n%s\n", plain(e.Subject.What))
	if e.Answers != "" && e.Answers != answersYes {
		fmt.Fprintf(w, "its root: %s\n", plain(e.Answers))
	}
	if len(e.Holds) == 0 {
		fmt.Fprintf(w, "not found in %s\n", plural(e.Namespaces, "namespace", "namespaces"))
	}
	if e.Unseen != "" {
		fmt.Fprintf(w, "not searched: %s\n", plain(e.Unseen))
	}
	fmt.Fprintf(w, "next: %s\n", plain(e.Next))
}

func number(n uint64) string {
	if n == 0 {
		return ""
	}
	return strconv.FormatUint(n, 10)
}

func explain(ctx context.Context, arg string, pid int, dirs *places, k *asker) (*explanation, error) {
	m, err := readMachine(ctx)
	if err != nil {
		return nil, err
	}
	records, damaged := dirs.records()
	all, unread := dirs.published(k, m)
	here := m.own()
	if pid != 0 {
		ns, err := mountns.OfPID(pid)
		if err != nil {
			return nil, err
		}
		defer ns.Close()
		if here = m.space(ns.ID()); here == nil {
			return nil, fmt.Errorf("--pid %d: its mount namespace is not among those that could be read", pid)
		}
	}
	s, err := subjectOf(arg, here, m, records, all, k)
	if err != nil {
		return nil, err
	}
	e := &explanation{Subject: s, Holds: []hold{}, Namespaces: len(m.spaces)}
	x := &search{machine: m, subject: s, records: records, copies: s.copies(m)}
	x.mountsBelow()
	silentProcesses, err := x.processes(ctx)
	if err != nil {
		return nil, err
	}
	x.devices()
	e.Holds = append(e.Holds, x.found...)
	var unseen []string
	for _, text := range []string{m.partial, silentProcesses} {
		if text != "" {
			unseen = append(unseen, text)
		}
	}
	for _, err := range []error{damaged, unread} {
		if err != nil {
			unseen = append(unseen, err.Error())
		}
	}
	e.Unseen = strings.Join(unseen, "; ")
	if len(s.Mounts) > 0 && s.Mounts[0].Namespace == m.own().ID {
		e.Answers = k.health(s.Mounts[0].Mount.Point)
	}
	e.Next = e.next()
	return e, nil
}

// search is the search for holds of one subject.
type search struct {
	*machine
	subject *subject
	records []co.Record
	copies  []placed
	found   []hold
}

func (x *search) add(h hold) { x.found = append(x.found, h) }

// mountsBelow finds what others have mounted on the subject's mounts, and for
// a path what is mounted below it.
func (x *search) mountsBelow() {
	for _, p := range x.subject.Mounts {
		space := x.space(p.Namespace)
		children := space.Table.Children(p.Mount.ID)
		for i := range children {
			c := &children[i]
			if x.subject.has(c.ID) || x.subject.Inside != "" && !below(c.Point, x.subject.Inside) {
				continue
			}
			x.add(hold{
				Kind: mountBelow, Keeps: "mount", Namespace: space.ID, What: c.String(), MountID: c.ID,
				record: madeBy(x.records, space.ID, c.ID), table: c,
			})
		}
	}
}

// processes finds what processes have of it, and in which namespaces.
func (x *search) processes(ctx context.Context) (silent string, err error) {
	copies := map[uint64]bool{}
	spaces := map[uint64]bool{}
	for _, c := range x.copies {
		copies[c.Mount.ID] = true
		spaces[x.space(c.Namespace).Inode] = true
	}
	inside, attached := x.subject.Inside, map[uint64]bool{}
	for i := range x.spaces {
		for _, m := range x.spaces[i].Table.Mounts {
			attached[m.ID] = true
		}
	}
	wanted := func(u *mountns.Use) bool {
		switch {
		case u.Namespace != 0:
			return spaces[u.Namespace]
		case u.Block:
			return x.subject.Device != nil && *x.subject.Device == device{u.NodeMajor, u.NodeMinor}
		case x.subject.has(u.Mount), copies[u.Mount]:
			return true
		}
		// Where not every table was read, a mount that is in none may be in another.
		return x.partial == "" && !attached[u.Mount] && x.subject.whole(device{u.Major, u.Minor})
	}
	found, silent, err := uses(ctx, wanted)
	if err != nil {
		return "", err
	}
	keepers := map[uint64][]mountns.Use{} // of namespaces, by inode
	for _, u := range found {
		h := hold{Kind: kindOfUse[u.By], PID: u.PID, Command: u.Command, What: u.Path, MountID: u.Mount, Keeps: "filesystem"}
		switch {
		case u.Namespace != 0:
			keepers[u.Namespace] = append(keepers[u.Namespace], u)
			continue
		case u.Block:
			h.Kind, h.Keeps = openDevice, "device"
		case x.subject.has(u.Mount):
			if inside != "" && !below(u.Path, inside) {
				continue
			}
			h.Keeps = "mount"
		case !attached[u.Mount]:
			h.Kind = detachedFile
		}
		if u.FD >= 0 {
			h.What = fmt.Sprintf("fd %d: %s", u.FD, u.Path)
		}
		h.Namespace = x.namespaceOf(u.Mount)
		h.Container = containerOf(u.PID)
		x.add(h)
	}
	x.namespaces(keepers)
	return silent, nil
}

func (x *search) namespaceOf(mount uint64) uint64 {
	for i := range x.spaces {
		if _, found := x.spaces[i].Table.ByID(mount); found {
			return x.spaces[i].ID
		}
	}
	return 0
}

// namespaces tells of each copy who is in its namespace, or what else keeps
// the namespace.
func (x *search) namespaces(keepers map[uint64][]mountns.Use) {
	for i := range x.copies {
		c := &x.copies[i]
		space := x.space(c.Namespace)
		h := hold{
			Kind: mountCopy, Keeps: "filesystem", Namespace: space.ID, What: c.Mount.String(), MountID: c.Mount.ID,
			record: madeBy(x.records, space.ID, c.Mount.ID), table: &c.Mount,
		}
		of := keepers[space.Inode]
		in := slices.IndexFunc(of, func(u mountns.Use) bool { return u.By == "ns" })
		switch {
		case space.ID == x.own().ID: // everybody is in it
		case in >= 0:
			h.PID, h.Command, h.Container = of[in].PID, of[in].Command, containerOf(of[in].PID)
		default:
			h.Kind = heldNamespace
			h.What += x.keptBy(space, of, &h)
		}
		x.add(h)
	}
}

// keptBy says what keeps a namespace that no process is in.
func (x *search) keptBy(s *space, of []mountns.Use, h *hold) string {
	if len(of) > 0 {
		h.PID, h.Command, h.Container = of[0].PID, of[0].Command, containerOf(of[0].PID)
		return fmt.Sprintf("; no process is in the namespace, kept by descriptor %d", of[0].FD)
	}
	name := fmt.Sprintf("mnt:[%d]", s.Inode)
	for i := range x.spaces {
		for _, m := range x.spaces[i].Table.Mounts {
			if m.FSType == "nsfs" && m.Root == name {
				return "; no process is in the namespace, kept by the file " + m.Point
			}
		}
	}
	return "; no process is in the namespace, and what keeps it was not found"
}

// devices finds what the kernel has on the device, and loop devices and swap
// whose files are in the subject.
func (x *search) devices() {
	if d := x.subject.Device; d != nil {
		dir := "/sys/dev/block/" + d.String()
		names, _ := os.ReadDir(dir + "/holders")
		for _, n := range names {
			x.add(hold{Kind: stackedDevice, Keeps: "device", What: "/dev/" + n.Name()})
		}
		x.partitions(dir)
	}
	loops, _ := filepath.Glob("/sys/block/loop*/loop/backing_file")
	for _, file := range loops {
		text, err := os.ReadFile(file)
		name := strings.Split(file, "/")[3]
		if err == nil && x.backs(name, strings.TrimSuffix(string(text), "\n")) {
			x.add(hold{Kind: loopDevice, Keeps: "mount", What: "/dev/" + name + " on " + strings.TrimSpace(string(text))})
		}
	}
	swaps, _ := os.ReadFile("/proc/swaps")
	for line := range strings.Lines(string(swaps)) {
		f := strings.Fields(line)
		if len(f) < 2 || f[0] == "Filename" {
			continue
		}
		var st unix.Stat_t
		onDevice := x.subject.Device != nil && f[1] == "partition" && unix.Stat(f[0], &st) == nil &&
			device{unix.Major(st.Rdev), unix.Minor(st.Rdev)} == *x.subject.Device
		if onDevice || f[1] == "file" && x.subject.contains(x.own().ID, f[0]) {
			x.add(hold{Kind: swapArea, Keeps: "device", What: f[0]})
		}
	}
}

// partitions tells which partitions of a disk are mounted.
func (x *search) partitions(dir string) {
	files, _ := filepath.Glob(dir + "/*/partition")
	for _, file := range files {
		text, err := os.ReadFile(filepath.Join(filepath.Dir(file), "dev"))
		d, ok := parseDevice(strings.TrimSpace(string(text)))
		if err != nil || !ok {
			continue
		}
		for _, p := range deviceSubject(d, x.machine).Mounts {
			x.add(hold{
				Kind: stackedDevice, Keeps: "device", Namespace: p.Namespace, MountID: p.Mount.ID,
				What: filepath.Base(filepath.Dir(file)) + ": " + p.Mount.String(),
			})
		}
	}
}

// backs says that a loop device is on a file of the subject: by the device of
// its filesystem, if the subject has all of that, or by its path.
func (x *search) backs(name, file string) bool {
	if x.subject.contains(x.own().ID, strings.TrimSuffix(file, " (deleted)")) {
		return true
	}
	fd, err := unix.Open("/dev/"+name, unix.O_RDONLY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return false
	}
	defer unix.Close(fd)
	info, err := unix.IoctlLoopGetStatus64(fd)
	return err == nil && x.subject.whole(device{unix.Major(info.Device), unix.Minor(info.Device)})
}
