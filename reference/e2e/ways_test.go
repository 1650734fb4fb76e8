package e2e

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/csi-prepare/csi-prepare/reference/mountns"
	"github.com/csi-prepare/csi-prepare/reference/mountspec"
	"github.com/csi-prepare/csi-prepare/reference/mountspec/oci"
	"github.com/csi-prepare/csi-prepare/reference/perform"
)

// look is what a container does with its volume: it tells what it finds.
const look = `
echo "word $(cat /data/word)"
(echo fromwithin >/data/answer) 2>&1 && echo wrote
if [ -d /data/below ]; then
  echo "below $(cat /data/below/word)"
  (echo fromwithin >/data/below/answer) 2>&1 && echo wrote below
fi
sed -n 's/^/mount /p' /proc/self/mountinfo
ls -l /proc/1/fd | sed 's/^/fd /'
`

// seen is what a container has told.
type seen map[string][]string

func parse(out string) seen {
	s := seen{}
	for line := range strings.Lines(out) {
		word, rest, _ := strings.Cut(strings.TrimSpace(line), " ")
		s[word] = append(s[word], rest)
	}
	return s
}

// mounts are the lines of the container's table at and below a path.
func (s seen) mounts(path string) (found [][]string) {
	for _, line := range s["mount"] {
		if f := strings.Fields(line); len(f) > 6 && (f[4] == path || strings.HasPrefix(f[4], path+"/")) {
			found = append(found, f)
		}
	}
	return found
}

// hasWord checks that the volume is there, is writable as asked, has the
// attributes that were asked for, and that nothing else came with it.
func (n *node) hasWord(v *volume, out string, policy mountspec.Policy) {
	n.Helper()
	s, attributes := parse(out), v.specs[0].Attributes
	if got := s["word"]; len(got) != 1 || got[0] != v.word {
		n.Fatalf("the volume has %q, want %q; all of it:\n%s", got, v.word, out)
	}
	wrote, answered := strings.Contains(out, "wrote"), strings.Contains(v.answered(), "fromwithin")
	if wrote == attributes.Readonly || answered == attributes.Readonly {
		n.Errorf("read-only %v; the container wrote %v, the backend has it %v:\n%s", attributes.Readonly, wrote, answered, out)
	}
	set, _ := policy.Effective(v.specs[0])
	want := strings.Split((&mountns.Mount{Attr: uint64(set)}).Attributes(), ",")
	found := s.mounts("/data")
	if len(found) == 0 {
		n.Fatalf("no mount:\n%s", out)
	}
	for _, f := range found {
		got := strings.Split(f[5], ",")
		slices.Sort(got)
		slices.Sort(want)
		if !slices.Equal(got, want) {
			n.Errorf("%s has %v, want %v", f[4], got, want)
		}
		if f[6] != "-" {
			n.Errorf("%s propagates: %s", f[4], f[6])
		}
	}
	if v.specs[0].Attributes.Recursive && len(s["below"]) == 0 {
		n.Errorf("nothing is below:\n%s", out)
	}
	for _, fd := range s["fd"] {
		if strings.Contains(fd, "fuse") || strings.Contains(fd, " -> /data") || strings.Contains(fd, " -> "+base+"/node") {
			n.Errorf("a descriptor came with it: %s", fd)
		}
	}
}

// refused checks that a conversion is refused by naming a field.
func (o *outcome) refused(t *testing.T, err error) {
	t.Helper()
	var lost *mountspec.ConsumerError
	if !errors.As(err, &lost) || lost.Field == "" {
		t.Fatalf("got %v, want a *ConsumerError", err)
	}
	o.Note = fmt.Sprintf("refused: %s: %s", lost.Field, lost.Reason)
}

const place = "/data"

// each runs a test for every engine and every volume, each beginning and
// ending with the same mounts on the node.
func each(t *testing.T, way string, test func(n *node, e *engine, v *volume, o *outcome)) {
	for i := range engines {
		e := &engines[i]
		if testing.Short() && e.containerd {
			continue // starting the daemon takes long
		}
		for _, kind := range volumes {
			t.Run(e.name+"/"+kind.name, func(t *testing.T) {
				o := tell(t, e.name, way, kind.name)
				if why := e.lacks(); why != "" {
					o.cannot(t, why)
				}
				n := newNode(t)
				before := n.table()
				var why string
				t.Run("run", func(t *testing.T) { // so that it is over, clean-up included
					n.T = t
					defer func() { why = n.lacking }()
					test(n, e, kind.make(n), o)
				})
				n.T = t
				if why != "" {
					o.cannot(t, why)
				}
				if c := mountns.Diff(before, n.table()); !c.Empty() {
					t.Errorf("left on the node:\n%s", c)
				}
			})
		}
	}
}

// TestGivenToTheRuntime has the mount specs in the configuration. What that
// cannot carry is refused.
func TestGivenToTheRuntime(t *testing.T) {
	each(t, "given", func(n *node, e *engine, v *volume, o *outcome) {
		options := oci.Options{Destination: place, NodeNetwork: true, Features: e.features()}
		entries, err := oci.Convert(v.specs, []mountspec.Place{{Found: v.found}}, options)
		kind := v.specs[0].Kind
		_, isBind := kind.(*mountspec.Bind)
		_, isFilesystem := kind.(*mountspec.Filesystem)
		if !isBind && !isFilesystem || v.specs[0].Attributes.Recursive && options.Features == nil {
			o.refused(n.T, err)
			return
		}
		must(n.T, err)
		b := newBundle(n.T, look)
		b.add(entries)
		out, err := e.run(n.T, b)
		if isFilesystem && e.late {
			if err == nil {
				n.Errorf("the runtime has mounted a device that the rules do not allow")
			}
			o.Note = "refused by the runtime, which mounts when the device rules hold"
			return
		}
		must(n.T, err)
		n.hasWord(v, out, mountspec.Policy{})
	})
}

// TestGivenAsADescriptor has the CO make the mount, in no namespace, and the
// runtime bind it by the path of the CO's descriptor.
func TestGivenAsADescriptor(t *testing.T) {
	each(t, "descriptor", func(n *node, e *engine, v *volume, o *outcome) {
		if v.made == nil {
			o.Note = "not made with fsmount(2): a clone goes another way"
			path := mountspec.Place{Performed: fmt.Sprintf("/proc/%d/fd/9", os.Getpid())}
			_, err := oci.Convert(v.specs, []mountspec.Place{path}, oci.Options{Destination: place, Features: e.features()})
			o.refused(n.T, err)
			return
		}
		set, _ := mountspec.Policy{}.Effective(v.specs[0])
		made := v.made(set)
		defer made.Close()
		entries, err := oci.Convert(v.specs,
			[]mountspec.Place{{Performed: fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), made.Fd()), Attributes: set, Private: true}},
			oci.Options{Destination: place, NodeNetwork: true, Features: e.features()})
		must(n.T, err)
		b := newBundle(n.T, look)
		b.add(entries)
		out, err := e.run(n.T, b)
		must(n.T, err)
		must(n.T, made.Close())
		n.hasWord(v, out, mountspec.Policy{})
	})
}

// TestIntoARunningContainer performs in the container's mount namespace.
func TestIntoARunningContainer(t *testing.T) {
	each(t, "running", func(n *node, e *engine, v *volume, _ *outcome) {
		r := e.start(n.T, newBundle(n.T, ""))
		ns, err := mountns.OfPID(r.pid)
		must(n.T, err)
		defer ns.Close()
		before := n.table()
		undo := n.perform(v, perform.Target{Namespace: ns, Path: place})
		if c := mountns.Diff(before, n.table()); !c.Empty() {
			n.Errorf("performed in the container, and on the node there is\n%s", c)
		}
		out, err := r.exec(n.T, look)
		must(n.T, err)
		n.hasWord(v, out, mountspec.Policy{})
		undo()
		out, err = r.exec(n.T, look)
		must(n.T, err)
		if left := parse(out).mounts(place); len(left) > 0 {
			n.Errorf("undone, and the container has %v", left)
		}
	})
}

// TestPerformedInPrivateAndBound performs in a directory of the CO's own,
// which the runtime binds. It works for everything.
func TestPerformedInPrivateAndBound(t *testing.T) {
	each(t, "private", func(n *node, e *engine, v *volume, _ *outcome) {
		entries, err := oci.Convert(v.specs, []mountspec.Place{n.place(v)},
			oci.Options{Destination: place, Features: e.features()})
		must(n.T, err)
		b := newBundle(n.T, look)
		b.add(entries)
		out, err := e.run(n.T, b)
		must(n.T, err)
		n.hasWord(v, out, mountspec.Policy{})
	})
}
