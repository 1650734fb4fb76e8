package sanity

import (
	"os"
	"path/filepath"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/csi-prepare/csi-prepare/reference/mountns"
	"github.com/csi-prepare/csi-prepare/reference/mountspec"
	"github.com/csi-prepare/csi-prepare/reference/mountspec/wire"
	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

// performedSpecs performs what the plugin answered, in a namespace that no
// mount of the plugin reaches.
func performedSpecs(s *section) {
	s.spec("a consumer sees the volume and nothing else", Covers(requirement.PrepareVolumeData, requirement.CapabilitiesPropagation), func(t *trial) {
		r := t.request(t.volume())
		answer := t.prepared(r)
		c := t.consumer()
		t.perform(c, r, answer)
		t.want(requirement.PrepareVolumeData, t.covered(c), "the volume at the target", "what lay there before is still visible")
		t.onlyTheseMounts(c, answer)
		text := t.nonce()
		t.put(c, text)
		t.sysfail("undoing what was performed", t.undoAt(c))
		same, found := holds(c.sentinel(t), sentinel)
		t.want(requirement.PrepareVolumeData, same, "the file below the mount point as it was", "%s", found)
		t.want(requirement.PrepareVolumeData, t.config.Block || !exists(c.file(t)), "that what a consumer writes goes into the volume", "it is in the directory below the mount point")
		t.removeFrom(r, text)
	})
	s.spec("what one consumer wrote the next one reads", Covers(requirement.PrepareVolumeData), func(t *trial) {
		v := t.volume()
		text := t.nonce()
		t.withVolume(v, false, func(c *consumer) { t.put(c, text) })
		t.withVolume(v, false, func(c *consumer) {
			same, found := t.shows(c, text)
			t.want(requirement.PrepareVolumeData, same, "what another preparation of the volume wrote", "%s", found)
			t.clear(c)
		})
	})
	s.spec("two consumers at a time see one volume", Covers(requirement.PrepareVolumeData), func(t *trial) {
		v := t.sharedVolume()
		first, second := t.request(v), t.request(v)
		a, b := t.consumer(), t.consumer()
		t.perform(a, first, t.prepared(first))
		answer, err := t.prepare(second)
		t.need(requirement.IdempotencyOtherID, err, "OK to another prepare_id of a shared volume")
		t.perform(b, second, answer)
		for _, way := range []struct{ from, to *consumer }{{a, b}, {b, a}} {
			text := t.nonce()
			t.put(way.from, text)
			same, found := t.shows(way.to, text)
			t.want(requirement.PrepareVolumeData, same, "what the other consumer of the volume just wrote", "%s", found)
		}
		t.clear(a)
	})
	s.spec("two volumes do not show each other's data", Covers(requirement.PrepareVolumeData), func(t *trial) {
		one, two := t.volume(), t.volume()
		text := t.nonce()
		t.withVolume(one, false, func(c *consumer) { t.put(c, text) })
		t.withVolume(two, false, func(c *consumer) {
			same, _ := t.shows(c, text)
			t.want(requirement.PrepareVolumeData, !same, "nothing of another volume", "what was written to volume %s is in volume %s", one.id, two.id)
		})
		t.withVolume(one, false, func(c *consumer) {
			same, found := t.shows(c, text)
			t.want(requirement.PrepareVolumeData, same, "the file written to this volume before", "%s", found)
			t.clear(c)
		})
	})
	s.spec("the backend has what the consumer wrote, and the reverse", Covers(requirement.PrepareVolumeData), func(t *trial) {
		r := t.request(t.volume())
		answer := t.prepared(r)
		dir, known := t.backend(r, answer)
		if !known {
			t.unsupported("the suite knows no directory behind the volume; --grant NAME=DIR names those of a plugin that binds, --export HOST:PATH=DIR those of a server")
		}
		c := t.consumer()
		t.perform(c, r, answer)
		text := t.nonce()
		t.put(c, text)
		behind := filepath.Join(dir, filepath.Base(c.file(t)))
		same, found := holds(behind, text)
		t.want(requirement.PrepareVolumeData, same, "what the consumer wrote in "+dir, "%s", found)
		text = t.nonce()
		t.sysfail("writing from the backend's side", os.WriteFile(behind, []byte(text), 0o600))
		same, found = t.shows(c, text)
		t.want(requirement.PrepareVolumeData, same, "what was written in "+dir, "%s", found)
		t.clear(c)
	}, accessMount)
	s.spec("a read-only preparation cannot be written to", Covers(requirement.PrepareReadonly), func(t *trial) {
		v := t.volume()
		text := t.nonce()
		t.withVolume(v, false, func(c *consumer) { t.put(c, text) })
		t.withVolume(v, true, func(c *consumer) { t.refusesWrites(requirement.PrepareReadonly, c, text) })
		t.withVolume(v, false, func(c *consumer) { t.clear(c) })
	})
	s.spec("a READER_ONLY access mode cannot be written to", Covers(requirement.PrepareReaderOnly), func(t *trial) {
		v := t.volume()
		text := t.nonce()
		t.withVolume(v, false, func(c *consumer) { t.put(c, text) })
		for _, mode := range []accessMode{nodeReader, manyReaders} {
			r := t.request(v)
			r.VolumeCapability = t.capability(mode)
			answer, err := t.prepare(r)
			if status.Code(err) == codes.FailedPrecondition {
				continue // the volume has no such access mode
			}
			t.need(requirement.PrepareAnswered, err, "OK or FAILED_PRECONDITION")
			c := t.consumer()
			t.perform(c, r, answer)
			t.refusesWrites(requirement.PrepareReaderOnly, c, text)
			t.sysfail("undoing what was performed", t.undoAt(c))
			t.unprepared(r)
		}
		t.withVolume(v, false, func(c *consumer) { t.clear(c) })
	})
}

// removeFrom removes what the spec wrote into the volume of a preparation,
// after it was seen to be there.
func (t *trial) removeFrom(r *prepareRequest, text string) {
	answer := t.prepared(r)
	c := t.consumer()
	t.perform(c, r, answer)
	same, found := t.shows(c, text)
	t.want(requirement.PrepareVolumeData, same, "what the consumer wrote before, after a repeated call", "%s", found)
	t.clear(c)
	t.sysfail("undoing what was performed", t.undoAt(c))
}

// onlyTheseMounts wants one mount for each mount spec at its place below the
// target, with at least its attributes, and no other.
func (t *trial) onlyTheseMounts(c *consumer, answer *prepareResponse) {
	table, err := t.ns.Table(t.ctx)
	t.sysfail("reading the mount table", err)
	specs, _ := wire.FromProto(answer.GetMountSpecs())
	recursive := false
	for _, spec := range specs {
		place := filepath.Join(c.target, spec.Target)
		stack := table.At(place)
		t.want(requirement.PrepareVolumeData, len(stack) == 1, "exactly one mount at the place of each mount spec", "%s at %s", count(len(stack), "mount"), place)
		if missing := attributesMissing(spec.Attributes, stack[0].Attr); missing != "" {
			end(couldNotRun("a fault of the suite: %s is not in force at %s", missing, place))
		}
		if b, ok := spec.Kind.(*mountspec.Bind); ok && b.Recursive {
			recursive = true
		}
	}
	if below := table.Below(c.target); !recursive && len(below) != len(specs) {
		t.fail(requirement.PrepareVolumeData, count(len(specs), "mount")+" at and below the target", count(len(below), "mount"))
	}
}

// attributesMissing returns the first attribute that a mount lacks.
func attributesMissing(want mountspec.Attributes, have uint64) string {
	for _, a := range []struct {
		name string
		on   bool
		bit  uint64
	}{
		{"readonly", want.Readonly, mountns.AttrReadonly},
		{"nosuid", want.Nosuid, mountns.AttrNosuid},
		{"nodev", want.Nodev, mountns.AttrNodev},
		{"noexec", want.Noexec, mountns.AttrNoexec},
		{"nosymfollow", want.Nosymfollow, mountns.AttrNosymfollow},
		{"nodiratime", want.Nodiratime, mountns.AttrNodiratime},
		{"noatime", want.Atime == mountspec.Noatime, mountns.AttrNoatime},
		{"strictatime", want.Atime == mountspec.Strictatime, mountns.AttrStrictatime},
	} {
		if a.on && have&a.bit == 0 {
			return a.name
		}
	}
	return ""
}

// sharedVolume provides a volume that several consumers of the node may have
// at a time.
func (t *trial) sharedVolume() *volume {
	var last *ending
	for _, mode := range []accessMode{multiWriter, manyNodesWriters, manyReadersOne} {
		if v, e := t.volumeIn(mode); e == nil {
			return v
		} else {
			last = e
		}
	}
	end(last)
	return nil
}

// volumeIn provides a volume with an access mode, if the plugin has it.
func (t *trial) volumeIn(mode accessMode) (v *volume, e *ending) {
	if (mode == multiWriter || mode == singleWriter) && !t.tellsWriters() {
		return nil, unsupported("the plugin does not claim SINGLE_NODE_MULTI_WRITER, so it has no " + mode.String())
	}
	if !t.features[CreateDeleteVolume] && mode != t.defaultMode() {
		return nil, unsupported("whether the volume has the access mode " + mode.String() + " is not known")
	}
	return v, caught(func() { v = t.volumeFor(t.capability(mode)) })
}

// tellsWriters reports whether the plugin has the finer access modes.
func (t *trial) tellsWriters() bool {
	return t.features[NodeMultiWriter] || t.features[ControllerMultiWriter]
}
