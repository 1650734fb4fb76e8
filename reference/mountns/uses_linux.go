package mountns

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/reference/kernel"
)

// Use is one thing that a process has of the filesystem: a file, a directory it
// is in, the mount namespace it is in or has open.
type Use struct {
	// Holder's By is "ns" besides the values it has elsewhere: the namespace
	// that a thread of the process is in.
	Holder
	// Mount is the unique id of the mount the file is on, attached or not.
	Mount uint64 `json:"mount_id"`
	// Major and Minor are the device of its filesystem, as stat(2) tells it.
	Major uint32 `json:"major"`
	Minor uint32 `json:"minor"`
	// Block says that it is a block device node, of the device NodeMajor and
	// NodeMinor.
	Block     bool   `json:"block,omitempty"`
	NodeMajor uint32 `json:"node_major,omitempty"`
	NodeMinor uint32 `json:"node_minor,omitempty"`
	// Namespace is the inode of the mount namespace it is, 0 if it is none.
	Namespace uint64 `json:"mntns_inode,omitempty"`
}

// Uses looks through every process of /proc, as [Holders] does and with the
// same limits, and returns what match chooses, in order of process. match does
// not get Command and Path, and is called from several goroutines.
func Uses(ctx context.Context, match func(*Use) bool) ([]Use, error) {
	if _, err := kernel.UniqueID(unix.AT_FDCWD, "/"); err != nil {
		return nil, fmt.Errorf("mountns: uses: %w", err)
	}
	each, err := eachProcess(ctx, func(pid string) []Use { return usesIn(pid, match) })
	found := slices.Concat(each...)
	slices.SortStableFunc(found, func(a, b Use) int { return a.PID - b.PID })
	if err != nil {
		return found, fmt.Errorf("mountns: uses: %w", err)
	}
	return found, nil
}

func usesIn(pid string, match func(*Use) bool) []Use {
	dir, err := unix.Open(filepath.Join("/proc", pid), unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil
	}
	defer unix.Close(dir)
	var found []Use
	number, _ := strconv.Atoi(pid)
	check := func(by string, fd int, link string) {
		u := Use{Holder: Holder{PID: number, By: by, FD: fd}}
		if u.look(dir, link) && match(&u) {
			u.Path = readlinkAt(dir, link)
			found = append(found, u)
		}
	}
	seen := map[string]bool{}
	tasks, _ := entries(filepath.Join("/proc", pid, "task"))
	for _, tid := range tasks {
		link := "task/" + tid + "/ns/mnt"
		if name := readlinkAt(dir, link); name != "" && !seen[name] {
			seen[name] = true
			check("ns", -1, link)
		}
	}
	for _, by := range []string{"cwd", "root", "exe"} {
		check(by, -1, by)
	}
	fds, _ := entries(filepath.Join("/proc", pid, "fd"))
	for _, name := range fds {
		fd, _ := strconv.Atoi(name)
		check("fd", fd, "fd/"+name)
	}
	maps, _ := entries(filepath.Join("/proc", pid, "map_files"))
	for _, name := range maps {
		check("map", -1, "map_files/"+name)
	}
	if len(found) > 0 {
		command, _ := os.ReadFile(filepath.Join("/proc", pid, "comm"))
		for i := range found {
			found[i].Command = strings.TrimSuffix(string(command), "\n")
		}
	}
	return found
}

// nsfsDevice is the device that all namespaces are on, as files.
var nsfsDevice = sync.OnceValue(func() [2]uint32 {
	var st unix.Stat_t
	if unix.Stat(ownLink, &st) != nil {
		return [2]uint32{}
	}
	return [2]uint32{unix.Major(st.Dev), unix.Minor(st.Dev)}
})

// look reads where a link of /proc leads, without asking a server.
func (u *Use) look(dir int, link string) bool {
	var st unix.Statx_t
	for {
		err := unix.Statx(dir, link, unix.AT_STATX_DONT_SYNC|unix.AT_NO_AUTOMOUNT, unix.STATX_TYPE|unix.STATX_MNT_ID_UNIQUE, &st)
		if err == nil {
			break
		}
		if err != unix.EINTR {
			return false
		}
	}
	if st.Mask&unix.STATX_MNT_ID_UNIQUE == 0 {
		return false
	}
	u.Mount, u.Major, u.Minor = st.Mnt_id, st.Dev_major, st.Dev_minor
	if st.Mode&unix.S_IFMT == unix.S_IFBLK {
		u.Block, u.NodeMajor, u.NodeMinor = true, st.Rdev_major, st.Rdev_minor
	}
	if nsfs := nsfsDevice(); u.Major == nsfs[0] && u.Minor == nsfs[1] {
		u.Namespace, _ = namespaceName(readlinkAt(dir, link))
	}
	return true
}
