// Package mountspec is the vocabulary of what a Plugin returns and a CO
// performs: mount specs as plain Go values, the rules they have to keep, and
// the plan that performing them comes to.
//
// It makes no system call, does no input or output, and imports neither gRPC
// nor the protobuf types, so that a container runtime can take it alone and
// every part of it runs on any operating system. Package wire, below this
// one, converts from and to the messages of csi.prepare.v1alpha1.
package mountspec

import "log/slog"

// MaxSpecs is the most mount specs one response may hold (spec.count).
const MaxSpecs = 16

// Spec is one instruction to the party that performs: attach this, there,
// with at least these attributes.
type Spec struct {
	// Target is where to attach, relative to the place the CO has chosen in
	// the consumer. Empty means that place itself.
	Target string
	// Kind says what to attach. It is nil when the Plugin set no arm that
	// this version knows; such a spec is never performed.
	Kind Kind
	// Attributes are the least restriction the CO applies.
	Attributes Attributes
	// IDMapSupported is true if the CO may map ids on this mount.
	IDMapSupported bool
}

// KindName names a kind as the wire does, without the MOUNT_KIND_ prefix.
type KindName string

// The kinds of mount spec.
const (
	KindFilesystem  KindName = "FILESYSTEM"
	KindBind        KindName = "BIND"
	KindBlockDevice KindName = "BLOCK_DEVICE"
	KindHandle      KindName = "HANDLE"
	KindFUSE        KindName = "FUSE"
	KindExtension   KindName = "EXTENSION"
)

// Kind is one of *Filesystem, *Bind, *BlockDevice, *Handle, *FUSE and
// *Extension.
type Kind interface {
	// Name returns the kind's name on the wire.
	Name() KindName
	kind()
}

// Atime says when a mount updates access times. The zero value leaves it to
// the CO.
type Atime uint8

// The access time modes of MountAttributes.
const (
	AtimeUnspecified Atime = iota
	Relatime
	Noatime
	Strictatime
)

// String returns the word mount(8) has for the mode, "" for unspecified.
func (a Atime) String() string {
	return [...]string{"", "relatime", "noatime", "strictatime"}[min(int(a), 3)]
}

// Attributes belong to the mount, not to the superblock below it.
type Attributes struct {
	Readonly, Nosuid, Nodev, Noexec, Nosymfollow bool

	Atime      Atime
	Nodiratime bool

	// Recursive makes the attributes hold for the whole tree.
	Recursive bool
}

// Filesystem is a new instance of a filesystem: one fsopen(2) to fsmount(2)
// sequence, or one mount(2), with no helper in user space.
type Filesystem struct {
	Type string
	// Source is text the filesystem itself reads ("192.0.2.1:/export").
	// It is empty where Device is set, or where the type has no source.
	Source string
	// Device is the block device the filesystem is on, or nil.
	Device *BlockDevice
	// Parameters go to the superblock, in order.
	Parameters []Parameter
	// SuperblockReadonly is not Attributes.Readonly: it makes the superblock
	// read-only for all its mounts.
	SuperblockReadonly bool
	// Served is true if the mount depends on a process of the Plugin.
	Served bool
	// LSMContextSupported is true if the CO may add a context= parameter.
	LSMContextSupported bool
}

// Parameter is one superblock parameter. With neither Text nor Secret it is
// a flag.
type Parameter struct {
	Key    string
	Text   string
	Secret Secret
}

// Base is the directory a PathRef starts from.
type Base uint8

// The bases of a PathRef.
const (
	BaseUnknown Base = iota
	BaseStaging      // staging_target_path of the call
	BasePrepare      // prepare_path of the call
	BaseGranted      // a directory the operator granted by name
)

// String returns the name of the base on the wire.
func (b Base) String() string {
	return [...]string{"BASE_UNKNOWN", "STAGING", "PREPARE", "GRANTED"}[min(int(b), 3)]
}

// PathRef names a file or directory beneath one the CO already knows.
type PathRef struct {
	Base     Base
	Relative string // below the base; empty means the base itself
	Grant    string // the granted directory's name, with BaseGranted only
}

// Bind makes visible a tree that is mounted already.
type Bind struct {
	Source    PathRef
	Recursive bool
	// IsFile is true for a regular file or socket, false for a directory.
	IsFile bool
	// MountFSType, if set, is the filesystem type of the mount that has to
	// cover the source in the CO's mount namespace.
	MountFSType string
}

// BlockDevice is a block device of the node.
type BlockDevice struct {
	Major, Minor uint32
	// Diskseq is /sys/class/block/*/diskseq, 0 if not known. Unlike the
	// number it is never given to a second device in one boot.
	Diskseq uint64
	// DevicePath is a hint: a path in the Plugin's own /dev.
	DevicePath string
}

// Handle is a detached mount whose descriptor the Plugin sent during the call.
type Handle struct {
	ID     string
	FSType string
	// Served is true if the mount ends with a process of the Plugin.
	Served bool
}

// FUSE is a FUSE filesystem the CO mounted during the call and the Plugin
// now serves.
type FUSE struct {
	ID string
	// Resumable is true if a later process of the Plugin can take over.
	Resumable bool
}

// Extension is a kind outside this document, known by its type URL.
type Extension struct {
	TypeURL string
	Value   []byte
}

// Name implements Kind.
func (*Filesystem) Name() KindName { return KindFilesystem }

// Name implements Kind.
func (*Bind) Name() KindName { return KindBind }

// Name implements Kind.
func (*BlockDevice) Name() KindName { return KindBlockDevice }

// Name implements Kind.
func (*Handle) Name() KindName { return KindHandle }

// Name implements Kind.
func (*FUSE) Name() KindName { return KindFUSE }

// Name implements Kind.
func (*Extension) Name() KindName { return KindExtension }

func (*Filesystem) kind()  {}
func (*Bind) kind()        {}
func (*BlockDevice) kind() {}
func (*Handle) kind()      {}
func (*FUSE) kind()        {}
func (*Extension) kind()   {}

// Secret is text that no log, error or file may show. Formatting it by any
// verb, or logging it, prints a fixed mask; Reveal alone gives the text.
type Secret struct{ text string }

// NewSecret wraps text.
func NewSecret(text string) Secret { return Secret{text} }

// Reveal returns the secret text, for the system call that needs it.
func (s Secret) Reveal() string { return s.text }

// IsZero reports whether there is no secret.
func (s Secret) IsZero() bool { return s.text == "" }

const masked = "***stripped***"

// String implements fmt.Stringer with a mask.
func (s Secret) String() string {
	if s.text == "" {
		return ""
	}
	return masked
}

// GoString implements fmt.GoStringer with a mask.
func (s Secret) GoString() string { return s.String() }

// LogValue implements slog.LogValuer with a mask.
func (s Secret) LogValue() slog.Value { return slog.StringValue(s.String()) }

// MarshalText implements encoding.TextMarshaler with a mask.
func (s Secret) MarshalText() ([]byte, error) { return []byte(s.String()), nil }
