package fusemount

import (
	"fmt"
	"io"
	"log"
	"os"
	"testing"

	"github.com/hanwen/go-fuse/v2/fs"
	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/reference/kernel"
	"github.com/csi-prepare/csi-prepare/reference/mountns"
)

// BenchmarkMountToAttached is the floor of a FUSE volume: what there is to do
// if nothing has to be said to another process. The device is opened and
// mounted, INIT is answered, the mount is seen to answer, cloned and attached.
func BenchmarkMountToAttached(b *testing.B) {
	if os.Geteuid() != 0 {
		b.Skip("making FUSE mounts needs root")
	}
	ns, err := mountns.New(b.Context())
	if err != nil {
		b.Fatal(err)
	}
	defer ns.Close()
	point := b.TempDir()
	quiet := log.New(io.Discard, "", 0)
	err = ns.Do(b.Context(), func() error {
		for b.Loop() {
			device, m, err := Policy{}.Mount(b.Context(), key, request)
			if err != nil {
				return err
			}
			fd, err := unix.FcntlInt(device.Fd(), unix.F_DUPFD_CLOEXEC, 3) // the server's own
			device.Close()
			if err != nil {
				return err
			}
			s, err := fuse.NewServer(fs.NewNodeFS(&fs.Inode{}, &fs.Options{}), fmt.Sprintf("/dev/fd/%d", fd), &fuse.MountOptions{Logger: quiet})
			if err != nil {
				return err
			}
			go s.Serve()
			if err := Prove(b.Context(), m); err != nil {
				return err
			}
			clone, err := kernel.OpenTree(int(m.Fd()), "", unix.OPEN_TREE_CLONE)
			if err != nil {
				return err
			}
			err = kernel.MoveMountAt(clone, "", unix.AT_FDCWD, point, 0)
			unix.Close(clone)
			if err != nil {
				return err
			}
			b.StopTimer()
			if err := kernel.Unmount(point, 0); err != nil {
				return err
			}
			m.Close()
			s.Wait()
			b.StartTimer()
		}
		return nil
	})
	if err != nil {
		b.Fatal(err)
	}
}
