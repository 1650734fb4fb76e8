package perform

import (
	"context"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// holderTime bounds the search for who keeps a mount busy.
	holderTime = 200 * time.Millisecond
	maxHolders = 8
)

// findHolders looks through /proc for processes that use a mount: with their
// working or root directory, their program, an open file or a mapping. It
// asks for mount ids only, which no server has to answer.
func findHolders(ctx context.Context, mount uint64, unique bool) []Holder {
	ctx, cancel := context.WithTimeout(ctx, holderTime)
	defer cancel()
	var found []Holder
	for _, pid := range numbers("/proc") {
		if ctx.Err() != nil || len(found) == maxHolders {
			break
		}
		dir := "/proc/" + pid
		if uses := usesOf(dir, mount, unique); uses != "" {
			n, _ := strconv.Atoi(pid)
			command, _ := os.ReadFile(dir + "/comm")
			found = append(found, Holder{PID: n, Command: strings.TrimSpace(string(command)), Uses: uses})
		}
	}
	return found
}

func usesOf(dir string, mount uint64, unique bool) string {
	for _, link := range []string{"cwd", "root", "exe"} {
		if linkMount(dir+"/"+link, unique) == mount {
			return link
		}
	}
	for _, fd := range numbers(dir + "/fd") {
		if linkMount(dir+"/fd/"+fd, unique) == mount {
			return "fd " + fd
		}
	}
	maps, err := os.ReadDir(dir + "/map_files")
	if err != nil {
		return ""
	}
	for _, m := range maps {
		if linkMount(dir+"/map_files/"+m.Name(), unique) == mount {
			return "map"
		}
	}
	return ""
}

// linkMount returns the id of the mount a link of /proc leads to, 0 for none.
func linkMount(link string, unique bool) uint64 {
	mask := unix.STATX_MNT_ID
	if unique {
		mask = unix.STATX_MNT_ID_UNIQUE
	}
	var st unix.Statx_t
	err := unix.Statx(unix.AT_FDCWD, link, unix.AT_STATX_DONT_SYNC|unix.AT_NO_AUTOMOUNT, mask, &st)
	if err != nil || st.Mask&uint32(mask) == 0 {
		return 0
	}
	return st.Mnt_id
}

// numbers lists the entries of a directory of /proc whose names are numbers.
func numbers(dir string) []string {
	d, err := os.Open(dir)
	if err != nil {
		return nil
	}
	defer d.Close()
	names, _ := d.Readdirnames(-1)
	found := names[:0]
	for _, name := range names {
		if name[0] >= '0' && name[0] <= '9' {
			found = append(found, name)
		}
	}
	return found
}
