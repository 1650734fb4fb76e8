package co

import (
	"errors"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/csi-prepare/csi-prepare/reference/mountspec"
)

func TestDefaultsAreSafe(t *testing.T) {
	p := &Policy{}
	s := p.For("any")
	if m := s.Mount(); m.AllowSuid || m.AllowDev {
		t.Errorf("mounts are made with %+v", m)
	}
	performer := s.Performer(false, false)
	for _, fstype := range []string{"tmpfs", "overlay", "proc", "fuse", "ramfs"} {
		if slices.Contains(performer.FSTypes, fstype) {
			t.Errorf("%s is offered", fstype)
		}
	}
	if slices.Contains(performer.Kinds, mountspec.KindExtension) || len(performer.Extensions) > 0 || len(performer.Grants) > 0 {
		t.Errorf("offered: %+v", performer)
	}
	if !slices.Contains(s.Performer(true, false).FSTypes, "tmpfs") {
		t.Error("tmpfs is not offered for an ephemeral volume")
	}
	if err := s.check(); err != nil {
		t.Error(err)
	}
}

func TestParsePolicy(t *testing.T) {
	p, err := ParsePolicy([]byte(`
apiVersion: csi-prepare/v1alpha1
kind: Policy
defaults:
  noexec: true
  grants: {shared: /srv/shared}
drivers:
  one.example:
    kinds: [BIND]
    fsTypes: []
    allowDev: true
    grants: {data: /srv/volumes}
    protected: [/app/secrets]
    callDeadline: 5s
`))
	if err != nil {
		t.Fatal(err)
	}
	want := DefaultSettings()
	want.Noexec, want.Grants = true, map[string]string{"shared": "/srv/shared"}
	if diff := cmp.Diff(want, p.For("other.example")); diff != "" {
		t.Errorf("other driver (-want +got):\n%s", diff)
	}
	want.Kinds, want.FSTypes, want.AllowDev = []mountspec.KindName{mountspec.KindBind}, []string{}, true
	want.Grants = map[string]string{"shared": "/srv/shared", "data": "/srv/volumes"}
	want.Protected, want.CallDeadline = []string{"/app/secrets"}, Duration(5*time.Second)
	if diff := cmp.Diff(want, p.For("one.example")); diff != "" {
		t.Errorf("named driver (-want +got):\n%s", diff)
	}
}

func TestParsePolicyRefuses(t *testing.T) {
	const head = "apiVersion: csi-prepare/v1alpha1\nkind: Policy\n"
	for _, test := range []struct{ name, text, want string }{
		{"another version", "apiVersion: v2\nkind: Policy\n", "apiVersion"},
		{"a field that is none", head + "defaults: {noExec: true, alowDev: true}", "alowDev"},
		{"a field given twice", head + "defaults: {noexec: true}\ndefaults: {}", "already set"},
		{"a kind it cannot perform", head + "defaults: {kinds: [EXTENSION]}", "EXTENSION"},
		{"no time for a failover", head + "defaults: {failover: 0s}", "failover"},
		{"no kind", head + "defaults: {kinds: []}", "kinds"},
		{"a grant of the root", head + "drivers: {d: {grants: {all: /}}}", "drivers.d: grants.all"},
		{"a grant that is relative", head + "defaults: {grants: {data: srv}}", "grants.data"},
		{"a grant by a name that is none", head + "defaults: {grants: {Data: /srv}}", `"Data"`},
		{"a deadline of zero", head + "defaults: {stepDeadline: 0s}", "stepDeadline"},
		{"no attempt", head + "defaults: {attempts: 0}", "attempts"},
		{"a duration without a unit", head + "defaults: {backoff: '5'}", "missing unit"},
	} {
		t.Run(test.name, func(t *testing.T) {
			if _, err := ParsePolicy([]byte(test.text)); err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("error %v, want one with %q", err, test.want)
			}
		})
	}
}

func TestProtectedPlaces(t *testing.T) {
	s := DefaultSettings()
	s.Protected = []string{"/app/secrets"}
	for _, test := range []struct {
		place      string
		block, bad bool
	}{
		{"/", false, true},
		{"/etc", false, true},
		{"/etc/app", false, false},
		{"/proc/self", false, true},
		{"/sys", false, true},
		{"/dev/shm", false, true},
		{"/dev/vol", true, false},
		{"/dev", true, true},
		{"/run/secrets/x", false, true},
		{"/run/secretsx", false, false},
		{"/data/../proc", false, true},
		{"/app/secrets/x", false, true},
		{"/data", false, false},
	} {
		if err := s.CheckTarget(test.place, test.block); errors.Is(err, ErrProtected) != test.bad {
			t.Errorf("%s, block %v: %v, want refused %v", test.place, test.block, err, test.bad)
		}
	}
}

// TestProtectedThroughALink has the image lead the target to a protected place.
func TestProtectedThroughALink(t *testing.T) {
	r := newRig(t)
	root := r.image("run/secrets/x")
	r.link("/run/secrets", "consumer/image/data")
	u := r.use(r.volume("v"))
	u.Target.Root, u.Target.Path = root, "/data/x"
	if _, err := r.co.Up(r.ctx, u); !errors.Is(err, ErrProtected) {
		t.Errorf("%v, want ErrProtected", err)
	}
	r.must(os.RemoveAll(r.path("consumer/image")))
	r.nothingLeft()
}
