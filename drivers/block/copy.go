package block

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/drivers/block/filesystem"
)

// reflink makes to, which is empty, share all blocks of from, as it is at one
// moment. False where the filesystem has no such thing.
func reflink(to, from *os.File) (bool, error) {
	err := unix.IoctlFileClone(int(to.Fd()), int(from.Fd()))
	switch {
	case err == nil:
		return true, nil
	case errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, unix.EXDEV), errors.Is(err, unix.EINVAL), errors.Is(err, unix.ENOTTY):
		return false, nil
	}
	return false, fmt.Errorf("clone %s: %w", from.Name(), err)
}

// copyData copies what from holds to to, which is empty; holes stay holes. It
// reads the copy back from the disk and compares it. Nobody may write to from
// meanwhile.
func copyData(ctx context.Context, to, from *os.File) error {
	size, err := from.Seek(0, io.SeekEnd)
	if err != nil {
		return err
	}
	if err := to.Truncate(size); err != nil {
		return err
	}
	read := sha256.New()
	err = filesystem.Extents(from, func(at, end int64) error {
		return filesystem.ReadRange(ctx, from, at, end, func(data []byte, at int64) error {
			read.Write(data)
			_, err := to.WriteAt(data, at)
			return err
		})
	})
	if err != nil {
		return fmt.Errorf("copy %s: %w", from.Name(), err)
	}
	if err := to.Sync(); err != nil {
		return fmt.Errorf("copy %s: %w", from.Name(), err)
	}
	// What is read back is to come from the disk.
	if err := unix.Fadvise(int(to.Fd()), 0, 0, unix.FADV_DONTNEED); err != nil {
		return fmt.Errorf("copy %s: %w", from.Name(), err)
	}
	written := sha256.New()
	err = filesystem.Extents(from, func(at, end int64) error {
		return filesystem.ReadRange(ctx, to, at, end, func(data []byte, _ int64) error {
			written.Write(data)
			return nil
		})
	})
	if err != nil {
		return fmt.Errorf("read back the copy of %s: %w", from.Name(), err)
	}
	if string(read.Sum(nil)) != string(written.Sum(nil)) {
		return fmt.Errorf("the copy of %s does not read back as it was written", from.Name())
	}
	return nil
}
