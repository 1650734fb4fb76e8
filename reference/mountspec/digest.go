package mountspec

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
)

// Digest identifies what the spec asks for: equal specs have equal digests,
// and specs that differ in anything but secrets, device numbers and handle
// ids, which a repeated answer may renew, have different ones. It is 64
// hexadecimal digits and tells nothing of a secret, not even its length.
func (s *Spec) Digest() string {
	var room [512]byte
	d := digest(room[:0])
	d.text(s.Target)
	d.bits(s.Attributes.Readonly, s.Attributes.Nosuid, s.Attributes.Nodev, s.Attributes.Noexec,
		s.Attributes.Nosymfollow, s.Attributes.Nodiratime, s.Attributes.Recursive, s.IDMapSupported)
	d.number(uint64(s.Attributes.Atime))
	d.text(string(kindName(s)))
	switch k := s.Kind.(type) {
	case *Filesystem:
		d.text(k.Type)
		d.text(k.Source)
		d.bits(k.Device != nil, k.SuperblockReadonly, k.Served, k.LSMContextSupported)
		d.number(uint64(len(k.Parameters)))
		for _, p := range k.Parameters {
			d.text(p.Key)
			d.text(p.Text)
			d.bits(!p.Secret.IsZero())
		}
	case *Bind:
		d.number(uint64(k.Source.Base))
		d.text(k.Source.Grant)
		d.text(k.Source.Relative)
		d.text(k.MountFSType)
		d.bits(k.Recursive, k.IsFile)
	case *Handle:
		d.text(k.FSType)
		d.bits(k.Served)
	case *FUSE:
		d.bits(k.Resumable)
	case *Extension:
		d.text(k.TypeURL)
		d.text(string(k.Value))
	}
	sum := sha256.Sum256(d)
	var out [2 * sha256.Size]byte
	hex.Encode(out[:], sum[:])
	return string(out[:])
}

// digest collects fields so that no two different lists of them are equal as
// bytes: every text is preceded by its length.
type digest []byte

func (d *digest) number(n uint64) { *d = binary.AppendUvarint(*d, n) }

func (d *digest) text(s string) {
	d.number(uint64(len(s)))
	*d = append(*d, s...)
}

func (d *digest) bits(all ...bool) {
	n := uint64(1)
	for _, b := range all {
		n <<= 1
		if b {
			n |= 1
		}
	}
	d.number(n)
}
