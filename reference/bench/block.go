package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/reference/kernel"
	"github.com/csi-prepare/csi-prepare/reference/mountns"
	"github.com/csi-prepare/csi-prepare/reference/mountspec"
	"github.com/csi-prepare/csi-prepare/reference/perform"
)

const (
	caseReads  = "reads of a raw volume"
	caseWrites = "writes to a raw volume"

	itself     = "the loop device itself"
	inConsumer = "csi-prepare, the node in the consumer"
)

// One cycle of I/O moves this many pieces, past the page cache.
const (
	pieces    = 64
	pieceSize = 16 << 10
)

// rawReads and rawWrites compare I/O through the node of a block volume, in the
// namespace of its consumer, with I/O on the device that it is of. Nothing lies
// between the two but the path that was opened.
func (s *suite) rawReads() (Case, error) {
	return s.rawIO(caseReads, unix.Pread)
}

func (s *suite) rawWrites() (Case, error) {
	return s.rawIO(caseWrites, unix.Pwrite)
}

func (s *suite) rawIO(name string, transfer func(fd int, p []byte, offset int64) (int, error)) (Case, error) {
	loop, err := attachLoop(filepath.Join(s.ground.Dir("loop"), "image"))
	if err != nil {
		return Case{
			Name: name, Rounds: s.rounds,
			Variants: []Variant{{Name: itself, Missing: err.Error()}, {Name: inConsumer, Missing: err.Error()}},
		}, nil
	}
	consumer, err := mountns.New(context.Background())
	if err != nil {
		return Case{}, errors.Join(err, loop.Close())
	}
	node, undo, err := performNode(consumer, loop, filepath.Join(s.ground.Dir("consumer"), "device"))
	if err != nil {
		return Case{}, errors.Join(err, consumer.Close(), loop.Close())
	}
	// What O_DIRECT takes: whole pages.
	buffer, err := unix.Mmap(-1, 0, pieceSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return Case{}, err
	}
	variant := func(name string, f *os.File) Variant {
		return Variant{Name: name, Divide: pieces, Perform: func() error {
			for i := range int64(pieces) {
				n, err := transfer(int(f.Fd()), buffer, i*pieceSize)
				if err != nil || n != pieceSize {
					return errors.Join(err, fmt.Errorf("%d bytes of %d", n, pieceSize))
				}
			}
			return nil
		}}
	}
	return Case{
		Name: name, Rounds: 3 * s.rounds, Makes: anyNumber,
		Variants: []Variant{variant(itself, loop), variant(inConsumer, node)},
		Close: func() error {
			return errors.Join(node.Close(), undo(), consumer.Close(), loop.Close(), unix.Munmap(buffer))
		},
	}, nil
}

// attachLoop makes a loop device of a new file, which ends when it is closed.
func attachLoop(image string) (*os.File, error) {
	file, err := os.Create(image)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	if err := errors.Join(file.Truncate(pieces*pieceSize), os.Remove(image)); err != nil {
		return nil, err
	}
	control, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	defer control.Close()
	for range 64 { // another process may take the free one first
		n, err := unix.IoctlRetInt(int(control.Fd()), unix.LOOP_CTL_GET_FREE)
		if err != nil {
			return nil, os.NewSyscallError("LOOP_CTL_GET_FREE", err)
		}
		loop, err := os.OpenFile(fmt.Sprintf("/dev/loop%d", n), os.O_RDWR|unix.O_DIRECT, 0)
		if err != nil {
			return nil, err
		}
		err = unix.IoctlLoopConfigure(int(loop.Fd()), &unix.LoopConfig{
			Fd: uint32(file.Fd()), Size: 4096,
			Info: unix.LoopInfo64{Flags: unix.LO_FLAGS_AUTOCLEAR | unix.LO_FLAGS_DIRECT_IO},
		})
		if err == nil {
			return loop, nil
		}
		_ = loop.Close()
		if !errors.Is(err, unix.EBUSY) {
			return nil, os.NewSyscallError("LOOP_CONFIGURE", err)
		}
	}
	return nil, errors.New("no free loop device")
}

// performNode performs a device in a consumer and opens its node there.
func performNode(consumer *mountns.Namespace, loop *os.File, target string) (node *os.File, undo func() error, err error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(loop.Fd()), &st); err != nil {
		return nil, nil, err
	}
	sequence, err := kernel.Diskseq(int(loop.Fd()))
	if err != nil {
		return nil, nil, err
	}
	done, err := perform.Perform(context.Background(), perform.Target{Namespace: consumer, Path: target}, []mountspec.Spec{{
		Kind: &mountspec.BlockDevice{Major: unix.Major(st.Rdev), Minor: unix.Minor(st.Rdev), Diskseq: sequence},
	}}, perform.Options{
		Request: mountspec.Request{Block: true, Performer: mountspec.Performer{Kinds: []mountspec.KindName{mountspec.KindBlockDevice}}},
		Policy:  mountspec.Policy{CreateTarget: true},
	})
	if err != nil {
		return nil, nil, err
	}
	undo = func() error { return perform.Undo(context.Background(), consumer, done.Receipts) }
	err = consumer.Do(context.Background(), func() error {
		node, err = os.OpenFile(target, os.O_RDWR|unix.O_DIRECT, 0)
		return err
	})
	if err != nil {
		return nil, nil, errors.Join(err, undo())
	}
	return node, undo, nil
}
