package main

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/csi-prepare/csi-prepare/reference/mountns"
	"github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
)

func TestEachOptionHasAVerdict(t *testing.T) {
	text := func(key, value string) *preparev1alpha1.FsParameter {
		return &preparev1alpha1.FsParameter{Key: key, Value: &preparev1alpha1.FsParameter_Text{Text: value}}
	}
	spec := &preparev1alpha1.MountSpec{
		Kind: &preparev1alpha1.MountSpec_Filesystem{Filesystem: &preparev1alpha1.FilesystemMount{
			FsType: "ext4",
			Parameters: []*preparev1alpha1.FsParameter{
				text("commit", "60"), text("errors", "remount-ro"), text("password", stripped), text("quiet", "x"),
			},
		}},
		Attributes: &preparev1alpha1.MountAttributes{Noexec: true, Nosymfollow: true},
	}
	m := &mountns.Mount{
		ID: 7, Point: "/data", Attr: mountns.AttrNoexec | mountns.AttrNodev | mountns.AttrNosuid,
		SBOptions: "commit=5,errors=remount-ro,password=canary,data=ordered,stripe=8",
	}
	got := map[string]string{}
	for _, o := range diffMount(m, spec, []string{"noexec", "ro", "commit=60", "data=ordered", "stripe=", "nofail", "bogus"}) {
		got[o.Name] = o.Verdict
		if o.Name == "password" && (o.Effective != "" || o.Spec != "password="+stripped) {
			t.Errorf("a secret is shown: %+v", o)
		}
	}
	want := map[string]string{
		"noexec":      applied, // asked for, in the spec, in effect
		"nosymfollow": ignored, // in the spec alone
		"nodev":       addedTo,
		"nosuid":      addedTo,
		"ro":          dropped,
		"commit":      ignored, // the superblock has another
		"errors":      applied,
		"password":    notShown,
		"quiet":       notShown,
		"data":        applied, // not in the spec, and in effect
		"stripe":      noValue,
		"nofail":      notKernels,
		"bogus":       dropped, // the plugin made nothing of it
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
}

func TestAReadOnlySuperblockIsReadOnly(t *testing.T) {
	for _, o := range diffMount(&mountns.Mount{SBReadonly: true}, nil, []string{"ro"}) {
		if o.Name == "ro" && o.Verdict != applied {
			t.Errorf("got %+v", o)
		}
	}
}

func TestContainersAreToldByTheirCgroup(t *testing.T) {
	const id = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"
	for cgroup, want := range map[string]string{
		"0::/": "",
		"0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod11111111_2222_3333_4444_555555555555.slice/cri-containerd-" + id + ".scope": "pod 11111111-2222-3333-4444-555555555555, container 0123456789ab",
		"4:memory:/docker/" + id: "container 0123456789ab",
		"1:name=systemd:/kubepods/besteffort/pod11111111-2222-3333-4444-555555555555/" + id: "pod 11111111-2222-3333-4444-555555555555, container 0123456789ab",
	} {
		if got := containerIn(cgroup); got != want {
			t.Errorf("%s: %q, want %q", cgroup, got, want)
		}
	}
}

// TestWhatIsNearestGoesFirst has one hold of several kinds: the next step is
// about the mount itself before it is about its filesystem.
func TestWhatIsNearestGoesFirst(t *testing.T) {
	s := &subject{Mounts: []placed{{Mount: mountns.Mount{Point: "/data"}}}}
	copyHeld := hold{Kind: mountCopy, Keeps: "filesystem", PID: 2, Command: "other", table: &mountns.Mount{Point: "/else"}}
	open := hold{Kind: openFile, Keeps: "mount", PID: 1, Command: "app", What: "fd 3: /data/f"}
	for _, c := range []struct {
		name  string
		e     explanation
		wants string
	}{
		{"both", explanation{Subject: s, Holds: []hold{copyHeld, open}}, "end process 1 (app), or have it let go of fd 3: /data/f; then unmount /data"},
		{
			"the filesystem alone",
			explanation{Subject: s, Holds: []hold{copyHeld}},
			"nothing was found to keep the mount itself: umount /data. To have its filesystem free as well, " +
				"end process 2 (other), or have it unmount /else: it has a copy in mount namespace 0",
		},
		{"a dead server", explanation{Subject: s, Answers: answersGone}, "umount /data: its server is gone, and that is not what makes a mount busy"},
	} {
		if got := c.e.next(); got != c.wants {
			t.Errorf("%s:\n%s\nwant\n%s", c.name, got, c.wants)
		}
	}
}

func TestNamesOfOthersDoNotMoveTheCursor(t *testing.T) {
	if got := plain("a\x1b[2Jb\nc\td\u202e"); got != "a�[2Jb�c�d�" {
		t.Errorf("got %q", got)
	}
}
