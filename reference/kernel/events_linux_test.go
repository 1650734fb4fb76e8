package kernel

import (
	"testing"
)

// event is one as the kernel writes it, native byte order little-endian.
func event(mask byte, mount byte) []byte {
	b := make([]byte, 40)
	b[0], b[4], b[6] = 40, 3, 24
	b[11] = mask // bits 24 and up
	b[24], b[26] = 7, 16
	b[32] = mount
	return b
}

func FuzzParseMountEvents(f *testing.F) {
	f.Add(event(1, 9))
	f.Add(append(event(1, 9), event(2, 9)...))
	f.Add(event(3, 1)[:39])
	f.Add([]byte{0, 0, 0, 0})
	f.Fuzz(func(t *testing.T, b []byte) {
		events, err := ParseMountEvents(nil, b)
		if err == nil && len(events)*24 > len(b) {
			t.Errorf("%d events in %d bytes", len(events), len(b))
		}
	})
}

func TestMountEventsAreReadInOrder(t *testing.T) {
	events, err := ParseMountEvents(nil, append(event(1, 9), event(3, 8)...))
	if err != nil {
		t.Fatal(err)
	}
	want := []MountEvent{{Mount: 9, Attached: true}, {Mount: 8, Attached: true, Detached: true}}
	if len(events) != 2 || events[0] != want[0] || events[1] != want[1] {
		t.Errorf("have %+v, want %+v", events, want)
	}
}
