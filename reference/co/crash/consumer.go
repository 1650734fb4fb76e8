package crash

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"sync"
	"time"
)

// The files of a volume: who it is, and what its consumer that stays writes.
const (
	nonceFile = "nonce"
	dataFile  = "data"
)

// errand is what a consumer process is told: to write all the time from Next
// on, or, with Stop, to end that; to read, or to write, a nonce.
type errand struct {
	Dir   string
	Write bool
	Stop  bool
	Next  uint64
	Nonce string
	Make  bool
}

// outcome is what it answers.
type outcome struct {
	// Next is the number that was not written yet.
	Next uint64
	// Lost is how many bytes of what was written are not there.
	Lost  int64
	Error string
}

// runConsumer is the process of all consumers. It has files of volumes open
// only while it writes.
func runConsumer(in io.Reader, out io.Writer) error {
	errands, outcomes := json.NewDecoder(in), json.NewEncoder(out)
	writers := map[string]*writer{}
	for {
		var e errand
		if err := errands.Decode(&e); err != nil {
			return nil //nolint:nilerr // its input ended
		}
		var o outcome
		var err error
		switch {
		case e.Write:
			writers[e.Dir] = startWriter(e.Dir, e.Next)
		case e.Stop:
			w := writers[e.Dir]
			close(w.stop)
			w.done.Wait()
			o.Next, err = w.next, w.err
			if err == nil {
				o.Lost, err = missing(e.Dir+"/"+dataFile, w.next)
			}
		case e.Make:
			err = os.WriteFile(e.Dir+"/"+nonceFile, []byte(e.Nonce), 0o600)
		default:
			var text []byte
			if text, err = os.ReadFile(e.Dir + "/" + nonceFile); err == nil && string(text) != e.Nonce {
				err = fmt.Errorf("%s is %q, want %q", nonceFile, text, e.Nonce)
			}
		}
		if err != nil {
			o.Error = err.Error()
		}
		if err := outcomes.Encode(o); err != nil {
			return err
		}
	}
}

// writer writes numbers, each at its place.
type writer struct {
	stop chan struct{}
	done sync.WaitGroup
	next uint64
	err  error
}

func startWriter(dir string, next uint64) *writer {
	w := &writer{stop: make(chan struct{}), next: next}
	w.done.Go(func() {
		f, err := os.OpenFile(dir+"/"+dataFile, os.O_RDWR|os.O_CREATE, 0o600)
		if err != nil {
			w.err = err
			return
		}
		defer f.Close()
		for {
			select {
			case <-w.stop:
				w.err = f.Sync()
				return
			case <-time.After(time.Millisecond):
			}
			if _, w.err = f.WriteAt(binary.BigEndian.AppendUint64(nil, w.next), int64(w.next)*8); w.err != nil {
				return
			}
			w.next++
		}
	})
	return w
}

// missing counts the bytes of numbers that are not where they were written.
func missing(file string, n uint64) (int64, error) {
	f, err := os.Open(file)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	var lost int64
	place := make([]byte, 8)
	for i := range n {
		_, err := f.ReadAt(place, int64(i)*8)
		if err != nil && err != io.EOF {
			return lost, err
		}
		if err == io.EOF || binary.BigEndian.Uint64(place) != i {
			lost += 8
		}
	}
	return lost, nil
}
