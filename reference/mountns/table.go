package mountns

import (
	"slices"
	"strings"
	"sync"
)

// Table is the mounts of a namespace at one moment. It does not change.
type Table struct {
	// Mounts are in ascending order of ID. Do not modify them.
	Mounts []Mount
	// Namespace is the id of the namespace, 0 for a table from [NewTable].
	Namespace uint64
	// Unique says that ids are unique ids. If not, the kernel is older than
	// 6.8, ids are those of mountinfo, and a mount that replaced another may
	// have got the other's id.
	Unique bool

	index   sync.Once
	byPoint map[string][]int
}

// NewTable makes a table of mounts, as for comparing a selection with [Diff].
func NewTable(unique bool, mounts ...Mount) *Table {
	sorted := slices.Clone(mounts)
	slices.SortFunc(sorted, func(a, b Mount) int { return compareIDs(a.ID, b.ID) })
	return &Table{Mounts: sorted, Unique: unique}
}

func compareIDs(a, b uint64) int {
	switch {
	case a < b:
		return -1
	case a > b:
		return 1
	}
	return 0
}

// Len is the number of mounts.
func (t *Table) Len() int { return len(t.Mounts) }

// ByID returns the mount with the id.
func (t *Table) ByID(id uint64) (Mount, bool) {
	i, found := t.find(id)
	if !found {
		return Mount{}, false
	}
	return t.Mounts[i], true
}

func (t *Table) find(id uint64) (int, bool) {
	return slices.BinarySearchFunc(t.Mounts, id, func(m Mount, id uint64) int { return compareIDs(m.ID, id) })
}

// At returns the mounts attached at point, the lowest of the stack first, so
// that the last is the one that a path leads to, unless something is mounted
// over a directory above.
func (t *Table) At(point string) []Mount {
	t.index.Do(t.makeIndex)
	return t.pick(t.byPoint[point])
}

// Top returns the last of [Table.At].
func (t *Table) Top(point string) (Mount, bool) {
	stack := t.At(point)
	if len(stack) == 0 {
		return Mount{}, false
	}
	return stack[len(stack)-1], true
}

// Below returns the mounts attached at dir or anywhere under it, in order of ID.
func (t *Table) Below(dir string) []Mount {
	prefix := strings.TrimSuffix(dir, "/") + "/"
	var found []Mount
	for _, m := range t.Mounts {
		if m.Point == dir || strings.HasPrefix(m.Point, prefix) {
			found = append(found, m)
		}
	}
	return found
}

// Children returns the mounts attached directly to the mount with the id, in
// order of ID: also one that is stacked on it.
func (t *Table) Children(id uint64) []Mount {
	var found []Mount
	for _, m := range t.Mounts {
		if m.ParentID == id && m.ID != id {
			found = append(found, m)
		}
	}
	return found
}

func (t *Table) pick(indexes []int) []Mount {
	mounts := make([]Mount, len(indexes))
	for i, at := range indexes {
		mounts[i] = t.Mounts[at]
	}
	return mounts
}

// makeIndex groups by point and puts each stack in order. Ids do not tell the
// order, since a mount can be slid below another or moved.
func (t *Table) makeIndex() {
	t.byPoint = make(map[string][]int, len(t.Mounts))
	for i := range t.Mounts {
		p := t.Mounts[i].Point
		t.byPoint[p] = append(t.byPoint[p], i)
	}
	for _, stack := range t.byPoint {
		if len(stack) > 1 {
			slices.SortStableFunc(stack, func(a, b int) int { return t.depth(a) - t.depth(b) })
		}
	}
}

// depth is the number of mounts above i in the tree. A table read while mounts
// moved might hold a circle, hence the bound.
func (t *Table) depth(i int) int {
	depth := 0
	for depth < len(t.Mounts) {
		parent, found := t.find(t.Mounts[i].ParentID)
		if !found || parent == i {
			break
		}
		i = parent
		depth++
	}
	return depth
}
