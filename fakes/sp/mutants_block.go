package sp

import (
	"os"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/fakes/mutant"
	preparev1alpha1 "github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

// Volumes that are devices, raw.
var rawMutants = of(mutant.Raw, []Mutant{
	seat("wrong-device", mutant.Data, requirement.PrepareVolumeData,
		"a writer is answered with a device that is none of the volume's: what it writes nobody finds again",
		specs(func(s *Server, r *prepareRequest, m *preparev1alpha1.MountSpec) {
			if m.GetAttributes().GetReadonly() {
				return
			}
			decoy := s.where(r.GetVolumeId()) + ".decoy"
			d, err := device{}, os.WriteFile(decoy, make([]byte, 1<<20), 0o600)
			if err == nil {
				d, err = attach(decoy, s.mark(&volume{ID: r.GetVolumeId()}, r.GetPrepareId()), false)
			}
			if err == nil && os.Remove(decoy) == nil {
				m.GetBlockDevice().Minor, m.GetBlockDevice().Diskseq = d.minor, d.diskseq
			}
		})),
	seat("another-volumes-device", mutant.Data, requirement.PrepareVolumeData,
		"a link in /dev is stale, and the second volume is answered with the device of the first: two databases on one disk",
		func(s *Server) {
			var first *volume
			s.rules.device = func(s *Server, v *volume, prepareID string) (device, error) {
				d, err := deviceOf(s, v, prepareID)
				if err != nil || prepareID != "" {
					return d, err
				}
				if first != nil {
					if d, found, err := attached(s.mark(first, "")); found || err != nil {
						return d, err
					}
				}
				first = v
				return d, nil
			}
		}),
	seat("stale-number", mutant.Data, requirement.BlockCurrent,
		"number and diskseq are remembered from the first time: when the device was attached anew, the number is another volume's",
		func(s *Server) {
			var seen memory[string, device]
			s.rules.device = func(s *Server, v *volume, prepareID string) (device, error) {
				d, err := deviceOf(s, v, prepareID)
				if err != nil || prepareID != "" {
					return d, err
				}
				if was, known := seen.all()[v.ID]; known {
					return was, nil
				}
				seen.swap(v.ID, d)
				return d, nil
			}
		}),
	seat("directory-for-device", mutant.Specs, requirement.SpecBlockVolume,
		"a block volume is answered with a bind of a directory",
		wrong(func(m *preparev1alpha1.MountSpec) {
			m.Kind = &preparev1alpha1.MountSpec_Bind{Bind: &preparev1alpha1.BindMount{Source: &preparev1alpha1.PathRef{Base: preparev1alpha1.PathRef_STAGING}}}
		})),
	seat("file-for-device", mutant.Specs, requirement.SpecBlockVolume,
		"a block volume is answered with a bind of the regular file behind it, which no runtime takes for a device",
		specs(func(s *Server, r *prepareRequest, m *preparev1alpha1.MountSpec) {
			grant := s.grant()
			m.Kind = &preparev1alpha1.MountSpec_Bind{Bind: &preparev1alpha1.BindMount{
				Source: &preparev1alpha1.PathRef{Base: preparev1alpha1.PathRef_GRANTED, Grant: grant, Relative: r.GetVolumeId()}, IsFile: true,
			}}
		})),
	seat("number-zero", mutant.Specs, requirement.BlockNumbers,
		"the number of the device is not filled in",
		wrong(func(m *preparev1alpha1.MountSpec) { m.GetBlockDevice().Major = 0 })),
	seat("attributes-on-a-device", mutant.Specs, requirement.BlockAttributes,
		"a device is answered with attributes that only a filesystem can keep",
		wrong(func(m *preparev1alpha1.MountSpec) { m.Attributes.Noexec = true })),
	seat("writable-for-readers", mutant.Attributes, requirement.PrepareReadonly,
		"readonly is forgotten where the volume is a device: the reader gets the writable one",
		specs(func(_ *Server, r *prepareRequest, m *preparev1alpha1.MountSpec) {
			if r.GetReadonly() {
				m.Attributes.Readonly = false
			}
		})),
	seat("leaks-loop", mutant.Leaks, requirement.UnprepareResourcesFreed,
		"the loop device of a read-only preparation stays when it ends, one more with each restart of a pod",
		func(s *Server) {
			s.rules.release = func(s *Server, v *volume, prepareID string) error {
				if prepareID == "" {
					return release(s, v, prepareID)
				}
				return detachAtEnd(s.mark(v, prepareID))
			}
		}),
	seat("leaves-node-in-prepare-path", mutant.Leaks, requirement.UnpreparePathEmptied,
		"a node of the device stays in prepare_path: it reaches whatever gets the number next",
		answered(func(s *Server, r *prepareRequest, a *prepareResponse) {
			d := a.GetMountSpecs()[0].GetBlockDevice()
			_ = unix.Mknod(filepath.Join(r.GetPreparePath(), "node"), unix.S_IFBLK|0o600, int(unix.Mkdev(d.GetMajor(), d.GetMinor())))
		})),
	seat("smaller-than-promised", mutant.Data, requirement.BlockSize,
		"the device has half of what capacity_bytes says: the end of the volume is not there",
		devices(func(s *Server, v *volume, prepareID string) (device, error) {
			if err := os.Truncate(s.directory(v), v.size()/2); err != nil {
				return device{}, err
			}
			return deviceOf(s, v, prepareID)
		})),
	seat("mkfs-on-data", mutant.Data, requirement.FilesystemBlankDevice,
		"a device without a filesystem it knows is taken for empty, and gets one: the data on it is gone",
		func(s *Server) {
			s.rules.blank = func(file string) (bool, error) {
				ours, err := hasExt4(file)
				return !ours, err
			}
		}),
	seat("mkfs-without-looking-far", mutant.Data, requirement.FilesystemBlankDevice,
		"a device is taken for empty because its first bytes are",
		func(s *Server) {
			s.rules.blank = func(file string) (bool, error) {
				f, err := os.Open(file)
				if err != nil {
					return false, err
				}
				defer f.Close()
				start := make([]byte, 128<<10)
				_, err = f.ReadAt(start, 0)
				return !slices.ContainsFunc(start, func(b byte) bool { return b != 0 }), err
			}
		}),
})

// Volumes that are devices, with a filesystem.
var formattedMutants = of(mutant.Formatted, []Mutant{
	seat("mkfs-each-time", mutant.Data, requirement.FilesystemBlankDevice,
		"whatever the probe says, NodeStageVolume makes a filesystem: an empty volume after each restart of the node",
		func(s *Server) {
			s.rules.blank = func(string) (bool, error) { return true, nil }
		}),
	seat("ignores-parameters", mutant.Attributes, requirement.PrepareMountFlagRefused,
		"a mount flag that should become a parameter of the superblock is accepted and forgotten",
		wrong(func(m *preparev1alpha1.MountSpec) { m.GetFilesystem().Parameters = nil })),
	seat("second-parameters", mutant.Attributes, requirement.FilesystemParametersAgree,
		"a second consumer is promised other parameters, which the kernel ignores: one device has one superblock",
		func(s *Server) { s.rules.agree = func(*Server, *prepareRequest) error { return nil } }),
	seat("stale-source", mutant.Data, requirement.BlockCurrent,
		"the source of a filesystem is the number the device had the first time",
		func(s *Server) {
			var seen memory[string, uint64]
			specs(func(_ *Server, r *prepareRequest, m *preparev1alpha1.MountSpec) {
				d := m.GetFilesystem().GetDevice()
				if was, known := seen.all()[r.GetVolumeId()]; known {
					d.Diskseq = was
					return
				}
				seen.swap(r.GetVolumeId(), d.GetDiskseq())
			})(s)
		}),
})

// of says what volumes the mutants have.
func of(volumes mutant.Volumes, all []Mutant) []Mutant {
	for i := range all {
		all[i].Volumes = volumes
	}
	return all
}

// detachAtEnd leaves the loop device with a mark until this process ends.
func detachAtEnd(mark string) error {
	d, found, err := attached(mark)
	if err != nil || !found {
		return err
	}
	// Nobody closes it but the kernel.
	fd, err := unix.Open(d.path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	info, err := unix.IoctlLoopGetStatus64(fd)
	if err != nil {
		return err
	}
	info.Flags |= unix.LO_FLAGS_AUTOCLEAR
	return unix.IoctlLoopSetStatus64(fd, info)
}

// devices replaces how a volume is attached.
func devices(f func(s *Server, v *volume, prepareID string) (device, error)) fault {
	return func(s *Server) { s.rules.device = f }
}
