package mountspec

import (
	"strings"

	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

// target judges where the spec attaches, by itself and beside the specs
// before it. Targets are compared as they stand: one that is not in its
// shortest form breaks spec.target-relative anyway.
func (c *check) target() {
	const field = "target"
	t := c.spec().Target

	if c.index == 0 && t != "" {
		c.add(requirement.SpecFirstTarget, field,
			"%s: the first mount spec goes to the place itself and has an empty target", show(t))
	}
	if c.index > 0 && t == "" {
		c.add(requirement.SpecFirstTarget, field,
			"empty, which only the first mount spec may be: name a place below it")
	}
	c.text(field, t)
	if fault := pathFault(t); fault != "" {
		c.add(requirement.SpecTargetRelative, field,
			"%s %s: give plain names separated by single '/'", show(t), fault)
	}
	if excess := pathExcess(t); excess != "" {
		c.add(requirement.SpecTargetLength, field, "%s", excess)
	}
	if t == "" {
		return
	}
	for i := range c.index {
		earlier := c.specs[i].Target
		switch {
		case earlier == t:
			c.add(requirement.SpecTargetUnique, field,
				"%s is the target of mount_specs[%d] too: attach each at a place of its own", show(t), i)
		case isBelow(earlier, t):
			c.add(requirement.SpecTargetOrder, field,
				"%s would hide mount_specs[%d] at %s: put the outer target first", show(t), i, show(earlier))
		}
	}
}

// isBelow reports whether path lies below dir, neither of them empty.
func isBelow(path, dir string) bool {
	return len(path) > len(dir) && path[len(dir)] == '/' && strings.HasPrefix(path, dir)
}
