package mountspec

import (
	"strings"

	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

// Filesystem types and parameter keys that no Plugin may send, with the
// reason. These lists are part of the contract: a CO's policy may refuse
// more, never less.

// forbiddenType says why a type is no storage of a volume.
type forbiddenType struct {
	reason, instead string
	// asHandle is true where a Plugin may have made the mount itself and
	// handed it over: what it is made of is then the Plugin's own.
	asHandle bool
}

var forbiddenTypes = func() map[string]forbiddenType {
	all := map[string]forbiddenType{
		"none":    {"no filesystem but mount(8)'s word for a bind", "send a bind", false},
		"bind":    {"no filesystem but a way of mounting", "send a bind", false},
		"overlay": {"made of directories of the node, named by parameters", "send a handle or a bind", true},
		"autofs":  {"a trigger that a daemon of the node serves", "send what it would mount", false},
		"fuse":    {"mounted with a descriptor, not from text", "send a fuse or a handle", true},
		"fuseblk": {"mounted with a descriptor, not from text", "send a fuse or a handle", true},
	}
	for _, t := range []string{
		"proc", "sysfs", "cgroup", "cgroup2", "devpts", "devtmpfs", "debugfs", "tracefs", "securityfs",
		"bpf", "configfs", "pstore", "efivarfs", "nsfs", "mqueue", "binfmt_misc", "fusectl",
	} {
		all[t] = forbiddenType{"an interface to the kernel, not storage", "send a filesystem of the volume", false}
	}
	for _, t := range []string{"ramfs", "hugetlbfs"} {
		all[t] = forbiddenType{"memory of the node without a limit that holds", "send tmpfs with a size", false}
	}
	return all
}()

// deviceTypes open their source as a path of a block device.
var deviceTypes = []string{
	"ext4", "xfs", "btrfs", "ext3", "ext2", "erofs", "squashfs", "f2fs", "vfat", "exfat", "ntfs3",
	"iso9660", "udf", "hfsplus", "hfs", "jfs", "nilfs2", "minix", "msdos", "ocfs2", "gfs2", "cramfs", "romfs",
}

// uncTypes write their source as //server/share, which is no path.
var uncTypes = []string{"cifs", "smb3"}

// addressKeys are the parameters, one of them needed, that hold the server's
// address for types whose kernel code resolves no names.
var addressKeys = map[string][]string{
	"nfs":  {"addr"},
	"nfs4": {"addr"},
	"cifs": {"ip", "addr"},
	"smb3": {"ip", "addr"},
}

// forbidden is why a key is not a superblock parameter a Plugin may send.
type forbidden struct {
	rule            requirement.ID
	reason, instead string
}

var wordLists = []struct {
	forbidden
	words string // separated by blanks
}{
	{
		forbidden{
			requirement.FilesystemNoMountWords, "is no superblock parameter but a word about the mount",
			"use attributes or superblock_readonly",
		},
		`ro rw suid nosuid dev nodev exec noexec symfollow nosymfollow
		 atime noatime diratime nodiratime relatime norelatime strictatime nostrictatime
		 silent loud mand nomand`,
	},
	{
		forbidden{
			requirement.FilesystemNoMountWords, "asks for another operation than a new mount",
			"send a bind, or leave it out",
		},
		`bind rbind remount move`,
	},
	{
		forbidden{
			requirement.FilesystemNoMountWords, "is about propagation, which is always private",
			"leave it out",
		},
		`private rprivate shared rshared slave rslave unbindable runbindable`,
	},
	{
		// Container runtimes act on these where a parameter reaches them as
		// an option; some of them take restrictions away.
		forbidden{
			requirement.FilesystemNoMountWords, "is a container runtime's word about a tree of mounts",
			"use attributes.recursive",
		},
		`rro rrw rsuid rnosuid rdev rnodev rexec rnoexec rsymfollow rnosymfollow
		 ratime rnoatime rdiratime rnodiratime rrelatime rnorelatime rstrictatime rnostrictatime`,
	},
	{
		// The kernel refuses most of these; a mount helper or a runtime acts
		// on them.
		forbidden{
			requirement.FilesystemNoUserspaceWords, "is a word of mount(8) or a helper, which are not run",
			"do its work while preparing and leave it out",
		},
		`defaults auto noauto nofail _netdev bg fg sloppy user users nouser owner noowner group nogroup
		 helper uhelper loop offset sizelimit encryption comment credentials tmpcopyup`,
	},
	{
		forbidden{
			requirement.FilesystemNoObjectWords, "names a file, directory, device or descriptor of the node",
			"send filesystem.device or a bind: objects are named by number or below a known directory",
		},
		`source fd rfdno wfdno lowerdir lowerdir+ datadir+ upperdir workdir
		 journal_dev journal_path jdev device logdev rtdev`,
	},
	{
		forbidden{
			requirement.FilesystemNoLabelWords, "is a security label, which is the CO's to choose",
			"set lsm_context_supported",
		},
		`context fscontext defcontext rootcontext
		 smackfsdef smackfsroot smackfshat smackfsfloor smackfstransmute`,
	},
	{
		forbidden{
			requirement.FilesystemNoIDMapWords, "is an ID mapping, which is the CO's to choose",
			"set idmap_supported",
		},
		`uidmap gidmap idmap ridmap`,
	},
}

var forbiddenWords = func() map[string]*forbidden {
	all := make(map[string]*forbidden)
	for i := range wordLists {
		for _, w := range strings.Fields(wordLists[i].words) {
			all[w] = &wordLists[i].forbidden
		}
	}
	return all
}()

// commentWord is for x-* and X-*, which mount(8) leaves to whom it may
// concern.
var commentWord = forbidden{
	requirement.FilesystemNoUserspaceWords, "is a comment for programs on the node", "leave it out",
}

// forbiddenWord returns why key must not be sent, if it must not.
func forbiddenWord(key string) (*forbidden, bool) {
	if strings.HasPrefix(key, "x-") || strings.HasPrefix(key, "X-") {
		return &commentWord, true
	}
	w, no := forbiddenWords[key]
	return w, no
}
