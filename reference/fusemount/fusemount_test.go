package fusemount

import (
	"context"
	"errors"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/csi-prepare/csi-prepare/reference/handoff"
	"github.com/csi-prepare/csi-prepare/reference/kernel"
	"github.com/csi-prepare/csi-prepare/reference/mountns"
	"github.com/csi-prepare/csi-prepare/reference/mountspec"
)

// readTable attaches a mount in a namespace of its own and reads its line.
func readTable(t *testing.T, m *os.File) mountns.Mount {
	t.Helper()
	ns, err := mountns.New(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	id, err := kernel.UniqueID(int(m.Fd()), "")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if err := ns.Do(t.Context(), func() error {
		return kernel.MoveMountAt(int(m.Fd()), "", unix.AT_FDCWD, dir, 0)
	}); err != nil {
		t.Fatal(err)
	}
	got, err := ns.Lookup(t.Context(), id)
	if err != nil || len(got) != 1 {
		t.Fatalf("%v, %v", got, err)
	}
	return got[0]
}

func TestAMountIsMadeAsThePolicyHasIt(t *testing.T) {
	for name, c := range map[string]struct {
		policy     Policy
		parameters []mountspec.Parameter
		with       []string
		without    []string
	}{
		"nothing asked for": {
			with: []string{"user_id=7", "group_id=8", "allow_other", "default_permissions", "max_read=1048576"},
		},
		"less than the cap": {
			policy:     Policy{MaxRead: 131072},
			parameters: []mountspec.Parameter{{Key: "max_read", Text: "65536"}},
			with:       []string{"max_read=65536"},
		},
		"more than the cap": {
			policy:     Policy{MaxRead: 131072},
			parameters: []mountspec.Parameter{{Key: "max_read", Text: "4194304"}},
			with:       []string{"max_read=131072"},
		},
		"the server's own permissions": {
			policy:  Policy{ServerPermissions: true},
			without: []string{"default_permissions"},
		},
		"the kernel's, asked for": {
			policy:     Policy{ServerPermissions: true},
			parameters: []mountspec.Parameter{{Key: "default_permissions"}},
			with:       []string{"default_permissions"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := request
			r.UserID, r.GroupID, r.Parameters = 7, 8, c.parameters
			_, m := mount(t, c.policy, r)
			got := readTable(t, m)
			if got.Type() != "fuse.test" || got.Attr&mountns.AttrNosuid == 0 || got.Attr&mountns.AttrNodev == 0 {
				t.Errorf("type %s, attributes %s", got.Type(), got.Attributes())
			}
			for _, w := range c.with {
				if !strings.Contains(got.SBOptions, w) {
					t.Errorf("options %q: want %s", got.SBOptions, w)
				}
			}
			for _, w := range c.without {
				if strings.Contains(got.SBOptions, w) {
					t.Errorf("options %q: want no %s", got.SBOptions, w)
				}
			}
		})
	}
}

func TestAMountIsRefused(t *testing.T) {
	needFUSE(t)
	for name, c := range map[string]struct {
		policy Policy
		change func(*handoff.FUSERequest)
		want   codes.Code
	}{
		"owner": {
			Policy{Owner: func(uid, _ uint32) bool { return uid == 5 }},
			func(*handoff.FUSERequest) {}, codes.PermissionDenied,
		},
		"a rule": {
			Policy{}, func(r *handoff.FUSERequest) { r.Subtype = "a.b" }, codes.InvalidArgument,
		},
		"beyond 32 bits": {
			Policy{}, func(r *handoff.FUSERequest) {
				r.Parameters = []mountspec.Parameter{{Key: "max_read", Text: "9999999999"}}
			}, codes.InvalidArgument,
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := request
			c.change(&r)
			_, _, err := c.policy.Mount(t.Context(), key, r)
			var refused *handoff.Refusal
			if !errors.As(err, &refused) || refused.Code != c.want {
				t.Errorf("got %v", err)
			}
		})
	}
}

func TestTheKernelsWordsNameTheParameter(t *testing.T) {
	needFUSE(t)
	fs, err := kernel.OpenFS("fuse")
	if err != nil {
		t.Fatal(err)
	}
	defer fs.Close()
	err = refusal(fs.SetString("blksize", "4096"))
	var refused *handoff.Refusal
	if !errors.As(err, &refused) || !strings.Contains(refused.Message, "blksize") || refused.Code != codes.InvalidArgument {
		t.Errorf("got %v", err)
	}
}

func TestAServerThatAnswersIsProven(t *testing.T) {
	device, m := mount(t, Policy{}, request)
	serve(t, device)
	device.Close()
	if err := Prove(t.Context(), m); err != nil {
		t.Error(err)
	}
	m.Close()
}

func TestAServerThatNeverAnswersIsFoundOut(t *testing.T) {
	for name, read := range map[string]bool{"and never reads": false, "but reads": true} {
		t.Run(name, func(t *testing.T) {
			device, m := mount(t, Policy{}, request)
			if read { // the waiter could not be killed now
				buf := make([]byte, 1<<20)
				if _, err := device.Read(buf); err != nil {
					t.Fatal(err)
				}
			}
			if err := Prove(soon(t), m); !errors.Is(err, ErrUnanswered) {
				t.Errorf("got %v", err)
			}
			if err := Abort(t.Context(), m); err != nil {
				t.Fatal(err)
			}
			if err := Prove(t.Context(), m); !errors.Is(err, unix.ENOTCONN) {
				t.Errorf("after the abort: %v", err)
			}
		})
	}
}

func TestADeadServerIsNotConnected(t *testing.T) {
	device, m := mount(t, Policy{}, request)
	device.Close()
	if err := Prove(t.Context(), m); !errors.Is(err, unix.ENOTCONN) {
		t.Errorf("got %v", err)
	}
	if err := Abort(t.Context(), m); err != nil {
		t.Errorf("abort of an ended connection: %v", err)
	}
}

func TestAnAbortLeavesOthersAlone(t *testing.T) {
	device, m := mount(t, Policy{}, request)
	_, hung := mount(t, Policy{}, request)
	serve(t, device)
	device.Close()
	if err := Abort(t.Context(), hung); err != nil {
		t.Fatal(err)
	}
	if err := Prove(t.Context(), m); err != nil {
		t.Errorf("a foreign connection was aborted: %v", err)
	}
	m.Close()
}

func TestAControlKeepsNoMountAndFollowsNoNumber(t *testing.T) {
	device, m := mount(t, Policy{}, request)
	number, err := ofMount(int(m.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	c, err := OpenControl(number)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	m.Close()
	if _, err := device.Read(make([]byte, 1<<20)); !errors.Is(err, unix.ENODEV) {
		t.Fatalf("the server of a mount that is gone reads: %v", err)
	}
	device.Close()
	// The numbers of later connections: the kernel gives a free one again.
	var next *os.File
	for range 1 << 12 {
		d, m := mount(t, Policy{}, request)
		if n, err := ofMount(int(m.Fd())); err != nil || n != number {
			m.Close()
			d.Close()
			continue
		}
		serve(t, d)
		d.Close()
		next = m
		break
	}
	if err := c.Abort(); err != nil {
		t.Error(err)
	}
	if next == nil {
		t.Skip("the kernel did not give the number again")
	}
	if err := Prove(t.Context(), next); err != nil {
		t.Errorf("another connection of that number was aborted: %v", err)
	}
	next.Close()
}

func TestAControlAborts(t *testing.T) {
	_, m := mount(t, Policy{}, request)
	number, err := ofMount(int(m.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	c, err := OpenControl(number)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := c.Abort(); err != nil {
		t.Fatal(err)
	}
	if err := Prove(t.Context(), m); !errors.Is(err, unix.ENOTCONN) {
		t.Errorf("got %v", err)
	}
}

func TestAbortWantsAFUSEMount(t *testing.T) {
	needFUSE(t)
	f, err := os.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := Abort(t.Context(), f); err == nil {
		t.Error("a directory of the node was taken for a connection")
	}
}

func TestADeviceIsMatchedToItsMount(t *testing.T) {
	d1, m1 := mount(t, Policy{}, request)
	d2, m2 := mount(t, Policy{}, request)
	for _, c := range []struct {
		device, mount *os.File
		want          bool
	}{{d1, m1, true}, {d2, m2, true}, {d1, m2, false}, {d2, m1, false}} {
		if got, err := Same(c.device, c.mount); err != nil || got != c.want {
			t.Errorf("got %v, %v, want %v", got, err, c.want)
		}
	}
	unmounted, err := openDevice()
	if err != nil {
		t.Fatal(err)
	}
	defer unmounted.Close()
	if _, err := Same(unmounted, m1); err == nil {
		t.Error("a device that was never mounted has a connection")
	}
}

func TestADeadMountIsReplaced(t *testing.T) {
	device, dead := mount(t, Policy{}, request)
	next, m := mount(t, Policy{}, request)
	serve(t, next)
	next.Close()
	ns, err := mountns.New(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	dir := t.TempDir()
	ids := func() (all []mountns.Mount) {
		table, err := ns.Table(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return table.At(dir)
	}
	if err := ns.Do(t.Context(), func() error {
		clone, err := kernel.OpenTree(int(dead.Fd()), "", unix.OPEN_TREE_CLONE)
		if err != nil {
			return err
		}
		defer unix.Close(clone)
		attr := unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY | unix.MOUNT_ATTR_NOEXEC}
		if err := kernel.MountSetattr(clone, &attr, false); err != nil {
			return err
		}
		if err := kernel.MoveMountAt(clone, "", unix.AT_FDCWD, dir, 0); err != nil {
			return err
		}
		if err := Replace(soon(t), m, dir, nil); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("of a server that hangs: %v", err)
		}
		before := ids()
		device.Close()
		if err := Replace(t.Context(), m, dir, nil); err != nil {
			return err
		}
		_, err = os.ReadDir(dir)
		after := ids()
		if len(before) != 1 || len(after) != 1 || after[0].ID == before[0].ID || after[0].Attr != before[0].Attr {
			t.Errorf("before %v, after %v", before, after)
		}
		if err := Replace(t.Context(), m, dir, nil); !errors.Is(err, unix.EBUSY) {
			t.Errorf("of a server that lives: %v", err)
		}
		return err
	}); err != nil {
		t.Error(err)
	}
	ns.Close()
	m.Close()
}
