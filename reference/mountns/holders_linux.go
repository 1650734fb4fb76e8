package mountns

import (
	"context"
	"fmt"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/reference/kernel"
)

// Holder is something that keeps a mount in use.
type Holder struct {
	// PID is the process, Command its name (at most 15 bytes, chosen by itself).
	PID     int    `json:"pid"`
	Command string `json:"command"`
	// By is "fd", "cwd", "root", "exe" or "map".
	By string `json:"by"`
	// FD is the descriptor's number, -1 if By is not fd.
	FD int `json:"fd"`
	// Path is what /proc shows. For a detached mount it begins at the root of
	// that mount.
	Path string `json:"path"`
}

// String is "pid 42 (sleep) fd 3 /srv/data/file".
func (h Holder) String() string {
	by := h.By
	if h.FD >= 0 {
		by += " " + strconv.Itoa(h.FD)
	}
	return fmt.Sprintf("pid %d (%s) %s %s", h.PID, readable(h.Command), by, readable(h.Path))
}

// Holders looks through every process of /proc for what holds the mount with
// the unique id: open files, working directories, roots, programs, mapped
// files. It finds the holders of a mount that is in no table any more, because
// it was unmounted lazily: nothing else does. It needs CAP_SYS_PTRACE for the
// processes of others, and does not see a descriptor that is under way in a
// socket, a loop or swap file, or a mount that is stacked on this one.
//
// Files are looked at by their links in /proc, which asks no FUSE server; a
// network filesystem may ask its server. A process that cannot be looked into
// because something there hangs keeps Holders waiting until ctx ends; the
// holders found in all others are then returned with an error that names it. A
// kernel without unique ids (before 6.8) is ENOTSUP.
func Holders(ctx context.Context, id uint64) ([]Holder, error) {
	if _, err := kernel.UniqueID(unix.AT_FDCWD, "/"); err != nil {
		return nil, fmt.Errorf("mountns: holders of mount %d: %w", id, err)
	}
	uses, err := Uses(ctx, func(u *Use) bool { return u.Mount == id && u.By != "ns" })
	found := make([]Holder, len(uses))
	for i := range uses {
		found[i] = uses[i].Holder
	}
	if err != nil {
		return found, fmt.Errorf("mountns: holders of mount %d: %w", id, err)
	}
	return found, nil
}

func readlinkAt(dir int, name string) string {
	buf := make([]byte, unix.PathMax)
	n, err := unix.Readlinkat(dir, name, buf)
	if err != nil {
		return ""
	}
	return string(buf[:n])
}
