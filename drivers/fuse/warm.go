package fuse

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/drivers/fuse/attach"
)

// warm has a process that waits for an order do what takes its time at first:
// the call it is then for does not pay for it.
func warm(log *slog.Logger) {
	err := errors.Join(attach.Reserve(serverOptions(log)), populate())
	if err != nil {
		log.Info("the first order will take longer", "error", err)
	}
}

// populate maps the pages of this program, which are in the page cache, so
// that code does not fault the first time it runs (madvise(2), Linux 5.14).
func populate() error {
	const populateRead = 22 // MADV_POPULATE_READ
	maps, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		return err
	}
	for line := range strings.Lines(string(maps)) {
		// 00400000-00a5d000 r-xp 00000000 fe:00 1234   /usr/bin/prepare-driver
		f := strings.Fields(line)
		if len(f) < 6 || !strings.HasPrefix(f[5], "/") || f[1][0] != 'r' || f[1][1] == 'w' {
			continue
		}
		first, last, _ := strings.Cut(f[0], "-")
		from, err := strconv.ParseUint(first, 16, 64)
		to, err2 := strconv.ParseUint(last, 16, 64)
		if err := errors.Join(err, err2); err != nil {
			return fmt.Errorf("/proc/self/maps: %w", err)
		}
		if _, _, errno := unix.Syscall(unix.SYS_MADVISE, uintptr(from), uintptr(to-from), populateRead); errno != 0 {
			return os.NewSyscallError("madvise", errno)
		}
	}
	return nil
}
