//go:build linux

package mountns

import (
	"encoding/json"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestDiff(t *testing.T) {
	root := Mount{ID: 10, ParentID: 1, FSType: "ext4", Root: "/", Point: "/", Propagation: Shared, PeerGroup: 1}
	data := Mount{ID: 11, ParentID: 10, FSType: "tmpfs", Root: "/", Point: "/data", Propagation: Private}
	other := Mount{ID: 12, ParentID: 10, FSType: "fuse", Subtype: "sshfs", Root: "/", Point: "/a b", Propagation: Private}
	readonly := data
	readonly.Attr, readonly.Propagation = AttrReadonly|AttrNosuid, SlaveOf
	moved := data
	moved.Point, moved.ParentID = "/else\nwhere", 12
	replaced := data
	replaced.Major = 7
	for _, c := range []struct {
		name          string
		unique        bool
		before, after []Mount
		want          string
		json          string
	}{
		{name: "nothing", unique: true, before: []Mount{root, data}, after: []Mount{data, root}},
		{
			name: "added and removed", unique: true, before: []Mount{root, data}, after: []Mount{root, other},
			want: "+ 12 fuse.sshfs on \"/a b\" (private)\n- 11 tmpfs on /data (private)",
		},
		{
			name: "attributes and propagation", unique: true, before: []Mount{data}, after: []Mount{readonly},
			want: "~ 11 tmpfs on /data (slave): attr rw,relatime -> ro,nosuid,relatime, propagation private -> slave",
		},
		{
			name: "moved", unique: true, before: []Mount{data}, after: []Mount{moved},
			want: `~ 11 tmpfs on "/else\nwhere" (private): parent_id 10 -> 12, point /data -> "/else\nwhere"`,
		},
		{
			name: "another device under a unique id", unique: true, before: []Mount{data}, after: []Mount{replaced},
			want: "~ 11 tmpfs on /data (private): device 0:0 -> 7:0",
		},
		{
			name: "another device under a small id is another mount", before: []Mount{data}, after: []Mount{replaced},
			want: "+ 11 tmpfs on /data (private)\n- 11 tmpfs on /data (private)",
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			got := Diff(NewTable(c.unique, c.before...), NewTable(c.unique, c.after...))
			if diff := cmp.Diff(c.want, got.String()); diff != "" {
				t.Errorf("want (-) have (+):\n%s", diff)
			}
			if got.Empty() != (c.want == "") {
				t.Errorf("Empty() = %v", got.Empty())
			}
			b, err := json.Marshal(got)
			must(t, err)
			var back Changes
			must(t, json.Unmarshal(b, &back))
			if diff := cmp.Diff(got, back); diff != "" {
				t.Errorf("through JSON:\n%s\n%s", diff, b)
			}
		})
	}
}

// Stacks are in the order of the tree, since a mount slid below another has the
// greater id.
func TestTableOrdersStacks(t *testing.T) {
	top := Mount{ID: 20, ParentID: 30, Point: "/x"}
	below := Mount{ID: 30, ParentID: 10, Point: "/x"}
	table := NewTable(true, Mount{ID: 10, ParentID: 1, Point: "/"}, top, below, Mount{ID: 40, ParentID: 10, Point: "/xy"})
	if diff := cmp.Diff([]Mount{below, top}, table.At("/x")); diff != "" {
		t.Error(diff)
	}
	if m, ok := table.Top("/x"); !ok || m.ID != top.ID {
		t.Errorf("Top: %v %v", m, ok)
	}
	if _, ok := table.Top("/nothing"); ok {
		t.Error("Top of nothing")
	}
	if got := table.Below("/x"); len(got) != 2 {
		t.Errorf("Below(/x) = %v, want the two at /x and not /xy", got)
	}
	if got := table.Below("/"); len(got) != table.Len() {
		t.Errorf("Below(/) = %v", got)
	}
	if got := table.Children(30); len(got) != 1 || got[0].ID != 20 {
		t.Errorf("Children: %v", got)
	}
	if _, ok := table.ByID(21); ok {
		t.Error("ByID of an absent id")
	}
	circle := NewTable(true, Mount{ID: 1, ParentID: 2, Point: "/x"}, Mount{ID: 2, ParentID: 1, Point: "/x"})
	if len(circle.At("/x")) != 2 {
		t.Error("a circle of parents")
	}
}

func TestPropagationText(t *testing.T) {
	for _, c := range []struct {
		p    Propagation
		text string
	}{
		{Private, "private"},
		{Shared, "shared"},
		{Shared | SlaveOf, "shared,slave"},
		{Unbindable, "unbindable"},
		{SlaveOf, "slave"},
	} {
		text, _ := c.p.MarshalText()
		var back Propagation
		if err := back.UnmarshalText(text); err != nil || back != c.p || string(text) != c.text {
			t.Errorf("%#x: %s, back %v, %v", uint32(c.p), text, back, err)
		}
	}
	var p Propagation
	if err := p.UnmarshalText([]byte("publik")); err == nil {
		t.Error("an unknown word was taken")
	}
	if got := Propagation(0).String(); got != "0x0" {
		t.Errorf("none: %q", got)
	}
}

func TestDiffIDs(t *testing.T) {
	for _, c := range []struct{ before, after, added, removed []uint64 }{
		{},
		{before: []uint64{1, 2, 3}, after: []uint64{1, 2, 3}},
		{after: []uint64{1}, added: []uint64{1}},
		{before: []uint64{1}, removed: []uint64{1}},
		{before: []uint64{1, 3, 5, 9}, after: []uint64{2, 3, 6, 7, 9}, added: []uint64{2, 6, 7}, removed: []uint64{1, 5}},
	} {
		added, removed := DiffIDs(c.before, c.after)
		if !cmp.Equal(added, c.added) || !cmp.Equal(removed, c.removed) {
			t.Errorf("%v -> %v: added %v removed %v", c.before, c.after, added, removed)
		}
	}
}
