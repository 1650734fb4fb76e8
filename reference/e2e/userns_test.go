package e2e

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/reference/mountns"
	"github.com/csi-prepare/csi-prepare/reference/mountspec"
	"github.com/csi-prepare/csi-prepare/reference/mountspec/oci"
	"github.com/csi-prepare/csi-prepare/reference/perform"
)

// userNamespace is one with the mapping of [bundle.mapped].
func (n *node) userNamespace() *os.File {
	n.Helper()
	ids := []syscall.SysProcIDMap{{ContainerID: 0, HostID: 100000, Size: 65536}}
	cmd := exec.Command("sleep", "600")
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: syscall.CLONE_NEWUSER, UidMappings: ids, GidMappings: ids, Pdeathsig: unix.SIGKILL,
	}
	if err := cmd.Start(); err != nil {
		n.cannot("no user namespace: %v", err)
	}
	f, err := os.Open(fmt.Sprintf("/proc/%d/ns/user", cmd.Process.Pid))
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	must(n.T, err)
	n.Cleanup(func() { f.Close() })
	return f
}

// shed tries to take attributes off a mount, as root of a user namespace with
// all privileges there.
const shed = `
for options in remount,bind,rw,dev,suid,exec rw,dev,suid,exec,remount,bind; do
  mount -o $options /data 2>/dev/null && echo shed
done
`

// TestAContainerInAUserNamespace has ids mapped, and attributes that its root
// cannot take off: they were set on the node before the namespace was made.
func TestAContainerInAUserNamespace(t *testing.T) {
	each(t, "user namespace", func(n *node, e *engine, v *volume, o *outcome) {
		v.specs[0].IDMapSupported = true
		users := n.userNamespace()
		at := n.place(v, func(o *perform.Options) { o.IDMap = users })
		entries, err := oci.Convert(v.specs, []mountspec.Place{at},
			oci.Options{Destination: place, Features: e.features(), UserNamespace: true, Locked: e.locked})
		a, script := v.specs[0].Attributes, look
		switch {
		case e.locked:
			script = shed + look
		case a.Readonly || a.Noexec:
			o.refused(n.T, err)
			return
		}
		must(n.T, err)
		b := newBundle(n.T, script+`ls -ln /data/answer /data/word | sed 's/^/owner /'`)
		b.mapped()
		b.add(entries)
		out, err := e.run(n.T, b)
		if out == "" {
			n.Fatal(err)
		}
		n.hasWord(v, strings.ReplaceAll(out, ",idmapped", ""), mountspec.Policy{})
		if strings.Contains(out, "shed") {
			n.Errorf("attributes were taken off:\n%s", out)
		}
		for _, owner := range parse(out)["owner"] {
			if f := strings.Fields(owner); len(f) > 3 && (f[2] != "0" || f[3] != "0") {
				n.Errorf("owned by %s:%s in the container, want 0:0: %s", f[2], f[3], owner)
			}
		}
	})
}

// TestWhatIsNotGivenToAUserNamespace is what would be made or set inside it.
func TestWhatIsNotGivenToAUserNamespace(t *testing.T) {
	each(t, "given, user namespace", func(n *node, e *engine, v *volume, o *outcome) {
		_, err := oci.Convert(v.specs, []mountspec.Place{{Found: v.found}},
			oci.Options{Destination: place, NodeNetwork: true, Features: e.features(), UserNamespace: true})
		o.refused(n.T, err)
	})
}

// TestAttributesSetInsideAUserNamespace tells what the kernel lets its root do
// with a mount that came when the namespace was there already. It is why a
// read-only volume goes to such a container by way of a private place.
func TestAttributesSetInsideAUserNamespace(t *testing.T) {
	onEach(t, "running, user namespace", "read-only bind", func(n *node, e *engine, o *outcome) {
		v := n.bind()
		v.specs[0].Attributes = mountspec.Attributes{Readonly: true}
		b := newBundle(n.T, "")
		b.mapped()
		r := e.start(n.T, b)
		ns, err := mountns.OfPID(r.pid)
		must(n.T, err)
		defer ns.Close()
		undo := n.perform(v, perform.Target{Namespace: ns, Path: place})
		defer undo()
		out, err := r.exec(n.T, look)
		must(n.T, err)
		n.hasWord(v, out, mountspec.Policy{})
		out, _ = r.exec(n.T, shed)
		o.Note = "attributes hold"
		if strings.Contains(out, "shed") {
			o.Note = "the container's root can take attributes off: where they must hold, perform in private and bind"
		}
	})
}
