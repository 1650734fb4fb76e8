package perform

import (
	"fmt"
	"os"
	"runtime"

	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/reference/mountspec"
)

// networkTypes are filesystems on a network. To mount one is to talk to its
// server, and to unmount the last mount of one too: NFS ends a session.
var networkTypes = map[string]bool{
	"nfs": true, "nfs4": true, "cifs": true, "smb3": true, "ceph": true, "9p": true,
	"afs": true, "coda": true, "orangefs": true, "gfs2": true, "ocfs2": true, "lustre": true,
}

// remoteTypes are filesystems that ask somebody else: a server on a network, or
// a process that serves them.
var remoteTypes = func() map[string]bool {
	all := map[string]bool{"virtiofs": true, "fuse": true, "fuseblk": true}
	for t := range networkTypes {
		all[t] = true
	}
	return all
}()

// onNetwork says that a spec's own mount is on a network.
func (x *performance) onNetwork(i int) bool {
	switch k := x.specs[i].Kind.(type) {
	case *mountspec.Filesystem:
		return networkTypes[k.Type]
	case *mountspec.Handle:
		return networkTypes[k.FSType]
	}
	return false
}

// enterNetwork brings the thread into a network namespace, and keeps the
// goroutine on it.
func enterNetwork(fd int) error {
	runtime.LockOSThread()
	if err := unix.Setns(fd, unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("enter the network namespace: %w", err)
	}
	return nil
}

// descriptorOf is a copy of a file's descriptor, which stays valid whatever
// becomes of the file.
func descriptorOf(f *os.File) (fd int, done func(), err error) {
	conn, err := f.SyscallConn()
	if err != nil {
		return -1, nil, err
	}
	controlled := conn.Control(func(original uintptr) {
		fd, err = unix.FcntlInt(original, unix.F_DUPFD_CLOEXEC, 0)
	})
	if controlled != nil {
		err = controlled
	}
	if err != nil {
		return -1, nil, fmt.Errorf("the network namespace: %w", err)
	}
	return fd, func() { _ = unix.Close(fd) }, nil
}
