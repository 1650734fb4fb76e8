package handoff

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
)

// statx asks about f itself and never waits for a FUSE server or a network.
func statx(f *os.File, st *unix.Statx_t) error {
	raw, err := f.SyscallConn()
	if err != nil {
		return err
	}
	if cerr := raw.Control(func(fd uintptr) {
		err = unix.Statx(int(fd), "", unix.AT_EMPTY_PATH|unix.AT_STATX_DONT_SYNC|unix.AT_NO_AUTOMOUNT, unix.STATX_TYPE, st)
	}); cerr != nil {
		return cerr
	}
	return err
}

// isMountRoot tells the root of a mount, as fsmount(2) and open_tree(2) give
// it, from every other descriptor. Whether it is detached, and of which type,
// is seen only by attaching it in a private mount namespace.
func isMountRoot(f *os.File) error {
	const rule = "offer: the descriptor has to be a detached mount, as fsmount or open_tree with OPEN_TREE_CLONE make it"
	flags, err := fileFlags(f)
	if err != nil {
		return fmt.Errorf("handoff: flags of an offered descriptor: %w", err)
	}
	var st unix.Statx_t
	if err := statx(f, &st); err != nil {
		return fmt.Errorf("handoff: statx of an offered descriptor: %w", err)
	}
	if flags&unix.O_PATH == 0 || st.Attributes_mask&st.Attributes&unix.STATX_ATTR_MOUNT_ROOT == 0 {
		return refuse(codes.InvalidArgument, rule)
	}
	return nil
}

// IsFUSEDevice returns an error unless f is open on /dev/fuse, character
// device 10:229, for reading and writing. Both sides look before they use one
// they received.
func IsFUSEDevice(f *os.File) error {
	raw, err := f.SyscallConn()
	if err != nil {
		return err
	}
	var st unix.Stat_t
	if cerr := raw.Control(func(fd uintptr) { err = unix.Fstat(int(fd), &st) }); cerr != nil {
		return cerr
	}
	if err != nil {
		return fmt.Errorf("stat of a descriptor: %w", err)
	}
	flags, err := fileFlags(f)
	if err != nil {
		return fmt.Errorf("flags of a descriptor: %w", err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFCHR || st.Rdev != unix.Mkdev(10, 229) ||
		flags&unix.O_PATH != 0 || flags&unix.O_ACCMODE != unix.O_RDWR {
		return errors.New("the descriptor has to be /dev/fuse (character device 10:229), open for reading and writing")
	}
	return nil
}

// ConnectionOf is the number of the FUSE connection a device is of, as
// /proc/self/fdinfo has it. It is good for as long as the device is held:
// numbers are given again.
func ConnectionOf(device *os.File) (number uint32, err error) {
	raw, err := device.SyscallConn()
	if err != nil {
		return 0, err
	}
	var text []byte
	cerr := raw.Control(func(fd uintptr) { text, err = os.ReadFile(fmt.Sprintf("/proc/self/fdinfo/%d", fd)) })
	if err := errors.Join(cerr, err); err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(text)) {
		if value, ok := strings.CutPrefix(line, "fuse_connection:"); ok {
			n, err := strconv.ParseUint(strings.TrimSpace(value), 10, 32)
			return uint32(n), err
		}
	}
	return 0, errors.New("the descriptor is of no FUSE connection")
}

// connectionBehind is the number of the connection behind a FUSE mount: the
// minor number of its device.
func connectionBehind(mount *os.File) (uint32, error) {
	var st unix.Statx_t
	if err := statx(mount, &st); err != nil {
		return 0, err
	}
	if st.Dev_major != 0 {
		return 0, errors.New("it is no mount of a FUSE connection")
	}
	return st.Dev_minor, nil
}

func fileFlags(f *os.File) (flags int, err error) {
	raw, err := f.SyscallConn()
	if err != nil {
		return 0, err
	}
	if cerr := raw.Control(func(fd uintptr) { flags, err = unix.FcntlInt(fd, unix.F_GETFL, 0) }); cerr != nil {
		return 0, cerr
	}
	return flags, err
}
