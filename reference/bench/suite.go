package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
	mountutils "k8s.io/mount-utils"

	"github.com/moby/sys/mountinfo"

	"github.com/csi-prepare/csi-prepare/reference/mountns"
	"github.com/csi-prepare/csi-prepare/reference/perform"
)

// Names of the cases that goals refer to.
const (
	caseBind        = "one read-only bind"
	caseTmpfs       = "one tmpfs"
	caseNamespace   = "one read-only bind in another namespace"
	caseList        = "a list of binds"
	caseBusySource  = "bind from a source with N child mounts"
	caseAudited     = "a list with an audit before and after"
	caseIncremental = "what is new in the table"
	caseExact       = "exact difference of the table"
	caseMachine     = "what is new on the machine"
)

const (
	raw          = "raw mount(2)"
	elsewhere    = "csi-prepare, other namespace"
	atParent     = "csi-prepare, root at the target's parent"
	containerdV2 = "containerd core/mount"
	mountUtils   = "k8s.io/mount-utils"
	withList     = "k8s.io/mount-utils + List"
	withInfo     = "containerd core/mount + mountinfo"
	getMounts    = "moby mountinfo.GetMounts"
	procWalk     = "every /proc/*/task/*/mountinfo"
)

// fills are the numbers of other mounts in the namespace, ascending: mounts
// are only ever added.
var fills = []int{0, 1000, 10000, 30000}

type builder struct {
	section string
	build   func() (Case, error)
}

// suite is every case, on one ground.
type suite struct {
	ground *Ground
	rounds int
	ours   *performer
}

func newSuite(g *Ground, rounds int) (*suite, error) {
	ours, err := newPerformer(g)
	return &suite{ground: g, rounds: rounds, ours: ours}, err
}

func (s *suite) Close() error { return s.ours.Close() }

// cases are in the order they are run: the fillers grow from one to the next.
func (s *suite) cases() []builder {
	var all []builder
	add := func(section string, build func() (Case, error)) {
		all = append(all, builder{section, build})
	}
	add("In another mount namespace", s.inNamespace)
	for _, n := range fills {
		add(fmt.Sprintf("One mount, %d others", n), s.filled(n, s.bind))
		add(fmt.Sprintf("One mount, %d others", n), s.filled(n, s.tmpfs))
		if n == 0 {
			add("A list as one transaction", func() (Case, error) { return s.list(10) })
			add("A list as one transaction", func() (Case, error) { return s.list(3) })
		}
		if n == 10000 {
			add("A list with audit", s.filled(n, s.audited))
		}
		add("Audit of a namespace", s.filled(n, s.incremental))
		add("Audit of a namespace", s.filled(n, s.exact))
	}
	add("Raw I/O of a block volume", s.rawReads)
	add("Raw I/O of a block volume", s.rawWrites)
	add(sectionFUSE, s.fuseRead)
	add(sectionFUSE, s.fuseWrite)
	add(sectionFUSE, s.fuseRandom)
	add(sectionFUSE, s.fuseMetadata)
	add("Audit of the machine", s.machine)
	for _, n := range fills {
		add("A source that is busy", func() (Case, error) { return s.busySource(n) })
	}
	return all
}

// filled makes a case with n other mounts in the namespace.
func (s *suite) filled(n int, build func(n int) (Case, error)) func() (Case, error) {
	return func() (Case, error) {
		if err := s.ground.Fill(n); err != nil {
			return Case{}, err
		}
		return build(n)
	}
}

// roundsAt is fewer rounds where a cycle of the peers takes long.
func (s *suite) roundsAt(n int) int {
	if n >= 30000 {
		return max(s.rounds/3, 3)
	}
	return s.rounds
}

func (s *suite) bind(n int) (Case, error) {
	source := s.ground.source + "/data"
	target := s.ground.Dir("one")
	return Case{
		Name: caseBind, N: n, K: 1, Rounds: s.roundsAt(n), Makes: 1, At: target,
		Variants: []Variant{
			rawBinds(source, target),
			s.ours.binds(product, nil, nil, target, ""),
			s.ours.bindAtParent(atParent, target),
			bindCalls(s.ground.source, unix.AT_FDCWD, target, filepath.Dir(target)),
			mobyBind(source, target),
			containerdBinds(source, target, ""),
			mountUtilsBinds(source, target),
		},
	}, nil
}

func (s *suite) tmpfs(n int) (Case, error) {
	target := s.ground.Dir("tmpfs")
	return Case{
		Name: caseTmpfs, N: n, K: 1, Rounds: s.roundsAt(n), Makes: 1, At: target,
		Variants: []Variant{
			rawTmpfs(target), s.ours.tmpfs(target), tmpfsCalls(target), mobyTmpfs(target), containerdTmpfs(target), mountUtilsTmpfs(target),
		},
	}, nil
}

// inNamespace compares with the floor in the caller's own namespace: what the
// peers would have to do besides is no part of it.
func (s *suite) inNamespace() (Case, error) {
	source := s.ground.source + "/data"
	target := s.ground.Dir("ns")
	other, err := mountns.New(context.Background()) // has the target too
	if err != nil {
		return Case{}, err
	}
	return Case{
		Name: caseNamespace, K: 1, Rounds: s.rounds,
		Variants: []Variant{
			rawBinds(source, target),
			s.ours.binds(elsewhere, other, nil, target, ""),
			elsewhereCalls(other, s.ground.source, target),
			s.ours.binds(product, nil, nil, target, ""),
		},
		Makes: anyNumber,
		Close: other.Close,
	}, nil
}

func (s *suite) list(k int) (Case, error) {
	source := s.ground.source + "/data"
	root := s.ground.Dir(fmt.Sprintf("list%d", k))
	targets := nestedTargets(k)
	if err := makeBelow(source, targets); err != nil {
		return Case{}, err
	}
	variants := []Variant{
		rawBinds(source, below(root, targets)...),
		s.ours.binds(product, nil, nil, root, targets...),
		listCalls(s.ground.source, root, s.ground.Dir("trash-alone"), targets...),
		containerdBinds(source, root, targets...),
		mountUtilsBinds(source, below(root, targets)...),
	}
	for i := range variants {
		variants[i].Divide = k
	}
	return Case{
		Name: caseList, K: k, Rounds: s.rounds, Makes: k, At: root, Variants: variants,
	}, nil
}

// audited is a list with a look for leaks before and after, each party with
// what it has for that.
func (s *suite) audited(n int) (Case, error) {
	const k = 10
	source := s.ground.source + "/data"
	root := s.ground.Dir("audited")
	targets := nestedTargets(k)
	if err := makeBelow(source, targets); err != nil {
		return Case{}, err
	}
	utils := mountutils.NewWithoutSystemd("")
	list := func() (int, error) {
		mounts, err := utils.List()
		return len(mounts), err
	}
	info := func() (int, error) {
		mounts, err := mountinfo.GetMounts(nil)
		return len(mounts), err
	}
	return Case{
		Name: caseAudited, N: n, K: k, Rounds: max(s.rounds/3, 3), Makes: k, At: root,
		Variants: []Variant{
			rawBinds(source, below(root, targets)...),
			s.ours.audited(s.ours.binds(product, nil, nil, root, targets...)),
			s.ours.audited(listCalls(s.ground.source, root, s.ground.Dir("trash-alone"), targets...)),
			audited(containerdBinds(source, root, targets...), withInfo, info),
			audited(mountUtilsBinds(source, below(root, targets)...), withList, list),
		},
	}, nil
}

// busySource binds from a mount that has n mounts below it, as a node's root
// has.
func (s *suite) busySource(n int) (Case, error) {
	root := s.ground.Dir("busy", fmt.Sprint(n))
	if err := mountTmpfs(root); err != nil {
		return Case{}, err
	}
	child, data := filepath.Join(root, "child"), filepath.Join(root, "data")
	for _, dir := range []string{child, data} {
		if err := os.Mkdir(dir, 0o755); err != nil {
			return Case{}, err
		}
	}
	for i := range n {
		at := filepath.Join(root, fmt.Sprintf("c%d", i))
		if err := os.Mkdir(at, 0o755); err != nil {
			return Case{}, err
		}
		if err := bindMount(child, at); err != nil {
			return Case{}, err
		}
	}
	target := s.ground.Dir("from-busy")
	return Case{
		Name: caseBusySource, N: n, K: 1, Rounds: s.roundsAt(n), Makes: 1,
		Variants: []Variant{
			rawPlainBind(data, target),
			s.ours.plainBind(product, s.ours.keeping, data, target),
			s.ours.plainBind("csi-prepare, nothing kept", &perform.Executor{}, data, target),
			// A kept source has no child mounts, as this one has none.
			bindCalls(s.ground.source, unix.AT_FDCWD, target, filepath.Dir(target)),
			containerdPlainBind(data, target),
		},
		Close: func() error {
			s.ours.keeping.Drop()
			return detach(root)
		},
	}, nil
}
