package sanity

import (
	"bytes"
	"fmt"
	"os"
	"strconv"
	"strings"
)

// startOf identifies a process together with its number, which is given again:
// the time it was started, in clock ticks since boot (proc_pid_stat(5)). It is
// "" for one that is gone, or has ended and is only to be waited for.
func startOf(pid int) string {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	end := bytes.LastIndexByte(text, ')') // of the name, which may hold anything
	if err != nil || end < 0 {
		return ""
	}
	const state, starttime = 0, 19
	f := strings.Fields(string(text[end+1:]))
	if len(f) <= starttime || f[state] == "Z" || f[state] == "X" {
		return ""
	}
	return f[starttime]
}

// connectionsOf are the FUSE connections of whose device a process has a
// descriptor, as the kernel numbers them.
func connectionsOf(pid int) []uint32 {
	dir := fmt.Sprintf("/proc/%d/fdinfo", pid)
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil // it is gone
	}
	var all []uint32
	for _, e := range entries {
		text, err := os.ReadFile(dir + "/" + e.Name())
		if err != nil {
			continue
		}
		for line := range strings.Lines(string(text)) {
			if value, ok := strings.CutPrefix(line, "fuse_connection:"); ok {
				if n, err := strconv.ParseUint(strings.TrimSpace(value), 10, 32); err == nil {
					all = append(all, uint32(n))
				}
			}
		}
	}
	return all
}
