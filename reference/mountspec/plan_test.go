package mountspec

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// current is a kernel with all a plan can use.
var current = Features{MountAPI: true, DetachedTrees: true, ExclusiveCreate: true, UniqueIDs: true, Openat2: true}

func granted(relative string) *Bind {
	return &Bind{Source: PathRef{Base: BaseGranted, Grant: "data", Relative: relative}}
}

func TestPlan(t *testing.T) {
	for _, test := range []struct {
		name  string
		specs []Spec
		f     Features
		p     Policy
		want  string
	}{{
		name:  "a read-only bind is narrowed while it is detached",
		specs: []Spec{{Kind: granted("vol"), Attributes: Attributes{Readonly: true}}},
		f:     current,
		want: `
  1  openat(AT_FDCWD, <GRANTED:data>, O_PATH|O_DIRECTORY|O_CLOEXEC) = base0
  2  openat2(base0, "vol", {O_PATH|O_NOFOLLOW|O_CLOEXEC, RESOLVE_BENEATH|RESOLVE_NO_SYMLINKS|RESOLVE_NO_MAGICLINKS}) = source0
  3  open_tree(source0, "", AT_EMPTY_PATH|OPEN_TREE_CLONE|OPEN_TREE_CLOEXEC) = mount0
  4  mount_setattr(mount0, "", AT_EMPTY_PATH, {set MOUNT_ATTR_RDONLY|MOUNT_ATTR_NOSUID|MOUNT_ATTR_NODEV, clear 0, MS_PRIVATE})
  5  statx(mount0, "", AT_EMPTY_PATH|AT_STATX_DONT_SYNC, STATX_TYPE|STATX_MNT_ID_UNIQUE)
  6  openat2(root, <target>, {O_PATH|O_NOFOLLOW|O_CLOEXEC, RESOLVE_IN_ROOT|RESOLVE_NO_SYMLINKS|RESOLVE_NO_MAGICLINKS}) = target0
  7  statx(target0); statmount(mount of target0)
  8  move_mount(mount0, "", target0, "", MOVE_MOUNT_F_EMPTY_PATH|MOVE_MOUNT_T_EMPTY_PATH), if the parent is shared mount_setattr(mount0, MS_PRIVATE)
  9  statmount(mount0): MOUNT_ATTR_RDONLY|MOUNT_ATTR_NOSUID|MOUNT_ATTR_NODEV, private, at target0
`,
	}, {
		name: "a list becomes visible by one move, and shares its base",
		specs: []Spec{
			{Kind: granted("")},
			{Target: "a/b", Kind: granted("vol"), Attributes: Attributes{Atime: Noatime}},
		},
		f: current,
		p: Policy{CreateTarget: true},
		want: `
  1  openat(AT_FDCWD, <GRANTED:data>, O_PATH|O_DIRECTORY|O_CLOEXEC) = base0
  2  open_tree(base0, "", AT_EMPTY_PATH|OPEN_TREE_CLONE|OPEN_TREE_CLOEXEC) = mount0
  3  mount_setattr(mount0, "", AT_EMPTY_PATH, {set MOUNT_ATTR_NOSUID|MOUNT_ATTR_NODEV, clear 0, MS_PRIVATE})
  4  statx(mount0, "", AT_EMPTY_PATH|AT_STATX_DONT_SYNC, STATX_TYPE|STATX_MNT_ID_UNIQUE)
  5  openat2(base0, "vol", {O_PATH|O_NOFOLLOW|O_CLOEXEC, RESOLVE_BENEATH|RESOLVE_NO_SYMLINKS|RESOLVE_NO_MAGICLINKS}) = source1
  6  open_tree(source1, "", AT_EMPTY_PATH|OPEN_TREE_CLONE|OPEN_TREE_CLOEXEC) = mount1
  7  mount_setattr(mount1, "", AT_EMPTY_PATH, {set MOUNT_ATTR_NOSUID|MOUNT_ATTR_NODEV|MOUNT_ATTR_NOATIME, clear MOUNT_ATTR__ATIME, MS_PRIVATE})
  8  statx(mount1, "", AT_EMPTY_PATH|AT_STATX_DONT_SYNC, STATX_TYPE|STATX_MNT_ID_UNIQUE)
  9  openat2(mount0, "a/b", {O_PATH|O_NOFOLLOW|O_CLOEXEC, RESOLVE_BENEATH|RESOLVE_NO_SYMLINKS|RESOLVE_NO_MAGICLINKS}) = target1
 10  statx(target1)
 11  move_mount(mount1, "", target1, "", MOVE_MOUNT_F_EMPTY_PATH|MOVE_MOUNT_T_EMPTY_PATH)
 12  openat2(root, <target>, {O_PATH|O_NOFOLLOW|O_CLOEXEC, RESOLVE_IN_ROOT|RESOLVE_NO_SYMLINKS|RESOLVE_NO_MAGICLINKS}) = target0
 13  mkdirat or mknodat for each missing component, if any, and openat of it
 14  statx(target0); statmount(mount of target0)
 15  move_mount(mount0, "", target0, "", MOVE_MOUNT_F_EMPTY_PATH|MOVE_MOUNT_T_EMPTY_PATH), if the parent is shared mount_setattr(mount0, MS_PRIVATE)
 16  statmount(mount0): MOUNT_ATTR_NOSUID|MOUNT_ATTR_NODEV, private, at target0
 17  statmount(mount1): MOUNT_ATTR_NOSUID|MOUNT_ATTR_NODEV|MOUNT_ATTR_NOATIME, private, at target1
`,
	}, {
		name: "a filesystem on a device is made exclusively, its secret masked",
		specs: []Spec{{Kind: &Filesystem{
			Type: "ext4", Device: &BlockDevice{Major: 7, Minor: 1, Diskseq: 9}, SuperblockReadonly: true,
			Parameters: []Parameter{{Key: "noload"}, {Key: "x", Text: "y"}, {Key: "pw", Secret: NewSecret("hush")}},
		}}},
		f: current,
		p: Policy{AllowSuid: true, AllowDev: true},
		want: `
  1  open(<device 7:1>, O_RDONLY|O_CLOEXEC) = device0; ioctl(device0, BLKGETDISKSEQ)
  2  fsopen("ext4", FSOPEN_CLOEXEC) = fs0
  3  fsconfig(fs0, FSCONFIG_SET_STRING, "source", "/proc/self/fd/{device0}", 0)
  4  fsconfig(fs0, FSCONFIG_SET_FLAG, "noload", NULL, 0)
  5  fsconfig(fs0, FSCONFIG_SET_STRING, "x", "y", 0)
  6  fsconfig(fs0, FSCONFIG_SET_STRING, "pw", "***stripped***", 0)
  7  fsconfig(fs0, FSCONFIG_SET_FLAG, "ro", NULL, 0)
  8  fsconfig(fs0, FSCONFIG_CMD_CREATE_EXCL, NULL, NULL, 0), if EBUSY again with CREATE and compare the parameters
  9  fsmount(fs0, FSMOUNT_CLOEXEC, 0) = mount0
 10  mount_setattr(mount0, "", AT_EMPTY_PATH, {set 0, clear 0, MS_PRIVATE})
 11  statx(mount0, "", AT_EMPTY_PATH|AT_STATX_DONT_SYNC, STATX_TYPE|STATX_MNT_ID_UNIQUE)
 12  openat2(root, <target>, {O_PATH|O_NOFOLLOW|O_CLOEXEC, RESOLVE_IN_ROOT|RESOLVE_NO_SYMLINKS|RESOLVE_NO_MAGICLINKS}) = target0
 13  statx(target0); statmount(mount of target0)
 14  move_mount(mount0, "", target0, "", MOVE_MOUNT_F_EMPTY_PATH|MOVE_MOUNT_T_EMPTY_PATH), if the parent is shared mount_setattr(mount0, MS_PRIVATE)
 15  statmount(mount0): 0, private, at target0
`,
	}, {
		name: "a read-only device has to refuse writes itself",
		specs: []Spec{{
			Kind: &BlockDevice{Major: 7, Minor: 1, Diskseq: 9}, Attributes: Attributes{Readonly: true},
		}},
		f: current,
		want: `
  1  open(<device 7:1>, O_RDONLY|O_CLOEXEC) = device0; ioctl(device0, BLKGETDISKSEQ)
  2  ioctl(device0, BLKROGET): it refuses writes
  3  fsopen("tmpfs", FSOPEN_CLOEXEC) = fs0
  4  fsconfig(fs0, FSCONFIG_SET_STRING, "source", "csi-prepare-node", 0)
  5  fsconfig(fs0, FSCONFIG_CMD_CREATE, NULL, NULL, 0)
  6  fsmount(fs0, FSMOUNT_CLOEXEC, 0) = mount0
  7  mknodat(mount0, "node", S_IFBLK, makedev(7:1)); fchownat; fchmodat, if EPERM the node of the host instead
  8  open_tree(mount0, "node", OPEN_TREE_CLONE|OPEN_TREE_CLOEXEC) = mount0
  9  mount_setattr(mount0, "", AT_EMPTY_PATH, {set MOUNT_ATTR_RDONLY|MOUNT_ATTR_NOSUID, clear 0, MS_PRIVATE})
 10  statx(mount0, "", AT_EMPTY_PATH|AT_STATX_DONT_SYNC, STATX_TYPE|STATX_MNT_ID_UNIQUE)
 11  openat2(root, <target>, {O_PATH|O_NOFOLLOW|O_CLOEXEC, RESOLVE_IN_ROOT|RESOLVE_NO_SYMLINKS|RESOLVE_NO_MAGICLINKS}) = target0
 12  statx(target0); statmount(mount of target0)
 13  move_mount(mount0, "", target0, "", MOVE_MOUNT_F_EMPTY_PATH|MOVE_MOUNT_T_EMPTY_PATH), if the parent is shared mount_setattr(mount0, MS_PRIVATE)
 14  statmount(mount0): MOUNT_ATTR_RDONLY|MOUNT_ATTR_NOSUID, private, at target0
`,
	}, {
		name: "with mount(2) alone each mount is narrowed by a second call with the full set",
		specs: []Spec{
			{Kind: granted("vol"), Attributes: Attributes{Readonly: true}},
			{Target: "t", Kind: &Filesystem{Type: "tmpfs", Source: "s", Parameters: []Parameter{{Key: "size", Text: "1m"}, {Key: "pw", Secret: NewSecret("hush")}}}},
		},
		want: `
  1  openat2(root, <target>, {O_PATH|O_NOFOLLOW|O_CLOEXEC, RESOLVE_IN_ROOT|RESOLVE_NO_SYMLINKS|RESOLVE_NO_MAGICLINKS}) = target0
  2  statx(target0); statmount(mount of target0)
  3  openat(AT_FDCWD, <GRANTED:data>, O_PATH|O_DIRECTORY|O_CLOEXEC) = base0
  4  openat2(base0, "vol", {O_PATH|O_NOFOLLOW|O_CLOEXEC, RESOLVE_BENEATH|RESOLVE_NO_SYMLINKS|RESOLVE_NO_MAGICLINKS}) = source0
  5  mount(source0, target0, NULL, MS_BIND, NULL)
  6  openat2(<target>/) = mount0
  7  mount(NULL, mount0, NULL, MS_REMOUNT|MS_BIND|MS_RDONLY|MS_NOSUID|MS_NODEV, NULL)
  8  mount(NULL, mount0, NULL, MS_PRIVATE, NULL)
  9  statmount(mount0): MOUNT_ATTR_RDONLY|MOUNT_ATTR_NOSUID|MOUNT_ATTR_NODEV, private, at target0
 10  openat2(mount0, "t", {O_PATH|O_NOFOLLOW|O_CLOEXEC, RESOLVE_BENEATH|RESOLVE_NO_SYMLINKS|RESOLVE_NO_MAGICLINKS}) = target1
 11  statx(target1)
 12  mount("s", target1, "tmpfs", MS_NOSUID|MS_NODEV, "size=1m,pw=***stripped***")
 13  openat2(<target>/t) = mount1
 14  mount(NULL, mount1, NULL, MS_REMOUNT|MS_BIND|MS_NOSUID|MS_NODEV, NULL)
 15  mount(NULL, mount1, NULL, MS_PRIVATE, NULL)
 16  statmount(mount1): MOUNT_ATTR_NOSUID|MOUNT_ATTR_NODEV, private, at target1
`,
	}} {
		t.Run(test.name, func(t *testing.T) {
			plan, err := NewPlan(test.specs, test.f, test.p)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(strings.TrimPrefix(test.want, "\n"), plan.String()); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
			if strings.Contains(fmt.Sprintf("%v %+v %#v", plan, plan, plan), "hush") {
				t.Error("a secret is shown")
			}
		})
	}
}

// TestPlanLabels: a label is for the whole superblock, so it is added only
// where the plugin says that it may be.
func TestPlanLabels(t *testing.T) {
	p := Policy{LSMContext: "system_u:object_r:t:s0:c1,c2"}
	for _, test := range []struct {
		kind Kind
		f    Features
		want bool
	}{
		{&Filesystem{Type: "tmpfs", LSMContextSupported: true}, current, true},
		{&Filesystem{Type: "tmpfs", LSMContextSupported: true}, Features{}, true},
		{&Filesystem{Type: "tmpfs"}, current, false},
		{&Filesystem{Type: "tmpfs"}, Features{}, false},
		{granted("vol"), current, false},
	} {
		plan, err := NewPlan([]Spec{{Kind: test.kind}}, test.f, p)
		if err != nil {
			t.Fatal(err)
		}
		if got := strings.Contains(plan.String(), p.LSMContext); got != test.want {
			t.Errorf("%+v: label in the plan: %t, want %t\n%s", test.kind, got, test.want, plan)
		}
	}
}

func TestPlanRefuses(t *testing.T) {
	older := current
	older.DetachedTrees = false
	recursive := granted("vol")
	recursive.Recursive = true
	for _, test := range []struct {
		name string
		spec Spec
		f    Features
		p    Policy
	}{
		{"an extension", Spec{Kind: &Extension{TypeURL: "x"}}, current, Policy{}},
		{"a handle with mount(2)", Spec{Kind: &Handle{ID: "h"}}, Features{}, Policy{}},
		{"an id map the plugin does not allow", Spec{Kind: granted("")}, current, Policy{IDMap: true}},
		{"an id map with mount(2)", Spec{Kind: granted(""), IDMapSupported: true}, Features{}, Policy{IDMap: true}},
		{"a recursive bind that mount(2) cannot narrow", Spec{Kind: recursive}, Features{}, Policy{}},
		{"a device where detached mounts cannot be cloned", Spec{Kind: &BlockDevice{Major: 7}}, older, Policy{}},
	} {
		t.Run(test.name, func(t *testing.T) {
			_, err := NewPlan([]Spec{test.spec}, test.f, test.p)
			var unsupported *UnsupportedError
			if !errors.As(err, &unsupported) {
				t.Fatalf("got %v, want an *UnsupportedError", err)
			}
			if unsupported.Index != 0 || unsupported.Kind != test.spec.Kind.Name() || unsupported.Reason == "" {
				t.Errorf("got %+v", unsupported)
			}
		})
	}
}

func TestEveryPerformedKindHasAPlan(t *testing.T) {
	kinds := map[KindName]Kind{
		KindFilesystem: &Filesystem{Type: "tmpfs"}, KindBind: granted(""), KindBlockDevice: &BlockDevice{Major: 7},
		KindHandle: &Handle{ID: "h", FSType: "tmpfs"}, KindFUSE: &FUSE{ID: "h"},
	}
	for _, k := range PerformedKinds() {
		if _, err := NewPlan([]Spec{{Kind: kinds[k]}}, current, Policy{}); err != nil {
			t.Errorf("%s: %v", k, err)
		}
	}
}

func TestEffective(t *testing.T) {
	for _, test := range []struct {
		name       string
		spec       Spec
		p          Policy
		set, clear Attr
	}{
		{"nosuid and nodev are forced", Spec{Kind: granted("")}, Policy{}, AttrNosuid | AttrNodev, 0},
		{"nodev never on a device", Spec{Kind: &BlockDevice{}}, Policy{}, AttrNosuid, 0},
		{"the policy can allow both", Spec{Kind: granted("")}, Policy{AllowSuid: true, AllowDev: true}, 0, 0},
		{"but not against the spec", Spec{Kind: granted(""), Attributes: Attributes{Nosuid: true, Nodev: true}}, Policy{AllowSuid: true, AllowDev: true}, AttrNosuid | AttrNodev, 0},
		{"noexec by policy", Spec{Kind: granted("")}, Policy{Noexec: true, AllowSuid: true, AllowDev: true}, AttrNoexec, 0},
		{"relatime clears", Spec{Kind: granted(""), Attributes: Attributes{Atime: Relatime}}, Policy{AllowSuid: true, AllowDev: true}, 0, AttrAtimeMask},
		{"all", Spec{Kind: granted(""), Attributes: Attributes{
			Readonly: true, Nosuid: true, Nodev: true, Noexec: true, Nosymfollow: true, Atime: Strictatime, Nodiratime: true,
		}}, Policy{IDMap: true}, AttrReadonly | AttrNosuid | AttrNodev | AttrNoexec | AttrNosymfollow | AttrStrictatime | AttrNodiratime | AttrIDMap, AttrAtimeMask},
	} {
		t.Run(test.name, func(t *testing.T) {
			set, clear := test.p.Effective(test.spec)
			if set != test.set || clear != test.clear {
				t.Errorf("got set %s, clear %s, want %s, %s", set, clear, test.set, test.clear)
			}
		})
	}
}

func TestDigest(t *testing.T) {
	fs := func(change func(*Filesystem)) *Spec {
		k := &Filesystem{Type: "ext4", Device: &BlockDevice{Major: 7, Minor: 1, Diskseq: 3}, Parameters: []Parameter{{Key: "a", Text: "b"}}}
		if change != nil {
			change(k)
		}
		return &Spec{Kind: k}
	}
	same := []*Spec{
		fs(nil),
		fs(func(k *Filesystem) { k.Device = &BlockDevice{Major: 8, Minor: 2, Diskseq: 4} }),
	}
	secret := func(text string) *Spec {
		return fs(func(k *Filesystem) { k.Parameters = []Parameter{{Key: "pw", Secret: NewSecret(text)}} })
	}
	if secret("one").Digest() != secret("other, longer").Digest() {
		t.Error("the digest depends on a secret")
	}
	for _, s := range same {
		if s.Digest() != same[0].Digest() {
			t.Errorf("%+v has another digest", s)
		}
	}
	others := []*Spec{
		same[0],
		secret("x"),
		fs(func(k *Filesystem) { k.Type = "xfs" }),
		fs(func(k *Filesystem) { k.Parameters = []Parameter{{Key: "ab"}} }),
		fs(func(k *Filesystem) { k.Parameters = append(k.Parameters, Parameter{Key: "c"}) }),
		fs(func(k *Filesystem) { k.SuperblockReadonly = true }),
		{Kind: granted("a")},
		{Kind: granted("b")},
		{Kind: granted("a"), Target: "t"},
		{Kind: granted("a"), Attributes: Attributes{Readonly: true}},
		{Kind: &Handle{FSType: "fuse"}},
		{Kind: &FUSE{}},
		{Kind: &Extension{TypeURL: "a", Value: []byte("b")}},
		{Kind: &Extension{TypeURL: "ab"}},
		{Kind: &BlockDevice{Major: 1}},
	}
	seen := map[string]int{}
	for i, s := range others {
		d := s.Digest()
		if j, ok := seen[d]; ok {
			t.Errorf("specs %d and %d have one digest", i, j)
		}
		seen[d] = i
		if len(d) != 64 {
			t.Errorf("digest %q", d)
		}
	}
}
