package nfs

import (
	"errors"
	"fmt"
	"net/netip"
	"path"
	"regexp"
	"strings"
)

// Export is a directory that a server exports.
type Export struct {
	// Host is a name, or an address without brackets.
	Host string
	// Path is absolute on the server, in its shortest form.
	Path string
}

// ParseExport reads HOST:PATH, an IPv6 address in brackets.
func ParseExport(text string) (Export, error) {
	host, dir, ok := strings.Cut(text, ":/")
	if !ok {
		return Export{}, fmt.Errorf("export %q: write it as HOST:PATH, for example nfs.example.org:/srv/volumes or [2001:db8::1]:/srv/volumes", text)
	}
	if inner, ok := strings.CutPrefix(host, "["); ok {
		if host, ok = strings.CutSuffix(inner, "]"); !ok {
			return Export{}, fmt.Errorf("export %q: the bracket of the address is not closed", text)
		}
		if a, err := netip.ParseAddr(host); err != nil || !a.Is6() {
			return Export{}, fmt.Errorf("export %q: what is in brackets is no IPv6 address", text)
		}
	}
	e := Export{host, "/" + dir}
	return e, e.check()
}

var hostName = regexp.MustCompile(`^[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?\.?$`)

func (e Export) check() error {
	if _, err := netip.ParseAddr(e.Host); err != nil && !hostName.MatchString(e.Host) {
		return fmt.Errorf("export: host %q is neither a name nor an address", e.Host)
	}
	if !path.IsAbs(e.Path) || path.Clean(e.Path) != e.Path {
		return fmt.Errorf("export: path %q needs to be absolute, with no '.', '..', double or trailing slash", e.Path)
	}
	if err := checkText(e.Path); err != nil {
		return fmt.Errorf("export: path %w", err)
	}
	return nil
}

// checkText refuses what a mount helper, or whoever joins options to a list,
// would read as something else than a part of a path.
func checkText(s string) error {
	for _, r := range s {
		if r <= ' ' || r == 0x7f || strings.ContainsRune(`,"'\`, r) || r == '�' {
			return errors.New("holds a blank, comma, quote, backslash or control character; use another name")
		}
	}
	return nil
}

// source is what the kernel is told to mount: the host is but a label there.
func (e Export) source(below string) string {
	host := e.Host
	if strings.Contains(host, ":") {
		host = "[" + host + "]"
	}
	return host + ":" + path.Join(e.Path, below)
}

// maxSubdirectory leaves room in a source, which has 255 bytes at most, for
// the host, the export, and the volume.
const maxSubdirectory = 96

// checkSubdirectory refuses what does not name a directory below the export,
// by the rules of a path alone. Where the export can be reached it is resolved
// as well, beneath it and through no link.
func checkSubdirectory(dir string) error {
	switch {
	case len(dir) > maxSubdirectory:
		return fmt.Errorf("has %d bytes, at most %d are allowed", len(dir), maxSubdirectory)
	case path.IsAbs(dir), path.Clean(dir) != dir, dir == "..", strings.HasPrefix(dir, "../"):
		return errors.New("needs to be relative to the export, with no '.', '..', double or trailing slash")
	}
	return checkText(dir)
}
