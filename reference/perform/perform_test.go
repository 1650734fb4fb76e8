package perform

import (
	"errors"
	"net"
	"os"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/reference/mountns"
	"github.com/csi-prepare/csi-prepare/reference/mountspec"
)

// TestPerform checks what the consumer sees, and that undo restores the table,
// for each way to perform.
func TestPerform(t *testing.T) {
	type look func(r *rig, p *Performed)
	attr := func(id int, want string) look {
		return func(r *rig, p *Performed) {
			m, ok := r.mountOf(p.Receipts[id])
			if !ok || m.Attributes() != want || m.Propagation != mountns.Private {
				r.Errorf("spec %d: attributes %q (%s), want %q (private)", id, m.Attributes(), m.Propagation, want)
			}
		}
	}
	reads := func(name, want string) look {
		return func(r *rig, _ *Performed) {
			if got, err := os.ReadFile(r.path(name)); err != nil || string(got) != want {
				r.Errorf("%s: %q, %v, want %q", name, got, err, want)
			}
		}
	}
	refusesWrites := func(name string, want error) look {
		return func(r *rig, _ *Performed) {
			if err := os.WriteFile(r.path(name), []byte("x"), 0o644); !errors.Is(err, want) {
				r.Errorf("writing %s: %v, want %v", name, err, want)
			}
		}
	}
	for _, test := range []struct {
		name    string
		prepare func(*rig)
		target  string
		specs   func(*rig) []mountspec.Spec
		options func(*Options)
		look    []look
		notOld  bool // not with mount(2) alone
	}{{
		name:  "a bind shows the granted directory, nosuid and nodev",
		specs: func(*rig) []mountspec.Spec { return []mountspec.Spec{bind("", "data")} },
		look: []look{
			attr(0, "rw,nosuid,nodev,relatime"), reads("consumer/place/file", "data"),
			func(r *rig, _ *Performed) {
				r.write("consumer/place/new", "1")
				reads("grant/data/new", "1")(r, nil)
			},
		},
	}, {
		name:  "a bind of the base itself",
		specs: func(*rig) []mountspec.Spec { return []mountspec.Spec{bind("", "")} },
		look:  []look{reads("consumer/place/data/file", "data")},
	}, {
		name:  "read-only is really read-only, and the source stays writable",
		specs: func(*rig) []mountspec.Spec { return []mountspec.Spec{bind("", "data", readonly)} },
		look: []look{
			attr(0, "ro,nosuid,nodev,relatime"), refusesWrites("consumer/place/file", unix.EROFS),
			refusesWrites("grant/data/file", nil),
		},
	}, {
		name: "every attribute",
		specs: func(*rig) []mountspec.Spec {
			return []mountspec.Spec{bind("", "data", func(s *mountspec.Spec) {
				s.Attributes = mountspec.Attributes{
					Readonly: true, Nosuid: true, Nodev: true, Noexec: true, Nosymfollow: true,
					Atime: mountspec.Noatime, Nodiratime: true,
				}
			})}
		},
		look: []look{attr(0, "ro,nosuid,nodev,noexec,noatime,nodiratime,nosymfollow")},
	}, {
		name: "strictatime over a source that is noatime",
		prepare: func(r *rig) {
			r.mount("tmpfs", r.path("grant/data"), "tmpfs", unix.MS_NOATIME, "")
		},
		specs: func(*rig) []mountspec.Spec {
			return []mountspec.Spec{bind("", "data", func(s *mountspec.Spec) { s.Attributes.Atime = mountspec.Strictatime })}
		},
		look: []look{attr(0, "rw,nosuid,nodev,strictatime")},
	}, {
		name: "a bind keeps what its source mount forbids",
		prepare: func(r *rig) {
			r.mount("tmpfs", r.path("grant/data"), "tmpfs", unix.MS_NOEXEC|unix.MS_RDONLY, "")
		},
		specs:  func(*rig) []mountspec.Spec { return []mountspec.Spec{bind("", "data")} },
		look:   []look{attr(0, "ro,nosuid,nodev,noexec,relatime")},
		notOld: true,
	}, {
		name: "the policy may allow suid and devices",
		specs: func(*rig) []mountspec.Spec {
			return []mountspec.Spec{bind("", "data")}
		},
		options: func(o *Options) { o.Policy = mountspec.Policy{AllowSuid: true, AllowDev: true, Noexec: true} },
		look:    []look{attr(0, "rw,noexec,relatime")},
	}, {
		name:   "a file on a file",
		target: "consumer/file",
		specs: func(*rig) []mountspec.Spec {
			return []mountspec.Spec{bind("", "data/file", func(s *mountspec.Spec) { s.Kind.(*mountspec.Bind).IsFile = true }, readonly)}
		},
		look: []look{reads("consumer/file", "data"), refusesWrites("consumer/file", unix.EROFS)},
	}, {
		name:   "a socket on a file",
		target: "consumer/file",
		prepare: func(r *rig) {
			l, err := net.Listen("unix", r.path("grant/s"))
			if err != nil {
				r.Fatal(err)
			}
			r.Cleanup(func() { _ = l.Close() })
		},
		specs: func(*rig) []mountspec.Spec {
			return []mountspec.Spec{bind("", "s", func(s *mountspec.Spec) { s.Kind.(*mountspec.Bind).IsFile = true })}
		},
		look: []look{func(r *rig, _ *Performed) {
			if st, err := os.Stat(r.path("consumer/file")); err != nil || st.Mode().Type() != os.ModeSocket {
				r.Errorf("the target is %v, %v, want a socket", st, err)
			}
		}},
	}, {
		name: "a source below a mount that is below the base",
		prepare: func(r *rig) {
			r.mount("tmpfs", r.path("grant/data"), "tmpfs", 0, "")
			r.mkdir("grant/data/deep")
			r.write("grant/data/deep/file", "deep")
		},
		specs: func(*rig) []mountspec.Spec {
			return []mountspec.Spec{bind("", "data/deep", func(s *mountspec.Spec) { s.Kind.(*mountspec.Bind).MountFSType = "tmpfs" })}
		},
		look: []look{reads("consumer/place/file", "deep")},
	}, {
		name: "a bind that is not recursive leaves out what is mounted below",
		prepare: func(r *rig) {
			r.mount("tmpfs", r.path("grant/data/sub"), "tmpfs", 0, "")
			r.write("grant/data/sub/below", "below")
		},
		specs: func(*rig) []mountspec.Spec { return []mountspec.Spec{bind("", "data")} },
		look: []look{func(r *rig, _ *Performed) {
			if _, err := os.Stat(r.path("consumer/place/sub/below")); !errors.Is(err, os.ErrNotExist) {
				r.Errorf("the mount below is seen: %v", err)
			}
		}},
	}, {
		name: "a recursive bind narrows every mount below, and goes whole",
		prepare: func(r *rig) {
			r.mount("tmpfs", r.path("grant/data/sub"), "tmpfs", 0, "")
			r.mkdir("grant/data/sub/one/two")
			r.mount("tmpfs", r.path("grant/data/sub/one/two"), "tmpfs", 0, "")
			r.write("grant/data/sub/one/two/below", "below")
			r.mount("tmpfs", r.path("grant/data/sub/one/two"), "tmpfs", 0, "") // stacked
			r.write("grant/data/sub/one/two/below", "top")
		},
		specs: func(*rig) []mountspec.Spec {
			return []mountspec.Spec{bind("", "data", readonly, func(s *mountspec.Spec) {
				s.Kind.(*mountspec.Bind).Recursive = true
				s.Attributes.Recursive = true
			})}
		},
		look: []look{
			reads("consumer/place/sub/one/two/below", "top"),
			refusesWrites("consumer/place/sub/one/two/below", unix.EROFS),
			refusesWrites("consumer/place/sub/x", unix.EROFS),
			func(r *rig, _ *Performed) {
				below := r.table().Below(r.path("consumer/place"))
				if len(below) != 4 {
					r.Errorf("%d mounts at the target, want 4", len(below))
				}
				for _, m := range below {
					if m.Attributes() != "ro,nosuid,nodev,relatime" || m.Propagation != mountns.Private {
						r.Errorf("%s has %s", m, m.Attributes())
					}
				}
			},
		},
		notOld: true,
	}, {
		name:  "a tmpfs with its parameters",
		specs: func(*rig) []mountspec.Spec { return []mountspec.Spec{tmpfs("")} },
		look: []look{attr(0, "rw,nosuid,nodev,relatime"), func(r *rig, p *Performed) {
			m, _ := r.mountOf(p.Receipts[0])
			if m.FSType != "tmpfs" || m.Source != "csi" || !strings.Contains(m.SBOptions, "size=1024k") {
				r.Errorf("got %s %s %s", m.FSType, m.Source, m.SBOptions)
			}
		}},
	}, {
		name: "a read-only superblock is not a read-only mount",
		specs: func(*rig) []mountspec.Spec {
			return []mountspec.Spec{tmpfs("", func(s *mountspec.Spec) { s.Kind.(*mountspec.Filesystem).SuperblockReadonly = true })}
		},
		look: []look{attr(0, "rw,nosuid,nodev,relatime"), func(r *rig, p *Performed) {
			if m, _ := r.mountOf(p.Receipts[0]); !m.SBReadonly {
				r.Error("the superblock is writable")
			}
		}, refusesWrites("consumer/place/x", unix.EROFS)},
	}, {
		name: "specs below the first, and below each other",
		specs: func(*rig) []mountspec.Spec {
			return []mountspec.Spec{
				bind("", "data", readonly), tmpfs("sub", func(s *mountspec.Spec) { s.Attributes.Noexec = true }),
				bind("file", "other", func(s *mountspec.Spec) { s.Kind.(*mountspec.Bind).IsFile = true }),
			}
		},
		prepare: func(r *rig) { r.write("grant/other", "other") },
		look: []look{
			attr(0, "ro,nosuid,nodev,relatime"), attr(1, "rw,nosuid,nodev,noexec,relatime"), attr(2, "rw,nosuid,nodev,relatime"),
			reads("consumer/place/file", "other"), refusesWrites("consumer/place/x", unix.EROFS), refusesWrites("consumer/place/sub/x", nil),
		},
	}, {
		name:    "staging and prepare path are bases too",
		prepare: func(r *rig) { r.mkdir("staging/s"); r.mkdir("prepare"); r.write("prepare/p", "p") },
		options: func(o *Options) {
			o.Request.Staging = true
			o.Staging = strings.TrimSuffix(o.Grants["data"], "grant") + "staging"
			o.Prepare = strings.TrimSuffix(o.Grants["data"], "grant") + "prepare"
		},
		specs: func(*rig) []mountspec.Spec {
			staging, prepare := bind("", ""), bind("s", "")
			staging.Kind.(*mountspec.Bind).Source = mountspec.PathRef{Base: mountspec.BaseStaging}
			prepare.Kind.(*mountspec.Bind).Source = mountspec.PathRef{Base: mountspec.BasePrepare}
			return []mountspec.Spec{staging, prepare}
		},
		look: []look{reads("consumer/place/s/p", "p")},
	}, {
		name:    "a shared parent does not make the mount shared",
		prepare: func(r *rig) { r.mount("", r.dir, "", unix.MS_SHARED, "") },
		specs: func(*rig) []mountspec.Spec {
			return []mountspec.Spec{bind("", "data"), tmpfs("sub")}
		},
		look: []look{attr(0, "rw,nosuid,nodev,relatime"), attr(1, "rw,nosuid,nodev,relatime")},
	}, {
		name:    "a target that is a mount already is stacked on",
		prepare: func(r *rig) { r.mount("tmpfs", r.path("consumer/place"), "tmpfs", 0, "") },
		specs:   func(*rig) []mountspec.Spec { return []mountspec.Spec{bind("", "data")} },
		look:    []look{reads("consumer/place/file", "data")},
	}} {
		for _, x := range executors {
			if x.old && test.notOld {
				continue
			}
			t.Run(test.name+"/"+x.name, func(t *testing.T) {
				inside(t, func(r *rig) {
					if test.prepare != nil {
						test.prepare(r)
					}
					fds, before := x.openFiles(r), r.table()
					o := r.options()
					if test.options != nil {
						test.options(&o)
					}
					target := test.target
					if target == "" {
						target = "consumer/place"
					}
					specs := test.specs(r)
					p := r.perform(x.on(r), r.target(target), specs, o)
					if got := x.openFiles(r); got != fds {
						t.Errorf("%d files open after Perform, %d before", got, fds)
					}
					checkReceipts(r, p, specs)
					for _, l := range test.look {
						l(r, p)
					}
					r.undo(x.on(r), p.Receipts)
					r.same(before)
					r.undo(x.on(r), p.Receipts) // again
					r.same(before)
					if got := x.openFiles(r); got != fds {
						t.Errorf("%d files open after Undo, %d before", got, fds)
					}
				})
			})
		}
	}
}

// mountOf finds the mount of a receipt.
func (r *rig) mountOf(rc Receipt) (mountns.Mount, bool) {
	for _, m := range r.table().Mounts {
		if m.ID == rc.MountID || uint64(m.SmallID) == rc.MountID {
			return m, true
		}
	}
	return mountns.Mount{}, false
}

func checkReceipts(r *rig, p *Performed, specs []mountspec.Spec) {
	r.Helper()
	if len(p.Receipts) != len(specs) {
		r.Fatalf("%d receipts for %d specs", len(p.Receipts), len(specs))
	}
	for i, rc := range p.Receipts {
		m, ok := r.mountOf(rc)
		if !ok {
			r.Errorf("receipt %d: mount %d is not in the table", i, rc.MountID)
		}
		if rc.Target != m.Point || rc.MntnsID != r.ns.ID() || rc.Version != 1 || rc.BootID == "" ||
			rc.Kind != specs[i].Kind.Name() || rc.SpecDigest != specs[i].Digest() || len(rc.Created) != 0 {
			r.Errorf("receipt %d is %+v of mount %s", i, rc, m)
		}
		if rc.ParentID != m.ParentID {
			parent, _ := r.table().ByID(m.ParentID)
			if rc.ParentID != uint64(parent.SmallID) {
				r.Errorf("receipt %d has parent %d, want %d", i, rc.ParentID, m.ParentID)
			}
		}
	}
}

// openFiles counts the descriptors of this process.
func openFiles(t *testing.T) int {
	t.Helper()
	names, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(names)
}

func TestRefusesInvalidSpecs(t *testing.T) {
	inside(t, func(r *rig) {
		before := r.table()
		_, err := Perform(r.ctx, r.target("consumer/place"), []mountspec.Spec{
			bind("", "../x"), bind("/abs", "data"),
		}, r.options())
		var invalid *InvalidError
		if !errors.As(err, &invalid) || len(invalid.Violations) < 2 {
			t.Fatalf("got %v, want an *InvalidError with all violations", err)
		}
		r.same(before)
	})
}

func TestErrorNamesSpecStepAndReason(t *testing.T) {
	inside(t, func(r *rig) {
		before := r.table()
		bad := tmpfs("sub", func(s *mountspec.Spec) {
			k := s.Kind.(*mountspec.Filesystem)
			k.Parameters = append(k.Parameters, mountspec.Parameter{Key: "bogus", Secret: mountspec.NewSecret("hunter2")})
		})
		_, err := Perform(r.ctx, r.target("consumer/place"), []mountspec.Spec{bind("", "data"), bad}, r.options())
		var failed *Error
		if !errors.As(err, &failed) || failed.Index != 1 || failed.Step != "fsconfig" || !errors.Is(err, syscall.EINVAL) {
			t.Fatalf("got %v", err)
		}
		if !strings.Contains(err.Error(), "Unknown parameter 'bogus'") {
			t.Errorf("%q lacks the kernel's words", err)
		}
		if strings.Contains(err.Error(), "hunter2") {
			t.Errorf("%q shows a secret", err)
		}
		r.same(before)
	})
}

func TestRefusesKindsItDoesNotPerform(t *testing.T) {
	inside(t, func(r *rig) {
		before := r.table()
		o := r.options()
		o.Request.Performer.Kinds = append(o.Request.Performer.Kinds, mountspec.KindExtension)
		o.Request.Performer.Extensions = []string{"example.com/x"}
		specs := []mountspec.Spec{{Kind: &mountspec.Extension{TypeURL: "example.com/x"}}}
		_, err := Perform(r.ctx, r.target("consumer/place"), specs, o)
		var unsupported *mountspec.UnsupportedError
		if !errors.As(err, &unsupported) || unsupported.Kind != mountspec.KindExtension {
			t.Fatalf("got %v, want an *UnsupportedError", err)
		}
		r.same(before)
	})
}
