package fuse

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// outcome is what a consumer saw.
type outcome struct {
	// Operations that may be run twice without harm: done, failed, and
	// answered with wrong bytes.
	Operations, Failed, Corrupt int64
	// Twice counts operations that may not, answered as if they had been done
	// before (EEXIST, ENOENT); their effect was there.
	Twice int64
	First string // the first failure
}

const (
	blockSize = 4096
	blocks    = 64
	workers   = 4
)

// consume does I/O below a directory until its standard input ends, checks
// every byte it reads, and reports.
func consume(dir string) error {
	var stop atomic.Bool
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		stop.Store(true)
	}()
	var o outcome
	var mu sync.Mutex
	failed := func(what string, err error) {
		mu.Lock()
		defer mu.Unlock()
		o.Failed++
		if o.First == "" {
			o.First = fmt.Sprintf("%s: %v", what, err)
		}
	}
	count := func(n *int64) { atomic.AddInt64(n, 1) }
	var all sync.WaitGroup
	for w := range workers {
		all.Go(func() {
			if err := work(dir, w, &stop, &o, failed, count); err != nil {
				failed("worker", err)
			}
		})
	}
	all.Wait()
	return json.NewEncoder(os.Stdout).Encode(&o)
}

// block is what is to stand at a place after its nth writing.
func block(worker, at int, n uint64) []byte {
	b := bytes.Repeat([]byte{byte(worker), byte(at), byte(n), 0x5a}, blockSize/4)
	binary.LittleEndian.PutUint64(b[4:], n)
	binary.LittleEndian.PutUint32(b, crc32.ChecksumIEEE(b[4:]))
	return b
}

func work(dir string, w int, stop *atomic.Bool, o *outcome, failed func(string, error), count func(*int64)) error {
	// Consumers of a shared volume each have names of their own.
	name := filepath.Join(dir, fmt.Sprintf("consumer-%d-worker-%d", os.Getpid(), w))
	f, err := os.OpenFile(name, os.O_RDWR|os.O_CREATE, 0o644)
	if err != nil {
		return err
	}
	defer f.Close()
	written := make([]uint64, blocks)
	buf := make([]byte, blockSize)
	did := func(what string, err error) bool {
		count(&o.Operations)
		if err != nil {
			failed(what, err)
		}
		return err == nil
	}
	for n := uint64(1); !stop.Load(); n++ {
		at := int(n*7) % blocks
		_, err := f.WriteAt(block(w, at, n), int64(at)*blockSize)
		if did("write", err) {
			written[at] = n
		}
		other := int(n*13) % blocks
		if written[other] != 0 {
			// Not from the page cache: ask the server.
			_ = unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED)
			_, err := f.ReadAt(buf, int64(other)*blockSize)
			if did("read", err) && !bytes.Equal(buf, block(w, other, written[other])) {
				count(&o.Corrupt)
			}
		}
		switch n % 16 {
		case 3:
			_, err = os.Stat(name)
			did("stat", err)
		case 5:
			did("fsync", f.Sync())
		case 7:
			_, err = os.ReadDir(dir)
			did("readdir", err)
		case 9:
			g, err := os.Open(name)
			if did("open", err) {
				g.Close()
			}
		case 11:
			did("truncate", f.Truncate(blocks*blockSize))
		case 13:
			once(name+"-dir", o, failed, count)
		}
	}
	return nil
}

// once makes, renames and removes a directory: what a server may be asked
// twice for, and then answers as if it were done already.
func once(name string, o *outcome, failed func(string, error), count func(*int64)) {
	twice := func(what string, err, as error, there bool, path string) {
		_, serr := os.Lstat(path)
		switch {
		case err == nil:
		case errors.Is(err, as) && (serr == nil) == there:
			count(&o.Twice)
		default:
			failed(what, err)
		}
	}
	twice("mkdir", os.Mkdir(name, 0o755), unix.EEXIST, true, name)
	twice("rename", os.Rename(name, name+"-2"), unix.ENOENT, false, name)
	twice("rmdir", os.Remove(name+"-2"), unix.ENOENT, false, name+"-2")
}
