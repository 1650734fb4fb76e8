package main

import (
	"fmt"
	"regexp"
	"strings"

	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

// fault is one thing wrong with the document or with a file derived from it.
type fault struct {
	file string
	line int // from 1; 0 for the file as a whole
	text string
}

func (f fault) String() string {
	if f.line == 0 {
		return fmt.Sprintf("%s: %s", f.file, f.text)
	}
	return fmt.Sprintf("%s:%d: %s", f.file, f.line, f.text)
}

// anchored is a requirement and the line it stands on.
type anchored struct {
	requirement.Requirement
	line int
}

// protoLine is a line of prepare.proto and where SPEC.md has it.
type protoLine struct {
	text string
	line int
}

// document is SPEC.md, taken apart.
type document struct {
	lines        []string
	requirements []anchored
	proto        []protoLine
	// The lines of the two table markers, 0 if absent.
	tableBegin, tableEnd int
	faults               []fault
}

const (
	specFile   = "SPEC.md"
	maxColumns = 72

	tableBegin = "<!-- speccheck: table of requirements -->"
	tableEnd   = "<!-- speccheck: end of table -->"
)

var (
	// anchorLine is the one form a normative line has.
	anchorLine = regexp.MustCompile(`^(?:\* )?<a id="([^"]*)"></a>(.*)$`)
	anchor     = regexp.MustCompile(`<a [^>]*>`)
	heading    = regexp.MustCompile(`^(#{1,6}) +(.*?) *$`)
	idForm     = regexp.MustCompile(`^[a-z][a-z0-9]*(-[a-z0-9]+)*\.[a-z][a-z0-9]*(-[a-z0-9]+)*$`)
	codeSpan   = regexp.MustCompile("`[^`]*`")
	subject    = regexp.MustCompile(`^(?:The|A) (Plugin|CO)\b`)
	innerEnd   = regexp.MustCompile(`[.!?] +[A-Z]`)
	localLink  = regexp.MustCompile(`\]\(#([^)]*)\)`)

	// keyword matches the words of RFC 2119, the longer forms first.
	keyword = regexp.MustCompile(`\b(MUST NOT|MUST|SHALL NOT|SHALL|SHOULD NOT|SHOULD|NOT RECOMMENDED|RECOMMENDED|REQUIRED|MAY|OPTIONAL)\b`)
)

var levels = map[string]requirement.Level{
	"MUST":       requirement.Must,
	"MUST NOT":   requirement.MustNot,
	"SHOULD":     requirement.Should,
	"SHOULD NOT": requirement.ShouldNot,
	"MAY":        requirement.May,
}

// parse takes SPEC.md apart and finds what is wrong within it. The words of
// RFC 2119 count in running text alone: not in fenced blocks, not in code
// spans, and not between the markers of the generated table.
func parse(text string, retired map[requirement.ID]int) *document {
	d := &document{lines: strings.Split(strings.TrimSuffix(text, "\n"), "\n")}
	section, fence, fenceLine, fences := "", "", 0, 0
	inTable := false
	slugs := map[string]int{}
	ids := map[requirement.ID]int{}
	names := map[string]requirement.ID{}

	for i, line := range d.lines {
		n := i + 1
		if strings.HasPrefix(line, "```") {
			if fenceLine == 0 {
				fence, fenceLine = strings.TrimPrefix(line, "```"), n
				if fence == "protobuf" && fences > 0 {
					d.proto = append(d.proto, protoLine{"", n})
				}
			} else {
				if fence == "protobuf" {
					fences++
				}
				fenceLine = 0
			}
			continue
		}
		if fenceLine != 0 {
			if fence == "protobuf" {
				d.proto = append(d.proto, protoLine{line, n})
				d.checkColumns(specFile, line, n)
			}
			continue
		}
		switch line {
		case tableBegin:
			d.tableBegin, inTable = n, true
			continue
		case tableEnd:
			d.tableEnd, inTable = n, false
			continue
		}
		if inTable {
			continue
		}
		if m := heading.FindStringSubmatch(line); m != nil {
			section = strings.ReplaceAll(m[2], "`", "")
			slugs[slug(section)] = n
		}
		d.sentence(n, line, section, retired, ids, names)
	}
	if fenceLine != 0 {
		d.fault(fenceLine, "this fenced block is not closed")
	}
	if d.tableBegin == 0 || d.tableEnd < d.tableBegin {
		d.fault(max(d.tableBegin, d.tableEnd), "no table of requirements: put %q and, below it, %q where it belongs", tableBegin, tableEnd)
	}
	d.checkLinks(slugs, ids)
	return d
}

// sentence checks one line of running text and keeps its requirement.
func (d *document) sentence(n int, line, section string, retired, ids map[requirement.ID]int, names map[string]requirement.ID) {
	words := keyword.FindAllString(codeSpan.ReplaceAllString(line, "``"), -1)
	switch len(anchor.FindAllString(codeSpan.ReplaceAllString(line, "``"), -1)) {
	case 0:
		if len(words) > 0 {
			d.fault(n, "%s without an id: begin the line with <a id=\"area.name\"></a>, or use lower case", words[0])
		}
		return
	case 1:
	default:
		d.fault(n, "two anchors in one line: one requirement a line")
		return
	}
	m := anchorLine.FindStringSubmatch(line)
	if m == nil {
		d.fault(n, "malformed anchor: a requirement begins its line with <a id=\"area.name\"></a>")
		return
	}
	id, text := requirement.ID(m[1]), m[2]
	good := true
	bad := func(format string, args ...any) {
		good = false
		d.fault(n, format, args...)
	}
	if !idForm.MatchString(m[1]) {
		bad("malformed id %q: two parts of lower-case words and digits joined by '-', separated by '.'", m[1])
	}
	if first := ids[id]; first != 0 {
		bad("duplicate id %s: first on line %d", id, first)
	} else {
		ids[id] = n
	}
	if other, ok := names[constant(id)]; ok && other != id {
		bad("%s and %s make one Go name, %s", other, id, constant(id))
	}
	names[constant(id)] = id
	if at := retired[id]; at != 0 {
		bad("%s is retired (%s:%d): choose another id", id, retiredFile, at)
	}
	actor := requirement.SP
	switch who := subject.FindStringSubmatch(text); {
	case who == nil:
		bad("%s: the sentence begins with its subject: The Plugin, A Plugin, The CO or A CO", id)
	case who[1] == "CO":
		actor = requirement.CO
	}
	var level requirement.Level
	switch len(words) {
	case 0:
		bad("%s: no word of RFC 2119", id)
	case 1:
		if level = levels[words[0]]; level == 0 {
			bad("%s: %s is not used here: MUST, SHOULD or MAY, with or without NOT", id, words[0])
		}
	default:
		bad("%s: two requirements in one line (%s)", id, strings.Join(words, ", "))
	}
	bare := codeSpan.ReplaceAllString(text, "``")
	if !strings.HasSuffix(text, ".") || innerEnd.MatchString(bare) {
		bad("%s: exactly one sentence, ended by a full stop", id)
	}
	if good {
		d.requirements = append(d.requirements, anchored{requirement.Requirement{
			ID: id, Level: level, Actor: actor, Section: section, Text: text,
		}, n})
	}
}

// checkLinks finds links within the document that lead nowhere.
func (d *document) checkLinks(slugs map[string]int, ids map[requirement.ID]int) {
	fenced := false
	for i, line := range d.lines {
		if strings.HasPrefix(line, "```") {
			fenced = !fenced
		}
		if fenced || (i+1 > d.tableBegin && i+1 < d.tableEnd) {
			continue
		}
		for _, m := range localLink.FindAllStringSubmatch(line, -1) {
			if slugs[m[1]] == 0 && ids[requirement.ID(m[1])] == 0 {
				d.fault(i+1, "link to #%s, which is neither a heading nor a requirement", m[1])
			}
		}
	}
}

func (d *document) checkColumns(file, line string, n int) {
	if columns := len([]rune(line)); columns > maxColumns {
		d.faults = append(d.faults, fault{file, n, fmt.Sprintf("proto line of %d columns: at most %d", columns, maxColumns)})
	}
}

func (d *document) fault(line int, format string, args ...any) {
	d.faults = append(d.faults, fault{specFile, line, fmt.Sprintf(format, args...)})
}

// slug is the anchor that Markdown renderers give to a heading.
func slug(heading string) string {
	var b strings.Builder
	for _, r := range strings.ToLower(heading) {
		switch {
		case r >= 'a' && r <= 'z', r >= '0' && r <= '9', r == '-', r == '_':
			b.WriteRune(r)
		case r == ' ':
			b.WriteByte('-')
		}
	}
	return b.String()
}
