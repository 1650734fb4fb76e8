// Package kernel is the Linux mount interface as this project needs it: the
// system calls golang.org/x/sys lacks (listmount, statmount, the namespace
// walk), thin and EINTR-safe forms of those it has, and a probe that says what
// the running kernel can do.
//
// It is a leaf: it knows no mount spec, keeps no state but the answer of
// [Probe] and pools of buffers, starts no goroutine that outlives a call, and
// starts no process. Descriptors are plain ints, because a perform or an undo
// opens and closes a handful of them in microseconds; whoever receives one
// closes it. Every descriptor is opened close-on-exec.
//
// # Errors
//
// A failed call is an *[os.PathError] or *[os.SyscallError] whose Op or Syscall
// is the name of the system call and which unwraps to the errno, so that
// errors.Is(err, unix.EBUSY) works. Calls on a filesystem context fail with an
// [FSError], which also carries the reason the kernel gave in words.
//
// # Blocking
//
// listmount, statmount, [UniqueID], open_tree, move_mount, mount_setattr,
// openat2 with O_PATH, and umount2 do not wait for the server of a network or
// FUSE filesystem when they stop at the root of its mount. Creating a
// superblock ([FSContext.Create]) may wait for a device or a server, and
// resolving a path through a mount asks its server: do those where they can
// be killed.
//
// # Versions
//
// Nothing here compares kernel versions; distributions port features back and
// sandboxes take them away. The versions named in comments say when a feature
// appeared upstream.
package kernel
