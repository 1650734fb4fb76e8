package kernel

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// Probing on a thread of its own namespace must leave that namespace, and the
// number of descriptors, as they were.
func TestProbingLeavesNothing(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	t.Log(Probe())
	result := make(chan string, 1)
	StartThread(func() {
		defer close(result)
		if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
			result <- err.Error()
			return
		}
		_ = unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, "")
		before, err := ListMounts(nil, 0, Root, 0)
		if err != nil {
			return // a kernel without listing
		}
		home, err := unix.Open("/proc/thread-self/ns/mnt", unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			result <- err.Error()
			return
		}
		defer unix.Close(home)
		descriptors := func() int {
			names, _ := os.ReadDir("/proc/self/fd")
			return len(names)
		}
		open := descriptors()
		var f Features
		f.probe()
		if now := descriptors(); now != open {
			result <- fmt.Sprintf("%d descriptors are open, %d were", now, open)
			return
		}
		if f != Probe() {
			result <- "probing twice differs: " + f.String()
			return
		}
		ns, err := NSID(home)
		if err != nil {
			return
		}
		after, err := ListMounts(nil, ns, Root, 0)
		if err != nil || !slices.Equal(before, after) {
			result <- "the mounts have changed"
		}
	})
	if problem := <-result; problem != "" {
		t.Error(problem)
	}
}

func TestFeaturesAsText(t *testing.T) {
	var none Features
	count := 0
	none.Each(func(string, bool) { count++ })
	words := strings.Fields(none.String())
	if len(words) != count || words[0] != "no-new-mount-api" {
		t.Errorf("%q", none)
	}
	if got := (Features{NewMountAPI: true}).String(); !strings.HasPrefix(got, "new-mount-api no-mount-setattr ") {
		t.Errorf("%q", got)
	}
}

func FuzzParseMountStat(f *testing.F) {
	whole := make([]byte, 600)
	whole[0], whole[1] = 0x58, 2
	for i := 8; i < 160; i++ {
		whole[i] = byte(i)
	}
	f.Add(whole)
	f.Add(make([]byte, statmountFixed))
	f.Fuzz(func(_ *testing.T, b []byte) {
		if len(b) >= statmountFixed { // what the kernel fills is never shorter
			parseMountStat(b)
		}
	})
}

// The calls a bind and its undo are made of.
func TestAllocations(t *testing.T) {
	if f := Probe(); !f.UniqueID || !f.NewMountAPI || !f.Statmount || !f.Openat2 {
		t.Skip("the kernel lacks what is measured")
	}
	own, err := unix.Open("/proc/thread-self/ns/mnt", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(own)
	root, err := OpenTree(unix.AT_FDCWD, "/", 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(root)
	id, err := UniqueID(root, "")
	if err != nil {
		t.Fatal(err)
	}
	ids := make([]uint64, 0, 1<<16)
	for _, c := range []struct {
		name string
		max  float64
		call func() error
	}{
		{"UniqueID of a descriptor", 1, func() error { _, err := UniqueID(root, ""); return err }},
		{"UniqueID of a path", 1, func() error { _, err := UniqueID(unix.AT_FDCWD, "/proc"); return err }},
		{"OpenTree and close", 1, func() error {
			fd, err := OpenTree(root, "", 0)
			if err == nil {
				err = unix.Close(fd)
			}
			return err
		}},
		{"OpenInRoot and close", 1, func() error {
			fd, err := OpenInRoot(root, "proc", unix.O_PATH)
			if err == nil {
				err = unix.Close(fd)
			}
			return err
		}},
		{"ListMounts", 0, func() error { _, err := ListMounts(ids, 0, Root, 0); return err }},
		{"NewestMount", 0, func() error { _, err := NewestMount(0); return err }},
		{"StatMount of the basics", 0, func() error { _, err := StatMount(0, id, StatBasic); return err }},
		{"StatMount of everything", 1, func() error { _, err := StatMount(0, id, StatAll); return err }},
		{"NSStat", 0, func() error { _, err := NSStat(own); return err }},
	} {
		var failed error
		got := testing.AllocsPerRun(100, func() {
			if err := c.call(); err != nil {
				failed = err
			}
		})
		if failed != nil || got > c.max {
			t.Errorf("%s: %v allocations, at most %v; %v", c.name, got, c.max, failed)
		}
	}
}
