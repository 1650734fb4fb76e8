package e2e

import (
	"strings"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/csi-prepare/csi-prepare/reference/mountns"
	"github.com/csi-prepare/csi-prepare/reference/mountspec"
	"github.com/csi-prepare/csi-prepare/reference/perform"
)

// TestADeviceInAUserNamespace gives a device to a container whose root may make
// no node: the CO makes it on the node, owned by who is root in there, and
// attaches it. The device is used as anywhere, and no other can be.
func TestADeviceInAUserNamespace(t *testing.T) {
	onEach(t, "running, user namespace", "device", func(n *node, e *engine, _ *outcome) {
		v, other := n.device(false), n.device(false)
		k := v.specs[0].Kind.(*mountspec.BlockDevice)
		major, minor := int64(k.Major), int64(k.Minor)
		b := newBundle(n.T, "")
		b.mapped()
		b.spec.Linux.Resources.Devices = append(b.spec.Linux.Resources.Devices,
			specs.LinuxDeviceCgroup{Allow: true, Type: "b", Major: &major, Minor: &minor, Access: "rw"})
		r := e.start(n.T, b)
		ns, err := mountns.OfPID(r.pid)
		must(n.T, err)
		defer ns.Close()
		// Nobody on the node makes a file in the tmpfs that is its /dev.
		undo := n.perform(v, perform.Target{Namespace: ns, Path: "/tmp/volume"}, func(o *perform.Options) {
			o.Policy.CreateTarget = true
			o.NodeUID, o.NodeGID, o.NodeMode = 100000, 100000, 0o600
		})
		defer undo()
		out, err := r.exec(n.T, strings.ReplaceAll(lookAtDevices(other), "/dev/volume", "/tmp/volume"))
		if out == "" {
			n.Fatal(err)
		}
		if got := parse(out)["word"]; len(got) != 1 || got[0] != v.word {
			n.Errorf("read %q, want %q", got, v.word)
		}
		if !strings.Contains(out, "wrote") || !strings.HasPrefix(v.answered(), "fromwithin") {
			n.Error("what the container wrote is not on the device")
		}
		if strings.Contains(out, "made") || strings.Contains(out, "read other") {
			n.Error("another device could be made or read")
		}
		if n.Failed() {
			n.Logf("all of it:\n%s", out)
		}
	})
}
