package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"
)

// leftover is a directory that may be left of a volume.
type leftover struct {
	Path string `json:"path"`
	// Class is one of the constants below.
	Class string `json:"class"`
	// Detail says what is there, Next what to do; for a dead directory that
	// is what reap does.
	Detail string `json:"detail,omitempty"`
	Next   string `json:"next"`
	// Removed says that reap has removed it.
	Removed bool `json:"removed,omitempty"`

	ofCO bool
}

// The classes of leftovers.
const (
	deadDirectory = "dead directory" // empty, and mounted on in no namespace
	liveMount     = "live mount"
	deadServer    = "dead server"
	silentServer  = "silent"
	notEmpty      = "not empty"
	tooYoung      = "too young" // may be under way
	podRuns       = "pod runs"
)

func newReap() *cobra.Command {
	var yes bool
	var age time.Duration
	cmd := &cobra.Command{
		Use:   "reap [DIRECTORY...]",
		Short: "Find directories that volumes have left; with --yes remove the dead ones",
		Long: `reap looks at the directories of the CO that no record is of, at those of a kubelet
with nothing mounted, or at the directories that are named. It says what is
mounted there, in any namespace, and what undoes it. It changes nothing; with
--yes it removes dead directories: empty, old enough, and with no mount on or
below them in any mount namespace. Each goes by one rmdir(2), which removes
neither files nor what is mounted.

It exits 1 if there is something that it does not remove.`,
		Example: "  preparectl reap\n  preparectl reap --yes\n  preparectl reap /var/lib/kubelet/pods/UID/volumes/kubernetes.io~csi/NAME/mount",
	}
	dirs, print := bothDirs(cmd), output(cmd)
	cmd.Flags().BoolVar(&yes, "yes", false, "remove dead directories")
	cmd.Flags().DurationVar(&age, "older-than", 10*time.Minute, "leave directories alone that have changed within so `long`")
	cmd.ValidArgsFunction = func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
		return nil, cobra.ShellCompDirectiveFilterDirs
	}
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		ctx, cancel := context.WithTimeout(cmd.Context(), time.Minute)
		defer cancel()
		k := &asker{}
		defer k.close()
		r := &reaper{asker: k, age: age}
		for _, a := range args {
			if !filepath.IsAbs(a) || filepath.Clean(a) == "/" {
				return fmt.Errorf("%s: has to be an absolute path, and not the root", a)
			}
		}
		found, errs := r.find(ctx, dirs, args)
		if yes {
			errs = errors.Join(errs, r.remove(ctx, cmd, dirs.state, found))
		}
		if found == nil {
			found = []leftover{}
		}
		kept, rows := 0, [][]string{}
		for _, l := range found {
			next := l.Next
			if l.Removed {
				next = "removed"
			} else if l.Class != deadDirectory || yes {
				kept++
			}
			rows = append(rows, []string{l.Path, l.Class, l.Detail, next})
		}
		if err := print(found, "PATH\tCLASS\tDETAIL\tNEXT", rows); err != nil {
			return err
		}
		if kept > 0 {
			errs = errors.Join(errs, errors.New(plural(kept, "directory is", "directories are")+" not reaped"))
		}
		if errs != nil {
			return failure{errs}
		}
		return nil
	}
	return cmd
}

type reaper struct {
	*asker
	age     time.Duration
	machine *machine
}

// find looks at the named directories, or else at all that may be left.
func (r *reaper) find(ctx context.Context, dirs *places, args []string) (found []leftover, errs error) {
	var err error
	if len(args) == 0 {
		// Directories before the ledger: what comes in between is known.
		var all []string
		for _, sub := range []string{"prepare", "staging"} {
			a, err := r.ask("list", path.Join(dirs.state, sub))
			if err != nil && !errors.Is(err, os.ErrNotExist) {
				errs = errors.Join(errs, err)
			}
			for _, name := range a.Names {
				all = append(all, path.Join(dirs.state, sub, name))
			}
		}
		records, damaged := dirs.records()
		if damaged != nil {
			return nil, fmt.Errorf("nothing is reaped while a record cannot be read: %w", damaged)
		}
		known := map[string]bool{}
		for i := range records {
			known[records[i].PreparePath], known[records[i].StagingPath] = true, true
		}
		for _, dir := range all {
			if !known[dir] {
				found = append(found, leftover{Path: dir, ofCO: true})
			}
		}
	}
	if r.machine, err = readMachine(ctx); err != nil {
		return nil, errors.Join(errs, err)
	}
	var running string
	if len(args) == 0 {
		all, err := dirs.published(r.asker, r.machine)
		errs = errors.Join(errs, err)
		for i := range all {
			if p := &all[i]; p.left() {
				if running == "" {
					running = cgroups()
				}
				l := leftover{Path: p.Path}
				if p.Pod != "" && strings.Contains(running, p.Pod) {
					l.Class, l.Detail, l.Next = podRuns, "pod "+p.Pod+" has processes on this node", "leave it to the kubelet"
				}
				found = append(found, l)
			}
		}
	}
	for _, a := range args {
		found = append(found, leftover{Path: filepath.Clean(a)})
	}
	there := found[:0]
	for _, l := range found {
		if l.Class != "" || r.judge(&l) {
			there = append(there, l)
		}
	}
	return there, errs
}

// judge finds the class of a leftover; one that is not there is none.
func (r *reaper) judge(l *leftover) bool {
	mounts := r.machine.on(l.Path)
	if len(mounts) > 0 {
		l.Class, l.Next = liveMount, "preparectl explain-busy "+l.Path
		l.Detail = fmt.Sprintf("%s in mount namespace %d", mounts[0].Mount, mounts[0].Namespace)
		if more := len(mounts) - 1; more > 0 {
			l.Detail += " and " + plural(more, "more", "more")
		}
		if top, found := r.machine.own().Table.Top(l.Path); found {
			l.Detail = top.String()
			switch r.health(l.Path) {
			case answersGone:
				l.Class, l.Next = deadServer, "umount "+l.Path
			case answersNot:
				l.Class, l.Next = silentServer, "see to its server, or abort its connection; then: umount "+l.Path
			}
		}
		return true
	}
	a, err := r.ask("lstat", l.Path)
	var silentPath *SilentError
	switch {
	case errors.Is(err, os.ErrNotExist):
		return false
	case errors.As(err, &silentPath):
		l.Class, l.Detail, l.Next = silentServer, err.Error(), "see to the server of the filesystem it is on"
		return true
	case err != nil:
		l.Class, l.Detail, l.Next = unreadable, err.Error(), "look at it by hand"
		return true
	case !a.directory():
		l.Class, l.Detail, l.Next = notEmpty, "it is no directory", "look at it by hand"
		return true
	}
	names, err := r.ask("list", l.Path)
	switch {
	case err != nil:
		l.Class, l.Detail, l.Next = unreadable, err.Error(), "look at it by hand"
	case len(names.Names) > 0:
		l.Class, l.Next = notEmpty, "see whose files these are; never remove them recursively"
		l.Detail = fmt.Sprintf("%d names in it, %q the first", len(names.Names), names.Names[0])
	case time.Since(time.Unix(a.Time, 0)) < r.age:
		l.Class, l.Next = tooYoung, "wait: it may be under way (--older-than)"
	case r.machine.partial != "":
		l.Class, l.Detail, l.Next = unreadable, r.machine.partial, "repeat as root"
	default:
		l.Class, l.Next = deadDirectory, "rmdir "+l.Path
	}
	return true
}

// remove removes dead directories, each after a new look at the tables.
func (r *reaper) remove(ctx context.Context, cmd *cobra.Command, state string, found []leftover) error {
	var errs []error
	var held bool
	for i := range found {
		l := &found[i]
		if l.Class != deadDirectory {
			continue
		}
		if l.ofCO && !held {
			// A CO that runs sees to its directories itself.
			c, err := opened(cmd, state, noPolicy)
			if err != nil {
				return errors.Join(append(errs, err)...)
			}
			defer func() { _ = c.Close() }()
			held = true
		}
		var err error
		if r.machine, err = readMachine(ctx); err != nil {
			return errors.Join(append(errs, err)...)
		}
		if !r.judge(l) || l.Class != deadDirectory {
			continue
		}
		if _, err := r.ask("rmdir", l.Path); err != nil && !errors.Is(err, unix.ENOENT) {
			errs = append(errs, err)
			continue
		}
		l.Removed = true
	}
	return errors.Join(errs...)
}

// cgroups is the text of every process's cgroup file.
func cgroups() string {
	var all strings.Builder
	files, _ := filepath.Glob("/proc/[0-9]*/cgroup")
	for _, f := range files {
		text, _ := os.ReadFile(f)
		all.Write(text)
	}
	return strings.ReplaceAll(all.String(), "_", "-")
}
