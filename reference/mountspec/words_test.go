package mountspec

import (
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

var inTicks = regexp.MustCompile("`([^`]+)`")

// row returns the words in backticks of the cell after the one that is
// title, of SPEC.md's tables.
func row(t *testing.T, title string) []string {
	t.Helper()
	text, err := os.ReadFile("../../SPEC.md")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, found := strings.Cut(string(text), "\n| "+title+" | ")
	cell, _, ended := strings.Cut(rest, " |")
	if !found || !ended {
		t.Fatalf("SPEC.md has no row %q", title)
	}
	var words []string
	for _, m := range inTicks.FindAllStringSubmatch(cell, -1) {
		words = append(words, m[1])
	}
	return words
}

// TestForbiddenWordsAreThoseOfTheSpec compares the lists with the table of
// SPEC.md, in both directions.
func TestForbiddenWordsAreThoseOfTheSpec(t *testing.T) {
	left := make(map[string]bool)
	for w := range forbiddenWords {
		left[w] = true
	}
	for title, rule := range map[string]requirement.ID{
		"mount words":                   requirement.FilesystemNoMountWords,
		"user-space words":              requirement.FilesystemNoUserspaceWords,
		"keys that name another object": requirement.FilesystemNoObjectWords,
		"label keys":                    requirement.FilesystemNoLabelWords,
		"ID mapping keys":               requirement.FilesystemNoIDMapWords,
	} {
		tree := false // from suid to nodiratime: with r before it, too
		for _, w := range row(t, title) {
			if w == "subvol" || w == ".." || w == "r" {
				continue // the rest of a sentence
			}
			words := []string{w}
			tree = tree || w == "suid"
			if tree {
				words = append(words, "r"+w)
			}
			tree = tree && w != "nodiratime"
			for _, w := range words {
				if got, no := forbiddenWord(w); !no || got.rule != rule {
					t.Errorf("%q of SPEC.md: not forbidden by %s", w, rule)
				}
				delete(left, w)
			}
		}
	}
	for w := range left {
		t.Errorf("%q is forbidden here and not in SPEC.md", w)
	}
}

// TestForbiddenTypesAreThoseOfTheSpec does the same for filesystem types.
func TestForbiddenTypesAreThoseOfTheSpec(t *testing.T) {
	left := make(map[string]bool)
	for ft := range forbiddenTypes {
		left[ft] = true
	}
	for title, asHandle := range map[string]bool{
		"a way of mounting, not a filesystem":                  false,
		"a trigger that a daemon of the node serves":           false,
		"made of directories of the node that parameters name": true,
		"windows into the kernel":                              false,
		"memory without a limit":                               false,
		"mounted with a descriptor, not from text":             true,
	} {
		for _, ft := range row(t, title) {
			if got, no := forbiddenTypes[ft]; !no || got.asHandle != asHandle {
				t.Errorf("%q of SPEC.md: forbidden %t, as a handle allowed %t; want true, %t", ft, no, got.asHandle, asHandle)
			}
			delete(left, ft)
		}
	}
	for ft := range left {
		t.Errorf("%q is forbidden here and not in SPEC.md", ft)
	}
}
