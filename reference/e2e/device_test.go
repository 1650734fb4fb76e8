package e2e

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/csi-prepare/csi-prepare/reference/mountns"
	"github.com/csi-prepare/csi-prepare/reference/mountspec"
	"github.com/csi-prepare/csi-prepare/reference/mountspec/oci"
	"github.com/csi-prepare/csi-prepare/reference/perform"
)

// device is a block volume whose first bytes are a word.
func (n *node) device(readonly bool) *volume {
	n.Helper()
	node, major, minor, sequence := n.loop()
	word := strings.Repeat("w", 32)
	d, err := os.OpenFile(node, os.O_WRONLY|os.O_SYNC, 0)
	must(n.T, err)
	defer d.Close()
	_, err = d.WriteAt([]byte(word), 0)
	must(n.T, err)
	return &volume{
		specs: []mountspec.Spec{{
			Kind:       &mountspec.BlockDevice{Major: major, Minor: minor, Diskseq: sequence},
			Attributes: mountspec.Attributes{Readonly: readonly},
		}},
		word: word, found: node,
		answered: func() string {
			text := make([]byte, 16)
			d, err := os.Open(node)
			must(n.T, err)
			defer d.Close()
			_, err = d.ReadAt(text, 512)
			must(n.T, err)
			return string(text)
		},
	}
}

// lookAtDevices reads and writes the volume, and tries a device that it makes.
func lookAtDevices(other *volume) string {
	b := other.specs[0].Kind.(*mountspec.BlockDevice)
	return fmt.Sprintf(`
echo "word $(head -c 32 /dev/volume)"
printf fromwithin | dd of=/dev/volume bs=512 seek=1 conv=notrunc 2>&1 && sync && echo wrote
mknod /dev/other b %d %d && echo made
head -c 1 /dev/other && echo read other
ls -l /dev/volume | sed 's/^/node /'
`, b.Major, b.Minor)
}

// onEach runs a test for every engine.
func onEach(t *testing.T, way, what string, test func(n *node, e *engine, o *outcome)) {
	for i := range engines {
		e := &engines[i]
		if testing.Short() && e.containerd {
			continue
		}
		t.Run(e.name, func(t *testing.T) {
			o := tell(t, e.name, way, what)
			if why := e.lacks(); why != "" {
				o.cannot(t, why)
			}
			n := newNode(t)
			test(n, e, o)
		})
	}
}

func TestADeviceIsGivenAndNoOther(t *testing.T) {
	for _, readonly := range []bool{false, true} {
		access := "rw"
		if readonly {
			access = "r"
		}
		t.Run(access, func(t *testing.T) {
			onEach(t, "given", "device "+access, func(n *node, e *engine, _ *outcome) {
				v, other := n.device(readonly), n.device(false)
				entries, err := oci.Convert(v.specs, []mountspec.Place{{Found: v.found}},
					oci.Options{Destination: "/dev/volume", Features: e.features()})
				must(n.T, err)
				b := newBundle(n.T, lookAtDevices(other))
				b.add(entries)
				out, err := e.run(n.T, b)
				if out == "" {
					n.Fatal(err)
				}
				n.usable(v, out, readonly)
			})
		})
	}
}

// usable checks that one device can be used, as asked, and no other.
func (n *node) usable(v *volume, out string, readonly bool) {
	n.Helper()
	if got := parse(out)["word"]; len(got) != 1 || got[0] != v.word {
		n.Errorf("read %q, want %q", got, v.word)
	}
	wrote, answered := strings.Contains(out, "wrote"), strings.HasPrefix(v.answered(), "fromwithin")
	if wrote == readonly || answered == readonly {
		n.Errorf("read-only %v; the container wrote %v, the device has it %v", readonly, wrote, answered)
	}
	if !strings.Contains(out, "made") || strings.Contains(out, "read other") {
		n.Errorf("another device could be read, or not even be made")
	}
	if n.Failed() {
		n.Logf("all of it:\n%s", out)
	}
}

// TestADeviceIsPerformedIntoARunningContainer shows that the node is the CO's
// to make and that the rules of the container's cgroup limit it: they are of
// its configuration.
func TestADeviceIsPerformedIntoARunningContainer(t *testing.T) {
	onEach(t, "running", "device", func(n *node, e *engine, _ *outcome) {
		v, other := n.device(false), n.device(false)
		k := v.specs[0].Kind.(*mountspec.BlockDevice)
		for _, allowed := range []bool{true, false} {
			b := newBundle(n.T, "")
			if allowed {
				major, minor := int64(k.Major), int64(k.Minor)
				b.spec.Linux.Resources.Devices = append(b.spec.Linux.Resources.Devices,
					specs.LinuxDeviceCgroup{Allow: true, Type: "b", Major: &major, Minor: &minor, Access: "rw"})
			}
			r := e.start(n.T, b)
			ns, err := mountns.OfPID(r.pid)
			must(n.T, err)
			defer ns.Close()
			undo := n.perform(v, perform.Target{Namespace: ns, Path: "/dev/volume"}, func(o *perform.Options) {
				o.Policy.CreateTarget = true
			})
			out, err := r.exec(n.T, lookAtDevices(other))
			if out == "" {
				n.Fatal(err)
			}
			if allowed {
				n.usable(v, out, false)
			} else if strings.Contains(out, v.word) || strings.Contains(out, "wrote") {
				n.Errorf("no rule allows the device, and it was used:\n%s", out)
			}
			undo()
		}
	})
}
