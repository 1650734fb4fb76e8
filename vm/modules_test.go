package vm

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestClosure(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{
		"modules.dep": "fs/nfsd/nfsd.ko: fs/lockd/lockd.ko net/sunrpc.ko\n" +
			"fs/lockd/lockd.ko: net/sunrpc.ko\nnet/sunrpc.ko:\nfs/nfs/nfs-v3.ko.xz: net/sunrpc.ko\n",
		"modules.builtin": "fs/ext4/ext4.ko\n",
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, err := closure(dir, []string{"ext4", "nfs_v3", "nfsd"})
	if err != nil {
		t.Fatal(err)
	}
	want := []string{"net/sunrpc.ko", "fs/nfs/nfs-v3.ko.xz", "fs/lockd/lockd.ko", "fs/nfsd/nfsd.ko"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	if _, err := closure(dir, []string{"zfs"}); err == nil || !strings.Contains(err.Error(), "zfs") {
		t.Errorf("got %v, want the missing module by name", err)
	}
}
