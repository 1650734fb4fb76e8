package perform

import (
	"fmt"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/reference/kernel"
	"github.com/csi-prepare/csi-prepare/reference/mountspec"
)

// legacy makes one step of a plan for a kernel that has mount(2) only.
func (x *performance) legacy(u *unit, spec *mountspec.Spec, s *mountspec.Step) error {
	switch s.Call {
	case mountspec.MountBind:
		return x.mountBind(u, spec, s)
	case mountspec.MountNew:
		return x.mountNew(u, s)
	case mountspec.OpenMounted:
		return nil // in one go with the mounting, whose undo needs the id
	case mountspec.Remount:
		flags := unix.MS_REMOUNT | unix.MS_BIND | mountFlags(s.Set, s.Clear)
		return mount("", procFD(u.mount), "", flags, "")
	case mountspec.MountPrivate:
		flags := uintptr(unix.MS_PRIVATE)
		if s.Recursive {
			flags |= unix.MS_REC
		}
		return mount("", procFD(u.mount), "", flags, "")
	}
	return fmt.Errorf("a step that this executor does not know: %s", s)
}

// procFD names a descriptor for mount(2), which takes paths only. /proc is the
// caller's own: such plans are never carried into another namespace.
func procFD(fd int) string { return "/proc/self/fd/" + strconv.Itoa(fd) }

func mount(source, target, fstype string, flags uintptr, data string) error {
	for {
		if err := unix.Mount(source, target, fstype, flags, data); err != unix.EINTR {
			return err
		}
	}
}

func (x *performance) mountBind(u *unit, spec *mountspec.Spec, s *mountspec.Step) error {
	from := x.sourceFD(u, s)
	facts, err := kernel.FactsOf(from, "", x.f.UniqueIDs)
	if err != nil {
		return err
	}
	if err := checkSourceType(spec.Kind.(*mountspec.Bind), facts.Mode); err != nil {
		return err
	}
	flags := uintptr(unix.MS_BIND)
	if s.Recursive {
		flags |= unix.MS_REC
	}
	if err := mount(procFD(from), procFD(u.target), "", flags, ""); err != nil {
		return err
	}
	x.attached = true
	return x.openMounted(u, s)
}

func (x *performance) mountNew(u *unit, s *mountspec.Step) error {
	source := s.Text
	if d := x.specs[s.Spec].Kind.(*mountspec.Filesystem).Device; d != nil {
		name, err := deviceName(d)
		if err != nil {
			return err
		}
		source = "/dev/" + name
	}
	if source == "" {
		source = "none"
	}
	err := mount(source, procFD(u.target), s.Key, mountFlags(s.Set, s.Clear), joinData(s.Parameters))
	if err != nil {
		return err
	}
	x.attached = true
	return x.openMounted(u, s)
}

// joinData joins parameters as mount(2) takes them, secrets included: it is
// for that call alone.
func joinData(parameters []mountspec.Parameter) string {
	var words []string
	for _, p := range parameters {
		switch {
		case !p.Secret.IsZero():
			words = append(words, p.Key+"="+p.Secret.Reveal())
		case p.Key == "context":
			words = append(words, p.Key+`="`+p.Text+`"`) // labels have commas
		case p.Text != "":
			words = append(words, p.Key+"="+p.Text)
		default:
			words = append(words, p.Key)
		}
	}
	return strings.Join(words, ",")
}

// openMounted opens the root of the mount that was just made, by resolving its
// target again: the old descriptor leads below the mount.
func (x *performance) openMounted(u *unit, s *mountspec.Step) (err error) {
	if s.Spec == 0 {
		u.mount, err = x.openInRoot(x.target.Path, unix.O_PATH|unix.O_NOFOLLOW)
	} else {
		u.mount, err = x.openBelow(x.units[0].mount, x.specs[s.Spec].Target)
	}
	if err != nil {
		return err
	}
	facts, err := kernel.FactsOf(u.mount, "", x.f.UniqueIDs)
	if err != nil {
		return err
	}
	if facts.MountID == u.parentID || !facts.MountRoot {
		return fmt.Errorf("%w: the target does not lead to it", ErrChanged)
	}
	u.id = facts.MountID
	return nil
}

var mountFlagOf = []struct {
	attr mountspec.Attr
	flag uintptr
}{
	{mountspec.AttrReadonly, unix.MS_RDONLY},
	{mountspec.AttrNosuid, unix.MS_NOSUID},
	{mountspec.AttrNodev, unix.MS_NODEV},
	{mountspec.AttrNoexec, unix.MS_NOEXEC},
	{mountspec.AttrNoatime, unix.MS_NOATIME},
	{mountspec.AttrStrictatime, unix.MS_STRICTATIME},
	{mountspec.AttrNodiratime, unix.MS_NODIRATIME},
	{mountspec.AttrNosymfollow, unix.MS_NOSYMFOLLOW},
}

func mountFlags(set, clear mountspec.Attr) uintptr {
	var flags uintptr
	for _, m := range mountFlagOf {
		if set&m.attr != 0 {
			flags |= m.flag
		}
	}
	if clear&mountspec.AttrAtimeMask != 0 && set&mountspec.AttrAtimeMask == 0 {
		flags |= unix.MS_RELATIME
	}
	return flags
}
