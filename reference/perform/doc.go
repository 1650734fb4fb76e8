// Package perform is the executor: it makes the mounts that mount specs
// describe, attaches them in a consumer's mount namespace, all or nothing, and
// takes exactly those away again. It knows mount specs, the kernel and mount
// namespaces; it imports neither gRPC nor the messages of the wire, keeps no
// state on disk and starts no program, so that a container runtime can take it
// alone.
//
// # What it defends against
//
// It acts with all privileges on text that a plugin wrote, in a tree that a
// consumer or an image wrote. The caller and the kernel are trusted, and so
// are the directories the caller names. The plugin is trusted with its
// volumes' data alone: a source is resolved once, beneath the base the caller
// named, through no link, and bound from that descriptor; a device is compared
// on the descriptor that is then used; a parameter goes to the kernel one at a
// time, and never to a program. The consumer is trusted with nothing: its
// place is resolved once, within its root, through no magic link, and attached
// to by that descriptor, so that whatever it exchanges meanwhile is of no
// effect; its root, the filesystems of the kernel, and anything but a
// directory or a regular file are refused. Nothing is created in the data of
// a volume, and mounts never propagate between consumer and node.
//
// Mounts are narrowed while they are in no namespace, nosuid and nodev forced
// unless the policy says otherwise. In a consumer that has a user namespace
// with CAP_SYS_ADMIN of its own, which came into being before the mount, it
// can take the attributes off again: where read-only must hold against such a
// consumer, the superblock, the server or the device has to be read-only.
//
// Somebody else with privileges may mount, unmount and move whatever he likes
// at the same time. What he has made is not touched: undo goes by mount ids
// that are never used again, see Undo.
//
// # What can block
//
// A server that does not answer, be it of a volume or of a FUSE filesystem that
// the consumer itself serves, must not hold up who performs. Ids, types and
// attributes of mounts are read from the kernel alone; paths are looked up in
// what it knows; and what remains, the making of a filesystem on a network or
// device and the lookups that have to ask, is done in a child process which
// ends with its deadline. A program allows that by calling MainIfChild.
package perform
