package e2e

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/csi-prepare/csi-prepare/reference/mountspec/oci"
)

// bundle is a container before it runs.
type bundle struct {
	id, dir string
	spec    *specs.Spec
}

// image has a static busybox, a name for each of its applets, and the place
// for a volume.
var image = sync.OnceValues(func() (string, error) {
	busybox, err := exec.LookPath("busybox")
	if err != nil {
		return "", err
	}
	applets, err := exec.Command(busybox, "--list").Output()
	if err != nil {
		return "", err
	}
	dir := filepath.Join(base, "image")
	for _, d := range []string{"bin", "proc", "dev", "tmp", "data"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o755); err != nil {
			return "", err
		}
	}
	from, err := os.Open(busybox)
	if err != nil {
		return "", err
	}
	defer from.Close()
	to, err := os.OpenFile(filepath.Join(dir, "bin/busybox"), os.O_CREATE|os.O_WRONLY, 0o755)
	if err != nil {
		return "", err
	}
	if _, err := io.Copy(to, from); err != nil {
		return "", err
	}
	for name := range strings.FieldsSeq(string(applets)) {
		if name != "busybox" {
			if err := os.Symlink("busybox", filepath.Join(dir, "bin", name)); err != nil {
				return "", err
			}
		}
	}
	return dir, to.Close()
})

var bundles atomic.Int32

// newBundle makes a container that runs a script of the shell.
func newBundle(t *testing.T, script string) *bundle {
	t.Helper()
	root, err := image()
	if err != nil {
		t.Skipf("no image: %v (Debian: busybox-static)", err)
	}
	b := &bundle{id: fmt.Sprintf("%s-%d", filepath.Base(base), bundles.Add(1))}
	b.dir = filepath.Join(base, b.id)
	must(t, os.MkdirAll(b.dir, 0o755))
	// Runtimes make mount points in the root, and leave them.
	must(t, exec.Command("cp", "-al", root, filepath.Join(b.dir, "rootfs")).Run())
	capabilities := []string{
		"CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_MKNOD", "CAP_SETUID", "CAP_SETGID", "CAP_KILL",
	}
	b.spec = &specs.Spec{
		Version: "1.0.2",
		Process: &specs.Process{
			Args: []string{"/bin/sh", "-c", script}, Cwd: "/", Env: []string{"PATH=/bin"},
			Capabilities: &specs.LinuxCapabilities{
				Bounding: capabilities, Effective: capabilities, Permitted: capabilities,
			},
			NoNewPrivileges: true,
		},
		Root: &specs.Root{Path: filepath.Join(b.dir, "rootfs")},
		Mounts: []specs.Mount{
			{Destination: "/proc", Type: "proc", Source: "proc", Options: []string{"nosuid", "noexec", "nodev"}},
			{Destination: "/dev", Type: "tmpfs", Source: "tmpfs", Options: []string{"nosuid", "mode=755", "size=64k"}},
		},
		Linux: &specs.Linux{
			CgroupsPath: "/" + cgroupParent + "/" + b.id,
			Namespaces: []specs.LinuxNamespace{
				{Type: specs.PIDNamespace}, {Type: specs.MountNamespace}, {Type: specs.IPCNamespace}, {Type: specs.UTSNamespace},
			},
			Resources: &specs.LinuxResources{Devices: []specs.LinuxDeviceCgroup{{Access: "rwm"}}},
		},
	}
	return b
}

// add appends what a converter made.
func (b *bundle) add(e oci.Entries) {
	b.spec.Mounts = append(b.spec.Mounts, e.Mounts...)
	b.spec.Linux.Devices = append(b.spec.Linux.Devices, e.Devices...)
	b.spec.Linux.Resources.Devices = append(b.spec.Linux.Resources.Devices, e.DeviceRules...)
}

// mapped gives the container a user namespace in which 0 is the node's 100000.
func (b *bundle) mapped() {
	b.spec.Linux.Namespaces = append(b.spec.Linux.Namespaces, specs.LinuxNamespace{Type: specs.UserNamespace})
	ids := []specs.LinuxIDMapping{{ContainerID: 0, HostID: 100000, Size: 65536}}
	b.spec.Linux.UIDMappings, b.spec.Linux.GIDMappings = ids, ids
	for _, set := range []*[]string{
		&b.spec.Process.Capabilities.Bounding, &b.spec.Process.Capabilities.Effective, &b.spec.Process.Capabilities.Permitted,
	} {
		*set = append(*set, "CAP_SYS_ADMIN") // in its own namespace alone
	}
}

func (b *bundle) write(t *testing.T) {
	t.Helper()
	text, err := json.MarshalIndent(b.spec, "", "  ")
	must(t, err)
	must(t, os.WriteFile(filepath.Join(b.dir, "config.json"), text, 0o600))
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
