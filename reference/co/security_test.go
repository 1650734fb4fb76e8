package co

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/csi-prepare/csi-prepare/reference/mountspec"
	"github.com/csi-prepare/csi-prepare/reference/perform"
	pb "github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

// hostile is an answer of a plugin that a CO must not perform.
type hostile struct {
	name string
	// specs is the answer for a volume whose directory is named.
	specs func(volume string) []*pb.MountSpec
	rule  requirement.ID
	use   func(*Use)
}

// one has an answer of one spec, after the one for the place itself if it has
// a target.
func one(spec *pb.MountSpec) func(string) []*pb.MountSpec {
	return func(volume string) []*pb.MountSpec {
		if spec.GetTarget() != "" {
			return []*pb.MountSpec{bind(volume, ""), spec}
		}
		return []*pb.MountSpec{spec}
	}
}

func filesystem(fsType string, parameters ...*pb.FsParameter) *pb.MountSpec {
	return &pb.MountSpec{Kind: &pb.MountSpec_Filesystem{Filesystem: &pb.FilesystemMount{FsType: fsType, Parameters: parameters}}}
}

func word(key string) *pb.FsParameter { return &pb.FsParameter{Key: key} }

func text(key, value string) *pb.FsParameter {
	return &pb.FsParameter{Key: key, Value: &pb.FsParameter_Text{Text: value}}
}

func blockOnly(u *Use) {
	u.Capability = capability()
	u.Capability.AccessType = &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}}
	u.Target.Path = "/dev/co-test-device"
}

func fromBase(base pb.PathRef_Base, grant, relative string) *pb.MountSpec {
	return &pb.MountSpec{Kind: &pb.MountSpec_Bind{Bind: &pb.BindMount{Source: &pb.PathRef{Base: base, Grant: grant, Relative: relative}}}}
}

func blockDevice(major, minor uint32) *pb.MountSpec {
	return &pb.MountSpec{Kind: &pb.MountSpec_BlockDevice{BlockDevice: &pb.BlockDevice{Major: major, Minor: minor}}}
}

// hostileTexts are answers that the text alone gives away.
func hostileTexts() (all []hostile) {
	add := func(name string, rule requirement.ID, specs func(string) []*pb.MountSpec) {
		all = append(all, hostile{name: name, specs: specs, rule: rule})
	}
	add("no mount spec", requirement.SpecCount, func(string) []*pb.MountSpec { return nil })
	add("17 mount specs", requirement.SpecCount, func(v string) []*pb.MountSpec {
		specs := []*pb.MountSpec{bind(v, "")}
		for i := range 16 {
			specs = append(specs, bind(v, fmt.Sprint("d", i)))
		}
		return specs
	})
	add("a kind that is not set", requirement.SpecKindSet, one(&pb.MountSpec{}))
	unknown := bind("x", "")
	unknown.ProtoReflect().SetUnknown([]byte{0xf8, 0x7f, 1})
	add("a field of a later version", requirement.SpecNoUnknownFields, one(unknown))
	add("a kind that was not offered", requirement.PrepareKindOffered, one(&pb.MountSpec{Kind: &pb.MountSpec_Extension{Extension: &anypb.Any{TypeUrl: "x.example/y"}}}))
	add("an extension that was not offered", requirement.ExtensionOffered, one(&pb.MountSpec{Kind: &pb.MountSpec_Extension{Extension: &anypb.Any{TypeUrl: "x.example/y"}}}))
	add("a type that was not offered", requirement.FilesystemTypeOffered, one(filesystem("udf")))
	add("a device for a mount volume", requirement.SpecMountVolume, one(blockDevice(7, 0)))
	all = append(all, hostile{name: "a mount for a block volume", specs: one(bind("x", "")), rule: requirement.SpecBlockVolume, use: blockOnly})
	add("a NUL byte", requirement.SpecText, one(bind("a\x00b", "")))
	add("a path over its limit", requirement.SpecFieldLength, one(bind(strings.Repeat("a/", 2100)+"a", "")))
	add("a component over its limit", requirement.SpecTargetLength, one(bind("x", strings.Repeat("a", 256))))

	for _, target := range []string{"/abs", "a//b", "./a", "a/.", "../a", "a/../b"} {
		add("target "+target, requirement.SpecTargetRelative, one(bind("x", target)))
	}
	add("two specs for the place itself", requirement.SpecFirstTarget, func(v string) []*pb.MountSpec { return []*pb.MountSpec{bind(v, ""), bind(v, "")} })
	add("no spec for the place itself", requirement.SpecFirstTarget, func(v string) []*pb.MountSpec { return []*pb.MountSpec{bind(v, "a")} })
	add("two specs for one target", requirement.SpecTargetUnique, func(v string) []*pb.MountSpec {
		return []*pb.MountSpec{bind(v, ""), bind(v, "a"), bind(v, "a")}
	})
	add("a spec that would hide an earlier one", requirement.SpecTargetOrder, func(v string) []*pb.MountSpec {
		return []*pb.MountSpec{bind(v, ""), bind(v, "a/b"), bind(v, "a")}
	})

	for _, fsType := range []string{"format/ext4", "{{ mount 0 }}", "fuse.sshfs", "fuse3.x", strings.Repeat("a", 65), ""} {
		add("type "+fsType, requirement.FilesystemTypeCharset, one(filesystem(fsType)))
	}
	for _, fsType := range strings.Fields(`none bind overlay proc sysfs cgroup cgroup2 devpts devtmpfs debugfs tracefs securityfs bpf
		configfs pstore efivarfs nsfs mqueue binfmt_misc autofs fusectl ramfs hugetlbfs fuse fuseblk`) {
		add("type "+fsType, requirement.FilesystemTypeForbidden, one(filesystem(fsType)))
	}

	for rule, words := range map[requirement.ID]string{
		requirement.FilesystemNoMountWords: `ro rw bind rbind remount move shared rshared slave rslave private rprivate unbindable
			suid nosuid dev nodev exec noexec atime noatime relatime strictatime silent mand`,
		requirement.FilesystemNoUserspaceWords: `defaults auto noauto nofail _netdev bg sloppy user users owner group helper loop offset sizelimit x-systemd.automount X-mount.mkdir`,
		requirement.FilesystemNoObjectWords:    `fd lowerdir upperdir workdir journal_dev journal_path device logdev rtdev`,
		requirement.FilesystemNoLabelWords:     `context fscontext defcontext rootcontext`,
		requirement.FilesystemNoIDMapWords:     `uidmap gidmap idmap ridmap`,
	} {
		for _, w := range strings.Fields(words) {
			add("parameter "+w, rule, one(filesystem("tmpfs", word(w))))
		}
	}
	for _, w := range []string{"lowerdir+", "datadir+"} {
		add("parameter "+w, requirement.FilesystemNoObjectWords, one(filesystem("tmpfs", word(w))))
	}
	add("a subvolume with ..", requirement.FilesystemNoObjectWords, one(filesystem("btrfs", text("subvol", "a/../../b"))))
	for name, value := range map[string]string{"comma": "1,suid", "newline": "1\nsuid", "256 bytes": strings.Repeat("1", 256)} {
		add("a value with a "+name, requirement.FilesystemParameterValue, one(filesystem("tmpfs", text("size", value))))
	}
	add("a key with =", requirement.FilesystemParameterKey, one(filesystem("tmpfs", word("size=1"))))
	var many []*pb.FsParameter
	for i := range 17 {
		many = append(many, text(fmt.Sprint("k", i), strings.Repeat("1", 250)))
	}
	add("more than 4095 bytes in all", requirement.FilesystemParametersLength, one(filesystem("tmpfs", many...)))
	add("a key twice", requirement.FilesystemParameterOnce, one(filesystem("tmpfs", text("size", "1"), text("size", "2"))))
	add("a key and its contrary", requirement.FilesystemParameterOnce, one(filesystem("ext4", word("barrier"), word("nobarrier"))))

	add("a base that is none", requirement.BindBaseKnown, one(fromBase(pb.PathRef_BASE_UNKNOWN, "", "")))
	all = append(all, hostile{
		name: "a base the call did not set", specs: one(fromBase(pb.PathRef_STAGING, "", "")), rule: requirement.BindBaseSet,
		use: func(u *Use) { u.Ephemeral = true },
	})
	for _, relative := range []string{"../other", "a/../../b", "/etc", "."} {
		add("source "+relative, requirement.BindRelative, one(bind(relative, "")))
	}
	add("a grant that was not offered", requirement.BindGrantOffered, one(fromBase(pb.PathRef_GRANTED, "other", "")))
	add("a grant beside another base", requirement.BindGrantOnlyGranted, one(fromBase(pb.PathRef_PREPARE, "data", "")))
	opaque := filesystem("tmpfs")
	opaque.GetFilesystem().Source = &pb.FilesystemMount_Opaque{Opaque: "/etc"}
	add("an opaque source that is a path", requirement.FilesystemSourceNoPath, one(opaque))
	opaque = filesystem("ext4")
	opaque.GetFilesystem().Source = &pb.FilesystemMount_Opaque{Opaque: "/dev/vda"}
	add("a device as an opaque source", requirement.FilesystemSourceNoPath, one(opaque))
	long := filesystem("nfs4", text("addr", "192.0.2.1"), text("vers", "4.2"))
	long.GetFilesystem().Source = &pb.FilesystemMount_Opaque{Opaque: "192.0.2.1:/" + strings.Repeat("a", 256)}
	add("a source over 255 bytes", requirement.FilesystemSourceLength, one(long))
	add("a server by name", requirement.FilesystemNamesResolved, one(filesystem("nfs4", text("addr", "server.example"), text("vers", "4.2"))))

	all = append(all, hostile{name: "a device number that is none", specs: one(blockDevice(0, 0)), rule: requirement.BlockNumbers, use: blockOnly})
	mode := blockDevice(7, 0)
	mode.Attributes = &pb.MountAttributes{Noexec: true}
	all = append(all, hostile{name: "attributes for a device", specs: one(mode), rule: requirement.BlockAttributes, use: blockOnly})
	add("a handle that was not sent", requirement.HandleDelivered, one(&pb.MountSpec{Kind: &pb.MountSpec_Handle{Handle: &pb.MountHandle{HandleId: "h", FsType: "tmpfs"}}}))
	add("a handle of a forbidden type", requirement.HandleFSType, one(&pb.MountSpec{Kind: &pb.MountSpec_Handle{Handle: &pb.MountHandle{HandleId: "h", FsType: "proc"}}}))
	add("a FUSE mount that was not asked for", requirement.FUSEServingFirst, one(&pb.MountSpec{Kind: &pb.MountSpec_Fuse{Fuse: &pb.FuseMount{HandleId: "f"}}}))
	all = append(all, hostile{
		name: "a writable mount for a read-only request", specs: func(v string) []*pb.MountSpec { return []*pb.MountSpec{bind(v, "")} },
		rule: requirement.PrepareReadonly, use: func(u *Use) { u.Readonly = true },
	})
	return all
}

// TestHostileAnswers has a plugin answer what must not be performed. Nothing
// is performed, the plugin is told by NodeUnprepareVolume, and the operator by
// the sentence that the answer breaks.
func TestHostileAnswers(t *testing.T) {
	r := newRig(t)
	volume := r.volume("v")
	r.co.before = func(step string) {
		if step == "wrote performing" {
			t.Error("performing began")
		}
	}
	for _, test := range hostileTexts() {
		t.Run(test.name, func(t *testing.T) {
			u := r.use(volume)
			if test.use != nil {
				test.use(&u)
			}
			r.answering(func(ctx context.Context, method string, _ any, next func(context.Context) (any, error)) (any, error) {
				if method == "NodePrepareVolume" {
					return &pb.NodePrepareVolumeResponse{MountSpecs: test.specs(volume)}, nil
				}
				if test.use != nil { // the fake serves no such volumes
					return answerNothing(method, ctx, next)
				}
				return next(ctx)
			})
			r.called()
			_, err := r.co.Up(r.ctx, u)
			var invalid *perform.InvalidError
			if !errors.As(err, &invalid) || !slices.ContainsFunc(invalid.Violations, func(v mountspec.Violation) bool { return v.Requirement == test.rule }) {
				t.Errorf("%v, want a violation of %s", err, test.rule)
			}
			if err != nil && !strings.Contains(err.Error(), string(test.rule)) {
				t.Errorf("%v does not name the sentence", err)
			}
			if calls := r.called(); !slices.Contains(calls, "NodeUnprepareVolume") {
				t.Errorf("calls %v, want it unprepared", calls)
			}
		})
	}
	r.answering(nil)
	r.nothingLeft()
}

// answerNothing is OK to every call about a volume.
func answerNothing(method string, ctx context.Context, next func(context.Context) (any, error)) (any, error) {
	switch method {
	case "NodeStageVolume":
		return &csi.NodeStageVolumeResponse{}, nil
	case "NodeUnstageVolume":
		return &csi.NodeUnstageVolumeResponse{}, nil
	case "NodeUnprepareVolume":
		return &pb.NodeUnprepareVolumeResponse{}, nil
	}
	return next(ctx)
}

// TestHostilePlaces has answers and consumers that only the kernel gives away.
func TestHostilePlaces(t *testing.T) {
	for _, test := range []struct {
		name string
		make func(r *rig, u *Use) []*pb.MountSpec
		want error
		rule requirement.ID
	}{
		{"a link in the target of a spec", func(r *rig, u *Use) []*pb.MountSpec {
			r.link("/", filepath.Join("data", u.VolumeID, "link"))
			return []*pb.MountSpec{bind(u.VolumeID, ""), bind(u.VolumeID, "link/etc")}
		}, unix.ELOOP, requirement.PerformNoSymlink},
		{"a link in the source", func(r *rig, u *Use) []*pb.MountSpec {
			r.link("/etc", filepath.Join("data", u.VolumeID, "link"))
			return []*pb.MountSpec{bind(u.VolumeID+"/link/ssl", "")}
		}, perform.ErrSourceLink, requirement.BindNoSymlink},
		{"a file for a directory", func(r *rig, u *Use) []*pb.MountSpec {
			return []*pb.MountSpec{bind(u.VolumeID+"/file", "")}
		}, perform.ErrSourceType, requirement.BindTypeMatches},
		{"a directory that should be a mount", func(r *rig, u *Use) []*pb.MountSpec {
			spec := bind(u.VolumeID, "")
			spec.GetBind().MountFsType = "ext4"
			return []*pb.MountSpec{spec}
		}, perform.ErrSourceMount, requirement.BindMountFSType},
		{"a granted directory that is a link by now", func(r *rig, u *Use) []*pb.MountSpec {
			r.link("/etc", "linked")
			r.set(func(s *Settings) { s.Grants["data"] = r.path("linked") })
			return []*pb.MountSpec{bind("", "")}
		}, unix.ENOTDIR, ""},
		{"a place on procfs, by way of the image", func(r *rig, u *Use) []*pb.MountSpec {
			u.Target.Root = r.image("data")
			r.must(unix.Mount("proc", r.path("consumer/image/data"), "proc", 0, ""))
			r.Cleanup(func() { _ = unix.Unmount(r.path("consumer/image/data"), 0) })
			r.before = r.table()
			u.Target.Path = "/data/fs"
			return []*pb.MountSpec{bind(u.VolumeID, "")}
		}, perform.ErrTargetKernel, requirement.PerformProtectedTarget},
		{"a place that is a FIFO", func(r *rig, u *Use) []*pb.MountSpec {
			u.Target.Root, u.Target.Path = r.image("data"), "/data/fifo"
			r.must(unix.Mkfifo(r.path("consumer/image/data/fifo"), 0o600))
			return []*pb.MountSpec{bind(u.VolumeID, "")}
		}, perform.ErrTargetType, requirement.PerformTargetType},
		{"a place that links lead out of the image", func(r *rig, u *Use) []*pb.MountSpec {
			u.Target.Root, u.Target.Path = r.image("data"), "/data/out/place"
			r.link("../../../../..", "consumer/image/data/out")
			r.must(os.MkdirAll(r.path("consumer/image/place"), 0o755))
			r.must(os.WriteFile(r.path("consumer/image/place/x"), nil, 0o600))
			r.set(func(s *Settings) { s.FollowLinks = false })
			return []*pb.MountSpec{bind(u.VolumeID, "")}
		}, unix.ELOOP, requirement.PerformNoSymlink},
		{"the consumer's root", func(r *rig, u *Use) []*pb.MountSpec {
			u.Target.Root, u.Target.Path = r.image("data"), "/data/.."
			return []*pb.MountSpec{bind(u.VolumeID, "")}
		}, ErrProtected, requirement.PerformProtectedTarget},
		{"a protected place", func(r *rig, u *Use) []*pb.MountSpec {
			u.Target.Root, u.Target.Path = r.image("sys"), "/sys/x"
			return []*pb.MountSpec{bind(u.VolumeID, "")}
		}, ErrProtected, requirement.PerformProtectedTarget},
		{"the disk of the node's root", func(r *rig, u *Use) []*pb.MountSpec {
			_, root, err := usedByNode(r.ctx, "/nowhere", nil)
			r.must(err)
			var major, minor uint32
			if _, err := fmt.Sscanf(string(root), "%d:%d", &major, &minor); err != nil || major == 0 {
				r.Skipf("the root of this machine is on no block device: %q", root)
			}
			spec := filesystem("ext4")
			spec.GetFilesystem().Source = &pb.FilesystemMount_Device{Device: &pb.BlockDevice{Major: major, Minor: minor}}
			return []*pb.MountSpec{spec}
		}, ErrNodeDevice, requirement.BlockNotOfNode},
		{"a device that somebody on the node has mounted", func(r *rig, u *Use) []*pb.MountSpec {
			d := r.loop()
			r.mount(d.path, r.mkdir("elsewhere"), "ext4", "")
			r.before = r.table()
			return []*pb.MountSpec{d.ext4(d.diskseq)}
		}, ErrNodeDevice, requirement.BlockNotOfNode},
		{"a device number that is another device's by now", func(r *rig, u *Use) []*pb.MountSpec {
			d := r.loop()
			return []*pb.MountSpec{d.ext4(d.diskseq + 1)}
		}, perform.ErrDevice, requirement.BlockDiskseqChecked},
	} {
		t.Run(test.name, func(t *testing.T) {
			r := newRig(t)
			u := r.use(r.volume("v"))
			r.specs(test.make(r, &u)...)
			_, err := r.co.Up(r.ctx, u)
			if !errors.Is(err, test.want) {
				t.Errorf("%v, want %v", err, test.want)
			}
			var step *StepError
			if test.rule != "" && (!errors.As(err, &step) || step.Requirement != test.rule) {
				t.Errorf("%v, want %s", err, test.rule)
			}
			if u.Target.Root != nil {
				_ = unix.Unmount(r.path("consumer/image/data"), 0)
				r.must(os.RemoveAll(r.path("consumer/image")))
				if errors.Is(test.want, perform.ErrTargetKernel) {
					return // the table had its mount
				}
			}
			r.nothingLeft()
		})
	}
}

func TestConsumerPathsAreChecked(t *testing.T) {
	r := newRig(t)
	volume := r.volume("v")
	for _, path := range []string{"", "relative", "/", "/etc"} {
		u := r.use(volume)
		u.Target.Path = path
		if _, err := r.co.Up(r.ctx, u); err == nil {
			t.Errorf("%q was performed onto", path)
		}
	}
	for _, id := range []string{"", ".hidden", "a/b", "../x", strings.Repeat("a", 129), "a b"} {
		u := r.use(volume)
		u.PrepareID = id
		if _, err := r.co.Up(r.ctx, u); err == nil || !strings.Contains(err.Error(), string(requirement.PreparePrepareIDAlphabet)) {
			t.Errorf("prepare id %q: %v", id, err)
		}
	}
	if calls := r.called(); len(calls) > 0 {
		t.Errorf("calls %v", calls)
	}
	r.nothingLeft()
}

// TestNarrowedMounts has what a plugin did not ask for: nosuid, nodev, and
// private propagation.
func TestNarrowedMounts(t *testing.T) {
	r := newRig(t)
	u := r.use(r.volume("v"))
	record := r.up(u)
	m, found := r.table().ByID(record.Receipts[0].MountID)
	if !found || !strings.Contains(m.Attributes(), "nosuid,nodev") || m.Propagation.String() != "private" {
		t.Errorf("the consumer has %v, %s, %s", m, m.Attributes(), m.Propagation)
	}
	r.down(record.Key())
	r.nothingLeft()
}
