package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

const (
	idsFile       = "spec/requirement/ids.go"
	retiredFile   = "spec/retired.txt"
	acceptedProto = "spec/accepted/prepare.proto"
	acceptedIDs   = "spec/accepted/ids.txt"
)

// derived is a file made from SPEC.md.
type derived struct {
	path    string // below the root of the checkout
	content []byte
}

// tree is the part of a checkout that speccheck reads.
type tree struct {
	root string
	doc  *document
	// performer is the text of the hand-written testing proto.
	performer string
	// since is the version that brought each accepted id.
	since map[requirement.ID]string
	// retired is the line of each retired id in its list.
	retired map[requirement.ID]int
	// baseline is the accepted prepare.proto.
	baseline string
}

var protoPackage = regexp.MustCompile(`(?m)^package [a-z0-9_.]*\.([a-z0-9]+);`)

// readTree reads the checkout at root and finds what is wrong within SPEC.md.
func readTree(root string) (*tree, error) {
	t := &tree{root: root, since: map[requirement.ID]string{}, retired: map[requirement.ID]int{}}
	spec, err := os.ReadFile(filepath.Join(root, specFile))
	if err != nil {
		return nil, err
	}
	err = t.eachLine(retiredFile, func(n int, fields []string) { t.retired[requirement.ID(fields[0])] = n })
	if err != nil {
		return nil, err
	}
	err = t.eachLine(acceptedIDs, func(_ int, fields []string) {
		if len(fields) == 2 {
			t.since[requirement.ID(fields[0])] = fields[1]
		}
	})
	if err != nil {
		return nil, err
	}
	performer, err := os.ReadFile(filepath.Join(root, protoDir, performerProto))
	if err != nil {
		return nil, err
	}
	t.performer = string(performer)
	baseline, err := os.ReadFile(filepath.Join(root, acceptedProto))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	t.baseline = string(baseline)

	t.doc = parse(string(spec), t.retired)
	for i := range t.doc.requirements {
		r := &t.doc.requirements[i]
		if r.Since = t.since[r.ID]; r.Since == "" {
			r.Since = t.version()
		}
	}
	return t, nil
}

// eachLine calls f for each line of a list that is neither empty nor a
// comment. A list that does not exist is empty.
func (t *tree) eachLine(path string, f func(n int, fields []string)) error {
	file, err := os.Open(filepath.Join(t.root, path))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer file.Close()
	s := bufio.NewScanner(file)
	for n := 1; s.Scan(); n++ {
		if fields := strings.Fields(s.Text()); len(fields) > 0 && fields[0][0] != '#' {
			f(n, fields)
		}
	}
	return s.Err()
}

// version is the last part of the proto package, for example v1alpha1.
func (t *tree) version() string {
	if m := protoPackage.FindStringSubmatch(t.doc.protoText()); m != nil {
		return m[1]
	}
	return ""
}

// sources are the protos of the project by the name they are compiled under.
func (t *tree) sources() map[string]string {
	return map[string]string{prepareProto: t.doc.protoText(), performerProto: t.performer}
}

// derive makes every file that comes from SPEC.md, SPEC.md with its table
// first. With faults there are no files.
func (t *tree) derive(ctx context.Context) ([]derived, []fault, error) {
	faults := append([]fault{}, t.doc.faults...)
	for i, line := range strings.Split(t.performer, "\n") {
		if columns := len([]rune(line)); columns > maxColumns {
			faults = append(faults, fault{filepath.Join(protoDir, performerProto), i + 1, fmt.Sprintf("proto line of %d columns: at most %d", columns, maxColumns)})
		}
	}
	faults = append(faults, t.lost()...)
	if len(t.doc.proto) == 0 {
		faults = append(faults, fault{specFile, 0, "no protobuf fence"})
		return nil, faults, nil
	}

	dir, err := csiDir(ctx, t.root)
	if err != nil {
		return nil, nil, err
	}
	files, wrong, err := compile(ctx, dir, t.sources(), prepareProto, performerProto)
	if err != nil {
		return nil, nil, err
	}
	for _, f := range wrong {
		if f.file == prepareProto {
			f.file, f.line = specFile, t.doc.specLine(f.line)
		}
		faults = append(faults, f)
	}
	if len(faults) > 0 {
		return nil, faults, nil
	}

	spec := t.doc.withTable()
	ids, err := idsSource(spec, t.doc.requirements)
	if err != nil {
		return nil, nil, err
	}
	code, err := goCode(ctx, t.root, descriptors(files), prepareProto, performerProto)
	if err != nil {
		return nil, nil, err
	}
	return append([]derived{
		{specFile, []byte(spec)},
		{filepath.Join(protoDir, prepareProto), []byte(t.doc.protoText())},
		{idsFile, ids},
	}, code...), nil, nil
}

// lost finds accepted ids that are neither in the document nor retired.
func (t *tree) lost() []fault {
	have := map[requirement.ID]bool{}
	for _, r := range t.doc.requirements {
		have[r.ID] = true
	}
	var faults []fault
	err := t.eachLine(acceptedIDs, func(n int, fields []string) {
		if id := requirement.ID(fields[0]); !have[id] && t.retired[id] == 0 {
			faults = append(faults, fault{acceptedIDs, n, fmt.Sprintf("%s is gone from %s: put it in %s so that nothing takes its name", id, specFile, retiredFile)})
		}
	})
	if err != nil {
		faults = append(faults, fault{acceptedIDs, 0, err.Error()})
	}
	return faults
}

// drift finds the derived files that differ from those in the checkout.
func (t *tree) drift(files []derived) []fault {
	var faults []fault
	for _, f := range files {
		have, err := os.ReadFile(filepath.Join(t.root, f.path))
		switch {
		case err != nil:
			faults = append(faults, fault{f.path, 0, fmt.Sprintf("missing: run make generate (%v)", err)})
		case string(have) != string(f.content):
			faults = append(faults, fault{f.path, firstDifference(string(have), string(f.content)), "differs from what SPEC.md says: run make generate"})
		}
	}
	return faults
}

func firstDifference(a, b string) int {
	la, lb := strings.Split(a, "\n"), strings.Split(b, "\n")
	for i := range min(len(la), len(lb)) {
		if la[i] != lb[i] {
			return i + 1
		}
	}
	return min(len(la), len(lb)) + 1
}

// accepted are the files that record the present contract as accepted.
func (t *tree) accepted() []derived {
	var b strings.Builder
	b.WriteString("# Requirement ids of the accepted contract and the version that brought each.\n# Written by speccheck accept.\n")
	for _, r := range t.doc.requirements {
		fmt.Fprintf(&b, "%s %s\n", r.ID, r.Since)
	}
	text := strings.TrimPrefix(t.doc.protoText(), protoHeader)
	return []derived{
		{acceptedProto, []byte("// The accepted contract, written by speccheck accept; DO NOT EDIT.\n" + text)},
		{acceptedIDs, []byte(b.String())},
	}
}
