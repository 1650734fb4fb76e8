package co

import (
	"context"
	"errors"
	"slices"

	"github.com/csi-prepare/csi-prepare/reference/handoff"
	"github.com/csi-prepare/csi-prepare/reference/master"
	"github.com/csi-prepare/csi-prepare/reference/mountspec"
	"github.com/csi-prepare/csi-prepare/reference/mountspec/wire"
	"github.com/csi-prepare/csi-prepare/reference/perform"
	"github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

// accepted is an answer that breaks no rule, with what came over the side
// channel for it.
type accepted struct {
	message *preparev1alpha1.NodePrepareVolumeResponse
	request mountspec.Request
	specs   []mountspec.Spec
	handles []given
}

// given is the mount behind one handle id.
type given struct {
	index  int // of the mount spec
	handle handoff.Handle
	master *master.Mount
}

// close lets go of the masters that were received. Clones live on.
func (x *accepted) close() {
	for _, g := range x.handles {
		_ = g.master.Close()
	}
}

// prepare calls NodePrepareVolume and checks the whole answer. In a repeat,
// where nothing is performed again, an offered mount is let go of.
func (a *act) prepare(ctx context.Context, u *Use, p *plugin, repeat bool) (*accepted, error) {
	ch := a.channelTo(p, a.r.Driver, &a.s)
	request := u.prepare(a.r, &a.s)
	if ch == nil {
		request.Performer.Kinds = slices.DeleteFunc(request.Performer.Kinds, func(k preparev1alpha1.MountKind) bool {
			return k == preparev1alpha1.MountKind_MOUNT_KIND_HANDLE || k == preparev1alpha1.MountKind_MOUNT_KIND_FUSE
		})
	}
	var response *preparev1alpha1.NodePrepareVolumeResponse
	var call *handoff.Call
	err := a.s.call(ctx, "NodePrepareVolume", func(attempt context.Context) (err error) {
		a.r.Prepares++
		if ch != nil {
			// Each attempt has a token of its own, so that what a late
			// server sends for an earlier one goes nowhere.
			if call, err = ch.Begin(ctx, a.r.Key().handoff()); err != nil {
				return err
			}
			request.HandleSocket, request.HandoffToken, request.HeldHandles = ch.Path(), call.Token(), call.Held()
		}
		response, err = p.prepare.NodePrepareVolume(attempt, request)
		if err != nil && call != nil {
			call.Drop()
		}
		return err
	})
	a.before("called NodePrepareVolume")
	a.hidden = append(a.hidden, secretsOf(response.GetMountSpecs())...)
	if err != nil {
		return nil, err
	}
	x := &accepted{message: response, request: wire.RequestFromProto(request)}
	var violations []mountspec.Violation
	if x.specs, violations = wire.Validate(response.GetMountSpecs(), x.request); violations != nil {
		if call != nil {
			call.Drop()
		}
		return nil, &perform.InvalidError{Violations: violations}
	}
	if call == nil {
		return x, nil
	}
	if err := x.take(ctx, call, repeat); err != nil {
		x.close()
		return nil, err
	}
	if slices.ContainsFunc(x.handles, func(g given) bool { return g.handle.FUSE }) {
		// From now on, also while it is performed, its server may die.
		a.remember(a.r.Key(), u)
	}
	if repeat {
		return x, nil
	}
	// A mount that was offered is cloned once, and held no longer: it would
	// keep the volume in use.
	var served []string
	for _, g := range x.handles {
		if g.handle.FUSE {
			served = append(served, g.handle.ID)
		}
	}
	ch.Keep(a.r.Key().handoff(), served...)
	return x, nil
}

// take ends the call, and makes a master of each mount that the answer names.
func (x *accepted) take(ctx context.Context, call *handoff.Call, repeat bool) error {
	var ids []string
	for i := range x.specs {
		switch k := x.specs[i].Kind.(type) {
		case *mountspec.FUSE:
			ids = append(ids, k.ID)
			x.handles = append(x.handles, given{index: i})
		case *mountspec.Handle:
			if !repeat {
				ids = append(ids, k.ID)
				x.handles = append(x.handles, given{index: i})
			}
		}
	}
	handles, err := call.Finish(ids...)
	var bad *handoff.HandleError
	if errors.As(err, &bad) {
		x.handles = nil
		i := slices.IndexFunc(x.specs, func(s mountspec.Spec) bool { return handleID(&s) == bad.HandleID })
		return x.refuse(i, bad.Err)
	}
	if err != nil {
		x.handles = nil
		return err
	}
	for n, h := range handles {
		x.handles[n].handle = h
	}
	for n := range x.handles {
		g := &x.handles[n]
		g.master = master.Made(g.handle.Mount)
		k, offered := x.specs[g.index].Kind.(*mountspec.Handle)
		switch {
		case offered == g.handle.FUSE:
			return x.refuse(g.index, errors.New("it came as a handle of the other kind"))
		case offered:
			m, err := master.Receive(ctx, g.handle.Mount, master.Expected{
				FSType: k.FSType, Submounts: x.specs[g.index].Attributes.Recursive,
			})
			var refused *master.RefusedError
			if errors.As(err, &refused) {
				return x.refuse(g.index, refused)
			}
			if err != nil {
				return err
			}
			g.master = m
		}
	}
	return nil
}

func handleID(s *mountspec.Spec) string {
	switch k := s.Kind.(type) {
	case *mountspec.FUSE:
		return k.ID
	case *mountspec.Handle:
		return k.ID
	}
	return ""
}

// refuse says which rule a handle breaks.
func (x *accepted) refuse(index int, why error) error {
	v := mountspec.Violation{Index: index, Detail: why.Error(), Requirement: requirement.HandleDelivered, Field: "handle.handle_id"}
	_, isFUSE := x.specs[index].Kind.(*mountspec.FUSE)
	var refused *master.RefusedError
	switch {
	case isFUSE:
		v.Requirement, v.Field = requirement.FUSEServingFirst, "fuse.handle_id"
	case errors.As(why, &refused):
		v.Requirement, v.Field = requirement.HandleFSType, "handle"
	}
	return &perform.InvalidError{Violations: []mountspec.Violation{v}}
}
