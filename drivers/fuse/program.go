package fuse

import (
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// A Program is a command of somebody else's that serves FUSE. Each of its words
// may hold, and one of the first two stands in exactly one of them:
//
//	{device}      the device, for a program on libfuse 3 that takes /dev/fd/N
//	              for its mount point, as sshfs does
//	{mountpoint}  a directory, for any program that calls fusermount
//	{source}      the parameter source of the volume
//	{uid}, {gid}  the owner of the volume
//	{secret:KEY}  a file with the value of KEY of the call's secrets
//
// A program with a mountpoint runs in a user and a mount namespace of its own,
// where the node allows that to ordinary users.
//
// The file of a secret is in memory, for the user of the program alone, and
// gone with the process that serves. No value of a secret is ever a word.
//
// The program has to stay in the foreground, and to end when its mount does.
type Program []string

var (
	programName = regexp.MustCompile(`^[a-z0-9_-]{1,32}$`)
	placeholder = regexp.MustCompile(`\{(device|mountpoint|source|uid|gid|secret:[A-Za-z0-9._-]+)\}`)
	anyBraces   = regexp.MustCompile(`\{[^}]*\}`)
)

const secretPrefix = "secret:"

// ParseProgram splits a command at white space.
func ParseProgram(text string) (Program, error) {
	p := Program(strings.Fields(text))
	return p, p.check()
}

func (p Program) check() error {
	if len(p) == 0 || !filepath.IsAbs(p[0]) {
		return errors.New("a program begins with the absolute path of its file; for example /usr/bin/sshfs {source} {device} -f")
	}
	devices := 0
	for _, word := range p {
		for _, b := range anyBraces.FindAllString(word, -1) {
			if !placeholder.MatchString(b) {
				return fmt.Errorf("word %q: %s is none of {device}, {mountpoint}, {source}, {uid}, {gid} and {secret:KEY}", word, b)
			}
		}
		devices += strings.Count(word, "{device}") + strings.Count(word, "{mountpoint}")
	}
	if devices != 1 {
		return fmt.Errorf("{device} stands in it %d times; put it once, where the mount point belongs", devices)
	}
	return nil
}

// checkPrograms refuses what the operator cannot have meant.
func checkPrograms(programs map[string]Program) error {
	var all error
	for _, name := range slices.Sorted(maps.Keys(programs)) {
		if !programName.MatchString(name) {
			all = errors.Join(all, fmt.Errorf("program %q: the name needs 1 to 32 bytes of [a-z0-9_-]", name))
		}
		if err := programs[name].check(); err != nil {
			all = errors.Join(all, fmt.Errorf("program %q: %w", name, err))
		}
	}
	return all
}

// secrets are the keys of the secrets that the program is given.
func (p Program) secrets() []string {
	var keys []string
	for _, word := range p {
		for _, m := range placeholder.FindAllStringSubmatch(word, -1) {
			if key, ok := strings.CutPrefix(m[1], secretPrefix); ok && !slices.Contains(keys, key) {
				keys = append(keys, key)
			}
		}
	}
	return keys
}

// mounts tells whether the program calls fusermount.
func (p Program) mounts() bool {
	return slices.ContainsFunc(p, func(word string) bool { return strings.Contains(word, "{mountpoint}") })
}

// hasSource tells whether the program wants the parameter source.
func (p Program) hasSource() bool {
	return slices.ContainsFunc(p, func(word string) bool { return strings.Contains(word, "{source}") })
}

// checkSource refuses text that would be taken for an option, or that leads out
// of a directory the operator wrote before it.
func checkSource(source string) (rule, remedy string) {
	switch {
	case source == "":
		return "is required by this program", "set what the program is to serve"
	case len(source) > 1024:
		return "has more than 1024 bytes", "use a shorter one"
	case strings.HasPrefix(source, "-"):
		return "begins with '-', as an option does", "use a name that does not"
	case strings.ContainsFunc(source, func(r rune) bool { return r < ' ' || r == 0x7f }):
		return "holds a control character", "leave it out"
	case slices.Contains(strings.FieldsFunc(source, func(r rune) bool { return r == '/' || r == ':' }), ".."):
		return `has ".." as an element`, "name the place itself"
	}
	return "", ""
}

// words are the command, with the paths of files in the place of secrets.
func (p Program) words(o order, secret func(key string) string) []string {
	words := make([]string, len(p))
	for i, word := range p {
		words[i] = placeholder.ReplaceAllStringFunc(word, func(m string) string {
			switch name := m[1 : len(m)-1]; name {
			case "device":
				return "/dev/fd/3"
			case "mountpoint":
				return privateMountpoint
			case "source":
				return o.Source
			case "uid":
				return strconv.FormatUint(uint64(o.UID), 10)
			case "gid":
				return strconv.FormatUint(uint64(o.GID), 10)
			default:
				return secret(strings.TrimPrefix(name, secretPrefix))
			}
		})
	}
	return words
}
