package filesystem

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// Signature is what blkid finds on a device. The zero value is nothing.
type Signature struct {
	// Type and Usage of a superblock, such as "ext4" and "filesystem", or
	// "LVM2_member" and "raid".
	Type, Usage string
	// PartitionTable is its type, such as "gpt".
	PartitionTable string
	// Several is true where more than one was found.
	Several bool
}

// IsZero reports whether nothing was found.
func (s Signature) IsZero() bool { return s == Signature{} }

// Filesystem is the type of the filesystem, if that is all that was found and
// it is one of Types.
func (s Signature) Filesystem() (Type, bool) {
	t := Type(s.Type)
	return t, s.Usage == "filesystem" && s.PartitionTable == "" && !s.Several && slices.Contains(Types, t)
}

// String says what was found.
func (s Signature) String() string {
	var found []string
	if s.Several {
		found = append(found, "signatures of several kinds")
	}
	if s.PartitionTable != "" {
		found = append(found, "a partition table ("+s.PartitionTable+")")
	}
	if s.Type != "" {
		found = append(found, "a signature of "+s.Type+" ("+s.Usage+")")
	}
	if found == nil {
		return "nothing"
	}
	return strings.Join(found, " and ")
}

// Exit codes of blkid(8) -p.
const (
	blkidNothing   = 2 // also where it cannot read the device
	blkidAmbiguous = 8
)

// Probe looks for signatures. An error means that nothing is known of the
// device.
func Probe(ctx context.Context, dev *os.File) (Signature, error) {
	// blkid answers "nothing" where it cannot read, too: so the places where
	// signatures are have to be read first.
	if err := readEnds(dev, func([]byte, int64) error { return nil }); err != nil {
		return Signature{}, err
	}
	out, err := run(ctx, dev, "blkid", "-p", "-o", "export", onDescriptor)
	var failed *ToolError
	switch {
	case err == nil:
		return parseSignature(out), nil
	case errors.As(err, &failed) && failed.Code == blkidAmbiguous:
		return Signature{Several: true}, nil
	case errors.As(err, &failed) && failed.Code == blkidNothing && failed.Output == "" && out == "":
		return Signature{}, nil
	}
	return Signature{}, fmt.Errorf("look for signatures: %w", err)
}

func parseSignature(export string) Signature {
	var s Signature
	for line := range strings.Lines(export) {
		key, value, _ := strings.Cut(strings.TrimSpace(line), "=")
		switch key {
		case "TYPE":
			s.Type = value
		case "USAGE":
			s.Usage = value
		case "PTTYPE":
			s.PartitionTable = value
		}
	}
	if s.IsZero() {
		// It found something that this does not know.
		s.Type, s.Usage = "unknown", "unknown"
	}
	return s
}

// NotBlankError tells of a device that holds something, or may.
type NotBlankError struct{ Found string }

// Error says what was found.
func (e *NotBlankError) Error() string { return "the device is not blank: it has " + e.Found }

// ProveBlank returns nil only where the device certainly holds nothing: blkid
// finds no signature, the first and the last 4 MiB can be read and are zero,
// and so is all that file holds, which may be nil: the file behind a loop
// device. Whatever cannot be read is an error, and what is found a
// *NotBlankError.
func ProveBlank(ctx context.Context, dev, file *os.File) error {
	found, err := Probe(ctx, dev)
	if err != nil {
		return err
	}
	if !found.IsZero() {
		return &NotBlankError{found.String()}
	}
	if err := readEnds(dev, zero); err != nil {
		return err
	}
	if file == nil {
		return nil
	}
	return Extents(file, func(from, to int64) error {
		return ReadRange(ctx, file, from, to, zero)
	})
}

// end is more than the reach of any signature from either end.
const end = 4 << 20

// readEnds hands the first and the last bytes of a device to see.
func readEnds(dev *os.File, see func(data []byte, offset int64) error) error {
	size, err := dev.Seek(0, io.SeekEnd)
	if err != nil {
		return fmt.Errorf("size of the device: %w", err)
	}
	for _, from := range []int64{0, max(0, size-end)} {
		if err := ReadRange(context.Background(), dev, from, min(size, from+end), see); err != nil {
			return err
		}
	}
	return nil
}

// ReadRange hands the bytes of a range to see, a piece at a time. A range that
// ends early is io.ErrUnexpectedEOF.
func ReadRange(ctx context.Context, f *os.File, from, to int64, see func([]byte, int64) error) error {
	buf := make([]byte, 1<<20)
	for from < to {
		if err := ctx.Err(); err != nil {
			return err
		}
		n, err := f.ReadAt(buf[:min(int64(len(buf)), to-from)], from)
		if err != nil && !errors.Is(err, io.EOF) || n == 0 {
			return fmt.Errorf("read %s at byte %d: %w", f.Name(), from, errors.Join(err, io.ErrUnexpectedEOF))
		}
		if err := see(buf[:n], from); err != nil {
			return err
		}
		from += int64(n)
	}
	return nil
}

func zero(data []byte, offset int64) error {
	for i, b := range data {
		if b != 0 {
			return &NotBlankError{fmt.Sprintf("data of no known kind at byte %d", offset+int64(i))}
		}
	}
	return nil
}

// Extents calls see for each range of a file that is not a hole.
func Extents(f *os.File, see func(from, to int64) error) error {
	for at := int64(0); ; {
		from, err := unix.Seek(int(f.Fd()), at, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			return nil // no more data
		}
		if err != nil {
			return fmt.Errorf("find the data of the file: %w", err)
		}
		if at, err = unix.Seek(int(f.Fd()), from, unix.SEEK_HOLE); err != nil {
			return fmt.Errorf("find the data of the file: %w", err)
		}
		if err := see(from, at); err != nil {
			return err
		}
	}
}
