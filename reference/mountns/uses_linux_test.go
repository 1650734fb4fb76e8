package mountns

import (
	"context"
	"os"
	"testing"

	"github.com/csi-prepare/csi-prepare/reference/kernel"
)

func TestUsesTellFilesAndNamespaces(t *testing.T) {
	if !kernel.Probe().UniqueID {
		t.Skip("the kernel has no unique mount ids")
	}
	f, err := os.CreateTemp(t.TempDir(), "f")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	own, err := Own()
	if err != nil {
		t.Fatal(err)
	}
	defer own.Close()
	self := os.Getpid()
	uses, err := Uses(context.Background(), func(u *Use) bool { return u.PID == self })
	if err != nil {
		t.Fatal(err)
	}
	var file, inside, open bool
	for _, u := range uses {
		switch {
		case u.Path == f.Name():
			want, err := kernel.UniqueID(int(f.Fd()), "")
			file = err == nil && u.Mount == want && u.By == "fd" && u.FD == int(f.Fd()) && u.Command != ""
		case u.By == "ns" && u.Namespace == own.Inode():
			inside = true
		case u.By == "fd" && u.Namespace == own.Inode():
			open = true
		}
	}
	if !file || !inside || !open {
		t.Errorf("file %v, in the namespace %v, has it open %v: %+v", file, inside, open, uses)
	}
}
