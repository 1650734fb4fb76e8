package mountns

import (
	"fmt"
	"strconv"
	"strings"
)

// Changes is the difference of two tables, each list in order of ID.
type Changes struct {
	Added   []Mount  `json:"added,omitempty"`
	Removed []Mount  `json:"removed,omitempty"`
	Changed []Change `json:"changed,omitempty"`
}

// Change is a mount that is in both tables and not the same.
type Change struct {
	Before Mount `json:"before"`
	After  Mount `json:"after"`
	// Fields says what differs, in the order of [Mount]'s fields.
	Fields []FieldChange `json:"fields"`
}

// FieldChange is one difference, for reading: attributes are words, not bits.
type FieldChange struct {
	// Name is that of the field in JSON.
	Name   string `json:"name"`
	Before string `json:"before"`
	After  string `json:"after"`
}

// Diff compares two tables of one namespace. Mounts are the same if their
// unique ids are.
//
// If either table lacks unique ids, mounts are the same if id, device, root and
// type all are; then a mount that was replaced by another of the same directory
// and has got its id, as it will if nothing else was mounted in between, goes
// unnoticed.
func Diff(before, after *Table) Changes {
	var c Changes
	unique := before.Unique && after.Unique
	b, a := before.Mounts, after.Mounts
	for len(b) > 0 || len(a) > 0 {
		switch {
		case len(a) == 0 || len(b) > 0 && b[0].ID < a[0].ID:
			c.Removed = append(c.Removed, b[0])
			b = b[1:]
		case len(b) == 0 || a[0].ID < b[0].ID:
			c.Added = append(c.Added, a[0])
			a = a[1:]
		default:
			if !unique && !same(&b[0], &a[0]) {
				c.Removed, c.Added = append(c.Removed, b[0]), append(c.Added, a[0])
			} else if b[0] != a[0] {
				c.Changed = append(c.Changed, Change{Before: b[0], After: a[0], Fields: fieldChanges(&b[0], &a[0])})
			}
			b, a = b[1:], a[1:]
		}
	}
	return c
}

// same is what identity comes to where ids are reused.
func same(b, a *Mount) bool {
	return b.Major == a.Major && b.Minor == a.Minor && b.Root == a.Root && b.FSType == a.FSType
}

func fieldChanges(b, a *Mount) []FieldChange {
	var fields []FieldChange
	compare := func(name, before, after string) {
		if before != after {
			fields = append(fields, FieldChange{name, before, after})
		}
	}
	number := func(v uint64) string { return strconv.FormatUint(v, 10) }
	device := func(m *Mount) string { return fmt.Sprintf("%d:%d", m.Major, m.Minor) }
	compare("parent_id", number(b.ParentID), number(a.ParentID))
	compare("small_id", number(uint64(b.SmallID)), number(uint64(a.SmallID)))
	compare("device", device(b), device(a))
	compare("root", b.Root, a.Root)
	compare("root_deleted", strconv.FormatBool(b.RootDeleted), strconv.FormatBool(a.RootDeleted))
	compare("point", b.Point, a.Point)
	compare("point_deleted", strconv.FormatBool(b.PointDeleted), strconv.FormatBool(a.PointDeleted))
	compare("fstype", b.FSType, a.FSType)
	compare("subtype", b.Subtype, a.Subtype)
	compare("source", b.Source, a.Source)
	compare("sb_options", b.SBOptions, a.SBOptions)
	compare("sb_readonly", strconv.FormatBool(b.SBReadonly), strconv.FormatBool(a.SBReadonly))
	compare("sb_flags", fmt.Sprintf("%#x", b.SBFlags), fmt.Sprintf("%#x", a.SBFlags))
	compare("attr", attrString(b.Attr), attrString(a.Attr))
	compare("propagation", b.Propagation.String(), a.Propagation.String())
	compare("peer_group", number(b.PeerGroup), number(a.PeerGroup))
	compare("master", number(b.Master), number(a.Master))
	return fields
}

// Empty says that the tables are the same.
func (c *Changes) Empty() bool { return len(c.Added)+len(c.Removed)+len(c.Changed) == 0 }

// String has a line for each mount: "+" added, "-" removed, "~" changed with
// what changed, in that order of signs; "" if there is nothing.
//
//   - 4294968321 tmpfs on /srv/a (private)
//   - 4294968300 ext4 on /srv/b (shared)
//     ~ 4294968299 ext4 on /srv/c (private): attr rw,relatime -> ro,relatime
func (c Changes) String() string {
	var b strings.Builder
	for _, m := range c.Added {
		fmt.Fprintf(&b, "+ %s\n", m)
	}
	for _, m := range c.Removed {
		fmt.Fprintf(&b, "- %s\n", m)
	}
	for _, ch := range c.Changed {
		fmt.Fprintf(&b, "~ %s:", ch.After)
		for i, f := range ch.Fields {
			if i > 0 {
				b.WriteByte(',')
			}
			fmt.Fprintf(&b, " %s %s -> %s", f.Name, readable(f.Before), readable(f.After))
		}
		b.WriteByte('\n')
	}
	return strings.TrimSuffix(b.String(), "\n")
}
