package fuse

import (
	"slices"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/csi-prepare/csi-prepare/reference/handoff"
)

// TestPrepareToAttached tells how long it takes from the call until the mount
// is attached, and how long a bare call takes: with -v, it asserts nothing.
func TestPrepareToAttached(t *testing.T) {
	s := newSite(t, nil)
	key := handoff.Key{VolumeID: s.create("v", nil), PrepareID: "p"}
	var prepared, bare []time.Duration
	rounds := 50
	if testing.Short() {
		rounds = 3
	}
	for range rounds {
		time.Sleep(300 * time.Millisecond) // a spare process is there again
		began := time.Now()
		if _, err := csi.NewIdentityClient(s.conn).Probe(t.Context(), &csi.ProbeRequest{}); err != nil {
			t.Fatal(err)
		}
		bare = append(bare, time.Since(began))
		began = time.Now()
		s.up(key)
		prepared = append(prepared, time.Since(began))
		s.down(key)
	}
	for name, d := range map[string][]time.Duration{"prepare to attached": prepared, "bare call": bare} {
		slices.Sort(d)
		t.Logf("%s: median %v, least %v", name, d[len(d)/2], d[0])
	}
}
