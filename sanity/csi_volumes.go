package sanity

import (
	"context"
	"os"
	"slices"
	"sync"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

// volumeSpecs are about the life of volumes as the Controller service tells it.
func volumeSpecs(s *section) {
	s.in(Controller)
	for what, change := range map[string]func(*csi.CreateVolumeRequest){
		"a name":       func(r *csi.CreateVolumeRequest) { r.Name = "" },
		"capabilities": func(r *csi.CreateVolumeRequest) { r.VolumeCapabilities = nil },
	} {
		s.spec("CreateVolume without "+what+" is INVALID_ARGUMENT", Covers(requirement.CSICreateArguments), func(t *trial) {
			r := t.creation(t.capability(t.defaultMode()))
			change(r)
			_, err := t.create(r)
			t.wantCode(requirement.CSICreateArguments, err, codes.InvalidArgument)
		}, CreateDeleteVolume)
	}
	s.spec("a repeat creates nothing new", Covers(requirement.CSICreateSame), func(t *trial) {
		r := t.creation(t.capability(t.defaultMode()))
		first := t.createdOK(r)
		for range 2 {
			again, err := t.create(r)
			t.wantCode(requirement.CSICreateSame, err, codes.OK)
			t.want(requirement.CSICreateSame, again.id == first.id && again.capacity == first.capacity,
				"the volume of the first call: "+first.id, "%s of %d bytes", again.id, again.capacity)
		}
	}, CreateDeleteVolume)
	s.spec("one name for another size is ALREADY_EXISTS", Covers(requirement.CSICreateIncompatible), func(t *trial) {
		r := t.creation(t.capability(t.defaultMode()))
		v := t.createdOK(r)
		r.CapacityRange = &csi.CapacityRange{RequiredBytes: t.larger(v)}
		_, err := t.create(r)
		t.wantCode(requirement.CSICreateIncompatible, err, codes.AlreadyExists)
	}, CreateDeleteVolume)
	s.spec("a volume has the size that was asked for", Covers(requirement.CSICreateSize), func(t *trial) {
		size := max(t.config.VolumeSize, 1<<20)
		for _, limit := range []int64{0, size * 16} {
			r := t.creation(t.capability(t.defaultMode()))
			r.CapacityRange = &csi.CapacityRange{RequiredBytes: size, LimitBytes: limit}
			v, err := t.create(r)
			if code := status.Code(err); code == codes.OutOfRange || code == codes.ResourceExhausted {
				continue
			}
			t.wantCode(requirement.CSICreateSize, err, codes.OK, codes.OutOfRange)
			t.want(requirement.CSICreateSize, v.capacity == 0 || v.capacity >= size && (limit == 0 || v.capacity <= limit),
				"a capacity within "+describe(r.GetCapacityRange()), "%d bytes", v.capacity)
		}
	}, CreateDeleteVolume)
	s.spec("a new volume is empty", Covers(requirement.CSICreateEmpty), func(t *trial) {
		old := t.volume()
		t.filled(old)
		fresh := t.volume()
		t.use(fresh, true, func(c *consumer) {
			var found []string
			for _, name := range names(c.target) {
				if name != "lost+found" {
					found = append(found, name)
				}
			}
			t.want(requirement.CSICreateEmpty, len(found) == 0, "nothing in a new volume", "it holds %v", found)
		})
		t.use(old, false, func(c *consumer) { t.clear(c) })
	}, CreateDeleteVolume, ControllerService)
	s.spec("calls at once for one name make one volume", Covers(requirement.CSICreateConcurrent), func(t *trial) {
		r := t.creation(t.capability(t.defaultMode()))
		var mu sync.Mutex
		ids := map[string]bool{}
		errs := parallel(t.ctx, func(ctx context.Context) error {
			answer, err := t.clients.controller.CreateVolume(ctx, r)
			if err == nil {
				mu.Lock()
				ids[answer.GetVolume().GetVolumeId()] = true
				mu.Unlock()
			}
			return err
		})
		for id := range ids {
			t.cleanup(func() error { return wrap("DeleteVolume", t.deleteVolume(id)) })
		}
		for _, err := range errs {
			t.wantCode(requirement.CSICreateConcurrent, err, codes.OK, codes.Aborted)
		}
		t.want(requirement.CSICreateConcurrent, len(ids) == 1, "one volume", "%s", count(len(ids), "volume"))
	}, CreateDeleteVolume)
	deleteSpecs(s)
	validateVolumeSpecs(s)
	listVolumeSpecs(s)
	modifySpecs(s)
	s.spec("the capacity is no negative figure", Covers(requirement.CSIGetCapacity), func(t *trial) {
		answer, err := t.clients.controller.GetCapacity(t.ctx, &csi.GetCapacityRequest{
			VolumeCapabilities: []*csi.VolumeCapability{t.capability(t.defaultMode())}, Parameters: t.config.VolumeParameters,
		})
		t.wantCode(requirement.CSIGetCapacity, err, codes.OK)
		t.want(requirement.CSIGetCapacity, answer.GetAvailableCapacity() >= 0, "0 or more available", "%d", answer.GetAvailableCapacity())
		if most := answer.GetMaximumVolumeSize(); most != nil {
			t.want(requirement.CSIGetCapacity, most.GetValue() >= 0, "0 or more as the maximum", "%d", most.GetValue())
		}
	}, GetCapacity)
}

// createdOK makes a call that has to be OK for the spec to go on.
func (t *trial) createdOK(r *csi.CreateVolumeRequest) *volume {
	v, err := t.create(r)
	if err != nil {
		end(couldNotRun("CreateVolume failed: %s", answered(err)))
	}
	return v
}

func deleteSpecs(s *section) {
	s.spec("DeleteVolume without volume_id is INVALID_ARGUMENT", Covers(requirement.CSIDeleteArguments), func(t *trial) {
		t.wantCode(requirement.CSIDeleteArguments, t.deleteVolume(""), codes.InvalidArgument)
	}, CreateDeleteVolume)
	s.spec("DeleteVolume of what is gone is OK", Covers(requirement.CSIDeleteRepeated), func(t *trial) {
		gone := t.goneVolume()
		for range 2 {
			t.wantCode(requirement.CSIDeleteRepeated, t.deleteVolume(gone.id), codes.OK)
		}
	}, CreateDeleteVolume)
	s.spec("a deleted volume is not known any more", Covers(requirement.CSIDeleteGone), func(t *trial) {
		v := t.createdOK(t.creation(t.capability(t.defaultMode())))
		t.wantCode(requirement.CSIDeleteGone, t.deleteVolume(v.id), codes.OK)
		if t.features[ListVolumes] {
			t.want(requirement.CSIDeleteGone, !slices.Contains(t.listedVolumes(), v.id), "no deleted volume in the list", "it is listed")
		}
		answer, err := t.validate(v)
		t.alive(err)
		t.want(requirement.CSIDeleteGone, err != nil || answer.GetConfirmed() == nil, "no capability confirmed for a deleted volume", "OK, confirmed")
	}, CreateDeleteVolume)
}

func (t *trial) validate(v *volume) (*csi.ValidateVolumeCapabilitiesResponse, error) {
	return t.clients.controller.ValidateVolumeCapabilities(t.ctx, &csi.ValidateVolumeCapabilitiesRequest{
		VolumeId: v.id, VolumeContext: v.context, VolumeCapabilities: []*csi.VolumeCapability{v.capability},
		Secrets: t.config.secrets("ControllerValidateVolumeCapabilities"),
	})
}

func validateVolumeSpecs(s *section) {
	s.spec("ValidateVolumeCapabilities without its arguments is INVALID_ARGUMENT", Covers(requirement.CSIValidateArguments), func(t *trial) {
		v := t.bareVolume(t.capability(t.defaultMode()))
		for _, r := range []*csi.ValidateVolumeCapabilitiesRequest{
			{VolumeCapabilities: []*csi.VolumeCapability{v.capability}}, {VolumeId: v.id, VolumeContext: v.context},
		} {
			_, err := t.clients.controller.ValidateVolumeCapabilities(t.ctx, r)
			t.wantCode(requirement.CSIValidateArguments, err, codes.InvalidArgument)
		}
	}, ControllerService)
	s.spec("ValidateVolumeCapabilities of a volume that does not exist is NOT_FOUND", Covers(requirement.CSIValidateUnknown), func(t *trial) {
		_, err := t.validate(t.goneVolume())
		t.wantCode(requirement.CSIValidateUnknown, err, codes.NotFound)
	}, ControllerService)
	s.spec("the capabilities a volume was created with are confirmed", Covers(requirement.CSIValidateCreated), func(t *trial) {
		v := t.bareVolume(t.capability(t.defaultMode()))
		answer, err := t.validate(v)
		t.wantCode(requirement.CSIValidateCreated, err, codes.OK)
		t.want(requirement.CSIValidateCreated, len(answer.GetConfirmed().GetVolumeCapabilities()) > 0, "confirmed capabilities", "none, and the message %q", answer.GetMessage())
	}, ControllerService)
	s.spec("a capability that no volume has is not confirmed", Covers(requirement.CSIValidateHonest), func(t *trial) {
		v := t.bareVolume(t.capability(t.defaultMode()))
		// What the plugin creates no volume with, it cannot have.
		r := t.creation(t.otherCapability(t.defaultMode()))
		if _, err := t.create(r); err == nil {
			t.unsupported("the plugin has volumes of both access types")
		}
		v.capability = r.GetVolumeCapabilities()[0]
		answer, err := t.validate(v)
		t.alive(err)
		t.want(requirement.CSIValidateHonest, err != nil || answer.GetConfirmed() == nil, "no confirmation of "+capabilityText(v.capability)+", with which no volume is created", "confirmed")
	}, CreateDeleteVolume)
}

// listedVolumes returns the ids of all volumes that are listed.
func (t *trial) listedVolumes() []string {
	var ids []string
	token := ""
	for range 1000 {
		answer, err := t.clients.controller.ListVolumes(t.ctx, &csi.ListVolumesRequest{StartingToken: token})
		t.need(requirement.CSIListVolumes, err, "OK")
		for _, e := range answer.GetEntries() {
			ids = append(ids, e.GetVolume().GetVolumeId())
		}
		if token = answer.GetNextToken(); token == "" {
			break
		}
	}
	return ids
}

func listVolumeSpecs(s *section) {
	s.spec("a volume is listed until it is deleted", Covers(requirement.CSIListVolumes), func(t *trial) {
		made := []*volume{}
		for range 2 {
			made = append(made, t.createdOK(t.creation(t.capability(t.defaultMode()))))
		}
		listed := t.listedVolumes()
		for _, v := range made {
			t.want(requirement.CSIListVolumes, slices.Contains(listed, v.id), "every volume in the list", "%s is missing", v.id)
		}
	}, CreateDeleteVolume, ListVolumes)
	s.spec("the pages hold every volume once", Covers(requirement.CSIListVolumesPages), func(t *trial) {
		made := []*volume{}
		for range 3 {
			made = append(made, t.createdOK(t.creation(t.capability(t.defaultMode()))))
		}
		seen := t.pages(requirement.CSIListVolumesPages, func(most int32, token string) (ids []string, next string, err error) {
			answer, err := t.clients.controller.ListVolumes(t.ctx, &csi.ListVolumesRequest{MaxEntries: most, StartingToken: token})
			for _, e := range answer.GetEntries() {
				ids = append(ids, e.GetVolume().GetVolumeId())
			}
			return ids, answer.GetNextToken(), err
		})
		for _, v := range made {
			t.want(requirement.CSIListVolumesPages, seen[v.id] == 1, "each volume once over the pages", "%s is there %s", v.id, count(seen[v.id], "time"))
		}
	}, CreateDeleteVolume, ListVolumes)
	s.spec("a starting_token of ListVolumes it never gave is ABORTED", Covers(requirement.CSIListVolumesToken), func(t *trial) {
		t.createdOK(t.creation(t.capability(t.defaultMode())))
		_, err := t.clients.controller.ListVolumes(t.ctx, &csi.ListVolumesRequest{MaxEntries: 1, StartingToken: t.canary()})
		t.wantCode(requirement.CSIListVolumesToken, err, codes.Aborted)
	}, CreateDeleteVolume, ListVolumes)
	s.spec("ControllerGetVolume tells of the volume it was asked for", Covers(requirement.CSIGetVolume), func(t *trial) {
		v := t.createdOK(t.creation(t.capability(t.defaultMode())))
		answer, err := t.clients.controller.ControllerGetVolume(t.ctx, &csi.ControllerGetVolumeRequest{VolumeId: v.id})
		t.wantCode(requirement.CSIGetVolume, err, codes.OK)
		t.want(requirement.CSIGetVolume, answer.GetVolume().GetVolumeId() == v.id, "volume_id "+v.id, "%q", answer.GetVolume().GetVolumeId())
		_, err = t.clients.controller.ControllerGetVolume(t.ctx, &csi.ControllerGetVolumeRequest{VolumeId: t.goneVolume().id})
		t.wantCode(requirement.CSIGetVolume, err, codes.NotFound)
	}, CreateDeleteVolume, GetVolume)
}

// modification is a call that modifies a volume, by the parameters of the
// configuration, or by one that no plugin knows.
func (t *trial) modification(id string) *csi.ControllerModifyVolumeRequest {
	parameters := t.config.MutableParameters
	if len(parameters) == 0 {
		parameters = map[string]string{"csi-prepare-suite": "1"}
	}
	return &csi.ControllerModifyVolumeRequest{VolumeId: id, MutableParameters: parameters, Secrets: t.config.secrets("ControllerModifyVolume")}
}

func modifySpecs(s *section) {
	modify := func(t *trial, r *csi.ControllerModifyVolumeRequest) error {
		return only(t.clients.controller.ControllerModifyVolume(t.ctx, r))
	}
	s.spec("ControllerModifyVolume without its arguments is INVALID_ARGUMENT", Covers(requirement.CSIModifyArguments), func(t *trial) {
		v := t.createdOK(t.creation(t.capability(t.defaultMode())))
		for _, change := range []func(*csi.ControllerModifyVolumeRequest){
			func(r *csi.ControllerModifyVolumeRequest) { r.VolumeId = "" },
			func(r *csi.ControllerModifyVolumeRequest) { r.MutableParameters = nil },
		} {
			r := t.modification(v.id)
			change(r)
			t.wantCode(requirement.CSIModifyArguments, modify(t, r), codes.InvalidArgument)
		}
	}, CreateDeleteVolume, ModifyVolume)
	s.spec("ControllerModifyVolume of a volume that does not exist is NOT_FOUND", Covers(requirement.CSIModifyUnknown), func(t *trial) {
		t.wantCode(requirement.CSIModifyUnknown, modify(t, t.modification(t.goneVolume().id)), codes.NotFound)
	}, CreateDeleteVolume, ModifyVolume)
	s.spec("a repeated modification is OK", Covers(requirement.CSIModify), func(t *trial) {
		v := t.createdOK(t.creation(t.capability(t.defaultMode())))
		r := t.modification(v.id)
		if err := modify(t, r); err != nil {
			t.alive(err)
			if status.Code(err) == codes.InvalidArgument && len(t.config.MutableParameters) == 0 {
				end(couldNotRun("the plugin has parameters of its own; --csi.testvolumemutableparameters FILE names them"))
			}
			t.wantCode(requirement.CSIModify, err, codes.OK)
		}
		t.wantCode(requirement.CSIModify, modify(t, r), codes.OK)
	}, CreateDeleteVolume, ModifyVolume)
}

// growSpecs are about volumes that grow.
func growSpecs(s *section) {
	s.in(Controller)
	expand := func(t *trial, r *csi.ControllerExpandVolumeRequest) (*csi.ControllerExpandVolumeResponse, error) {
		r.Secrets = t.config.secrets("ControllerExpandVolume")
		return t.clients.controller.ControllerExpandVolume(t.ctx, r)
	}
	s.spec("an expanded volume has the size that was asked for", Covers(requirement.CSIExpandSize, requirement.CSIExpandRepeated), func(t *trial) {
		v := t.createdOK(t.creation(t.capability(t.defaultMode())))
		want := t.larger(v)
		r := &csi.ControllerExpandVolumeRequest{VolumeId: v.id, CapacityRange: &csi.CapacityRange{RequiredBytes: want, LimitBytes: 4 * want}, VolumeCapability: v.capability}
		first, err := expand(t, r)
		t.wantCode(requirement.CSIExpandSize, err, codes.OK)
		got := first.GetCapacityBytes()
		t.want(requirement.CSIExpandSize, got >= want && got <= 4*want, "a capacity within "+describe(r.GetCapacityRange()), "%d bytes", got)
		again, err := expand(t, r)
		t.wantCode(requirement.CSIExpandRepeated, err, codes.OK)
		t.want(requirement.CSIExpandRepeated, again.GetCapacityBytes() >= got, "a volume that is not smaller than before", "%d bytes, after %d", again.GetCapacityBytes(), got)
	}, CreateDeleteVolume, ExpandVolume)
	s.spec("ControllerExpandVolume without its arguments is INVALID_ARGUMENT", Covers(requirement.CSIExpandArguments), func(t *trial) {
		v := t.createdOK(t.creation(t.capability(t.defaultMode())))
		for _, r := range []*csi.ControllerExpandVolumeRequest{
			{CapacityRange: &csi.CapacityRange{RequiredBytes: t.larger(v)}}, {VolumeId: v.id},
		} {
			_, err := expand(t, r)
			t.wantCode(requirement.CSIExpandArguments, err, codes.InvalidArgument)
		}
	}, CreateDeleteVolume, ExpandVolume)
	s.spec("ControllerExpandVolume of a volume that does not exist is NOT_FOUND", Covers(requirement.CSIExpandUnknown), func(t *trial) {
		gone := t.goneVolume()
		_, err := expand(t, &csi.ControllerExpandVolumeRequest{VolumeId: gone.id, CapacityRange: &csi.CapacityRange{RequiredBytes: t.larger(gone)}})
		t.wantCode(requirement.CSIExpandUnknown, err, codes.NotFound)
	}, CreateDeleteVolume, ExpandVolume)
	s.spec("what is in a volume stays when it grows", Covers(requirement.CSIExpandData), func(t *trial) {
		// Staged and published after it has grown: that it may be before is
		// another claim.
		v := t.createdOK(t.creation(t.capability(t.defaultMode())))
		t.publish(v)
		t.stage(v)
		text := t.filled(v)
		t.release(v)
		_, err := expand(t, &csi.ControllerExpandVolumeRequest{VolumeId: v.id, CapacityRange: &csi.CapacityRange{RequiredBytes: t.larger(v)}, VolumeCapability: v.capability})
		t.need(requirement.CSIExpandSize, err, "OK")
		t.publish(v)
		t.stage(v)
		t.wantText(requirement.CSIExpandData, v, text, "what was written before the volume was expanded")
	}, CreateDeleteVolume, ExpandVolume)
}

// release unstages and detaches a volume before the end of the spec.
func (t *trial) release(v *volume) {
	if t.features[StageVolume] {
		t.sysfail("NodeUnstageVolume", t.unstage(v))
	}
	if t.features[PublishVolume] {
		_, err := t.clients.controller.ControllerUnpublishVolume(t.ctx, &csi.ControllerUnpublishVolumeRequest{
			VolumeId: v.id, NodeId: t.node, Secrets: t.config.secrets("ControllerUnpublishVolume"),
		})
		t.sysfail("ControllerUnpublishVolume", err)
	}
}

// tryPut writes a text into the volume at c.
func (t *trial) tryPut(c *consumer, text string) error {
	if t.config.Block {
		return t.writeStretch(c, text)
	}
	return os.WriteFile(c.file(t), []byte(text), 0o600)
}
