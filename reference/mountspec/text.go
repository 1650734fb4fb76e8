package mountspec

import (
	"fmt"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

// Limits of the contract, in bytes.
const (
	maxPath      = 4095 // PATH_MAX less the NUL: targets, relative paths, device_path
	maxComponent = 255  // NAME_MAX
	maxText      = 128  // of a string field with no limit of its own (CSI, size limits)
	maxHandleID  = 128
	maxGrant     = 63
	maxFSType    = 31
	maxKey       = 128
	maxValue     = 255  // fsconfig(2) refuses 256 with EINVAL
	maxJoined    = 4095 // mount(2) cuts what is longer without an error
)

// text judges that s can be handed to the kernel and printed at all. Runtimes
// written in C cut at a NUL without an error, and so does the kernel.
func (c *check) text(field, s string) {
	if fault := textFault(s); fault != "" {
		c.add(requirement.SpecText, field, "%s: send text", fault)
	}
}

// length judges a field whose limit no rule of its own names.
func (c *check) length(field, s string, limit int) {
	if len(s) > limit {
		c.add(requirement.SpecFieldLength, field, "%d bytes: at most %d", len(s), limit)
	}
}

func textFault(s string) string {
	switch {
	case strings.IndexByte(s, 0) >= 0:
		return "holds a NUL byte"
	case !utf8.ValidString(s):
		return "is not valid UTF-8"
	default:
		return ""
	}
}

// pathFault says why s is no relative path of plain components, "" if it is.
// The empty path has none.
func pathFault(s string) string {
	if s == "" {
		return ""
	}
	if s[0] == '/' {
		return "begins with '/'"
	}
	for rest, more := s, true; more; {
		var name string
		name, rest, more = strings.Cut(rest, "/")
		switch name {
		case "":
			return "has an empty component"
		case ".":
			return `has the component "."`
		case "..":
			return `has the component ".."`
		}
	}
	return ""
}

// pathExcess says which limit of a path s is over, "" if none.
func pathExcess(s string) string {
	if len(s) > maxPath {
		return fmt.Sprintf("%d bytes: at most %d", len(s), maxPath)
	}
	for rest, more := s, true; more; {
		var name string
		name, rest, more = strings.Cut(rest, "/")
		if len(name) > maxComponent {
			return fmt.Sprintf("a component of %d bytes: at most %d", len(name), maxComponent)
		}
	}
	return ""
}

// idFault says why s is no id of 1 to 128 bytes of [A-Za-z0-9._-].
func idFault(s string) string {
	switch {
	case s == "":
		return "is empty"
	case len(s) > maxHandleID:
		return fmt.Sprintf("has %d bytes", len(s))
	case !only(s, "._-", true):
		return "has a byte outside [A-Za-z0-9._-]"
	default:
		return ""
	}
}

// only reports whether s is made of ASCII lower case letters, digits and the
// bytes of extra, and of upper case letters too where those are allowed.
func only(s, extra string, upper bool) bool {
	for i := range len(s) {
		switch b := s[i]; {
		case 'a' <= b && b <= 'z', '0' <= b && b <= '9':
		case upper && 'A' <= b && b <= 'Z':
		case strings.IndexByte(extra, b) >= 0:
		default:
			return false
		}
	}
	return true
}

// maxShown bounds what a detail repeats of the Plugin's text.
const maxShown = 64

// show quotes s for a detail, and only as much of it as a person reads.
func show(s string) string {
	if len(s) <= maxShown {
		return strconv.QuoteToASCII(s)
	}
	return strconv.QuoteToASCII(s[:maxShown]) + fmt.Sprintf("... (%d bytes)", len(s))
}

// showKey is show for a parameter's key. A Plugin that puts "password=…" into
// the key must not have it printed.
func showKey(s string) string {
	key, _, cut := strings.Cut(s, "=")
	if cut {
		return show(key) + "=..."
	}
	return show(key)
}
