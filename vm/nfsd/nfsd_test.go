package nfsd

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func TestMain(m *testing.M) {
	MainIfServer()
	os.Exit(m.Run())
}

// The server is mounted by the kernel's client in both its protocols, and what
// is written there is in the server's own directory.
func TestKernelServerAndClient(t *testing.T) {
	kernelHasNFS(t)
	h, err := Start(t.Context(), t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := h.Close(); err != nil {
			t.Error(err)
		}
	})
	if err := h.Serve(); err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Join(h.Root, "export", "volumes", "a"), 0o777); err != nil {
		t.Fatal(err)
	}
	if err := h.Export("/export"); err != nil {
		t.Fatal(err)
	}
	// Version 3 first: it asks for a handle before any client is known.
	for _, tt := range []struct{ name, fstype, data string }{
		{"3", "nfs", "vers=3,addr=" + Address4 + ",mountaddr=" + Address4 + ",proto=tcp,mountproto=tcp,nolock"},
		{"3 on IPv6", "nfs", "vers=3,addr=" + Address6 + ",mountaddr=" + Address6 + ",proto=tcp6,mountproto=tcp6,nolock"},
		{"4.0", "nfs4", "vers=4.0,addr=" + Address4},
		{"4.2", "nfs4", "vers=4.2,addr=" + Address4},
		{"4.2 on IPv6", "nfs4", "vers=4.2,proto=tcp6,addr=" + Address6},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir := t.TempDir()
			if err := unix.Mount("server:/export/volumes/a", dir, tt.fstype, 0, tt.data+",soft,timeo=300"); err != nil {
				t.Fatal(err)
			}
			defer func() {
				if err := unix.Unmount(dir, 0); err != nil {
					t.Error(err)
				}
			}()
			if err := os.WriteFile(filepath.Join(dir, "file"), []byte(tt.name), 0o600); err != nil {
				t.Fatal(err)
			}
			got, err := os.ReadFile(filepath.Join(h.Root, "export", "volumes", "a", "file"))
			if err != nil || string(got) != tt.name {
				t.Errorf("the server has %q, %v; want %q", got, err, tt.name)
			}
		})
	}
}

func kernelHasNFS(t *testing.T) {
	t.Helper()
	types, err := os.ReadFile("/proc/filesystems")
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(types), "nfsd\n") {
		t.Skip("this kernel has no NFS server; the guest of 'make vm' has")
	}
}
