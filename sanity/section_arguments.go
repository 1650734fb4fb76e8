package sanity

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

func itoa(n int) string { return strconv.Itoa(n) }

// malformed is one way to break a call that was right.
type malformed struct {
	name   string
	id     requirement.ID
	field  string // which the error has to name
	change func(*prepareRequest)
}

var malformedCalls = []malformed{
	{"an empty volume_id", requirement.PrepareVolumeIDRequired, "volume_id", func(r *prepareRequest) { r.VolumeId = "" }},
	{"an empty prepare_id", requirement.PreparePrepareIDRequired, "prepare_id", func(r *prepareRequest) { r.PrepareId = "" }},
	{"a prepare_id with a slash", requirement.PreparePrepareIDAlphabet, "prepare_id", func(r *prepareRequest) { r.PrepareId += "/x" }},
	{"a prepare_id with a space", requirement.PreparePrepareIDAlphabet, "prepare_id", func(r *prepareRequest) { r.PrepareId += " x" }},
	{"a prepare_id outside ASCII", requirement.PreparePrepareIDAlphabet, "prepare_id", func(r *prepareRequest) { r.PrepareId += "é" }},
	{"a prepare_id that begins with a dot", requirement.PreparePrepareIDAlphabet, "prepare_id", func(r *prepareRequest) { r.PrepareId = "." + r.PrepareId }},
	{"a prepare_id of 129 bytes", requirement.PreparePrepareIDAlphabet, "prepare_id", func(r *prepareRequest) { r.PrepareId = strings.Repeat("a", 129) }},
	{"no volume_capability", requirement.PrepareCapabilityRequired, "volume_capability", func(r *prepareRequest) { r.VolumeCapability = nil }},
	{"an empty prepare_path", requirement.PreparePathRequired, "prepare_path", func(r *prepareRequest) { r.PreparePath = "" }},
	{"a relative prepare_path", requirement.PreparePathAbsolute, "prepare_path", func(r *prepareRequest) { r.PreparePath = "relative/" + filepath.Base(r.PreparePath) }},
	{"no performer", requirement.PreparePerformerRequired, "performer", func(r *prepareRequest) { r.Performer = nil }},
	{"a performer of no kernel", requirement.PreparePerformerRequired, "performer", func(r *prepareRequest) { r.Performer.Kernel = preparev1alpha1.Performer_KERNEL_UNKNOWN }},
	{"a performer of an unknown kernel", requirement.PreparePerformerRequired, "performer", func(r *prepareRequest) { r.Performer.Kernel = 77 }},
	{"a performer without kinds", requirement.PreparePerformerRequired, "performer", func(r *prepareRequest) { r.Performer.Kinds = nil }},
}

func argumentSpecs(s *section) {
	for _, m := range malformedCalls {
		s.spec(m.name+" is INVALID_ARGUMENT", Covers(m.id), func(t *trial) {
			r := t.request(t.volume())
			m.change(r)
			_, err := t.prepare(r)
			t.wantCode(m.id, err, codes.InvalidArgument)
		})
	}
	s.spec("INVALID_ARGUMENT names the field", Covers(requirement.PrepareFieldNamed), func(t *trial) {
		v := t.volume()
		refused := 0
		for _, m := range malformedCalls {
			r := t.request(v)
			m.change(r)
			_, err := t.prepare(r)
			if status.Code(err) != codes.InvalidArgument {
				continue // another rule
			}
			refused++
			t.want(requirement.PrepareFieldNamed, strings.Contains(status.Convert(err).Message(), m.field),
				"the name "+m.field+" in the message", "%q", status.Convert(err).Message())
		}
		if refused == 0 {
			end(couldNotRun("the plugin answered INVALID_ARGUMENT to no malformed call"))
		}
	})
	s.spec("a prepare_id of every allowed byte and length is accepted", Covers(requirement.PrepareAnswered, requirement.PreparePrepareIDAlphabet), func(t *trial) {
		v := t.volume()
		for _, id := range []string{"a", "0", "-", "_x", strings.Repeat("z", 128), "ABCXYZabcxyz0189._-"} {
			r := t.request(v)
			r.PrepareId = id
			_, err := t.prepare(r)
			t.wantCode(requirement.PrepareAnswered, err, codes.OK)
			t.unprepared(r)
		}
	})
	s.spec("a volume that does not exist is NOT_FOUND", Covers(requirement.PrepareVolumeNotFound), func(t *trial) {
		r := t.request(t.goneVolume())
		_, err := t.prepare(r)
		t.wantCode(requirement.PrepareVolumeNotFound, err, codes.NotFound)
	})
	s.spec("a prepare_path that does not exist is FAILED_PRECONDITION", Covers(requirement.PreparePathMissing), func(t *trial) {
		r := t.request(t.volume())
		r.PreparePath = filepath.Join(r.PreparePath, "missing")
		_, err := t.prepare(r)
		t.wantCode(requirement.PreparePathMissing, err, codes.FailedPrecondition)
		_, err = os.Lstat(r.PreparePath)
		t.want(requirement.PreparePathMissing, os.IsNotExist(err), "that the plugin does not make it", "it is there now")
	})
	s.spec("a prepare_path that is not empty is FAILED_PRECONDITION at first", Covers(requirement.PreparePathEmpty), func(t *trial) {
		r := t.request(t.volume())
		foreign := filepath.Join(r.PreparePath, "foreign")
		t.write(foreign, "there before")
		t.cleanup(func() error { return ignoreMissing(os.Remove(foreign)) })
		_, err := t.prepare(r)
		t.wantCode(requirement.PreparePathEmpty, err, codes.FailedPrecondition)
	})
	s.spec("a capability the volume does not support is FAILED_PRECONDITION", Covers(requirement.PrepareUnsupportedCapability), func(t *trial) {
		v := t.volume()
		block := t.otherCapability(t.defaultMode())
		answer, err := t.clients.controller.ValidateVolumeCapabilities(t.ctx, &csi.ValidateVolumeCapabilitiesRequest{
			VolumeId: v.id, VolumeContext: v.context, VolumeCapabilities: []*csi.VolumeCapability{block},
			Secrets: t.config.secrets("ControllerValidateVolumeCapabilities"),
		})
		if err == nil && answer.GetConfirmed() != nil {
			t.unsupported("the volume supports mount and block access both")
		}
		r := t.request(v)
		r.VolumeCapability = block
		_, err = t.prepare(r)
		if err == nil && !t.features[CreateDeleteVolume] {
			t.unsupported("the volume supports mount and block access both")
		}
		t.wantCode(requirement.PrepareUnsupportedCapability, err, codes.FailedPrecondition)
	})
	s.spec("a mount flag that cannot be honoured is INVALID_ARGUMENT", Covers(requirement.PrepareMountFlagRefused), func(t *trial) {
		r := t.request(t.volume())
		r.VolumeCapability = t.withFlags(r, "no_such_flag_at_all")
		_, err := t.prepare(r)
		t.wantCode(requirement.PrepareMountFlagRefused, err, codes.InvalidArgument)
	}, accessMount)
	s.spec("an error shows no more of a mount flag than its name", Covers(requirement.PrepareMountFlagMasked), func(t *trial) {
		r := t.request(t.volume())
		canary := t.canary()
		r.VolumeCapability = t.withFlags(r, "no_such_flag_at_all="+canary)
		_, err := t.prepare(r)
		t.want(requirement.PrepareMountFlagMasked, !strings.Contains(status.Convert(err).Message(), canary),
			`at most "no_such_flag_at_all" in the message`, "the value after '=' is in the message")
		if err == nil {
			end(couldNotRun("the plugin accepted the flag, which breaks %s", requirement.PrepareMountFlagRefused))
		}
	}, accessMount)
	s.spec("a volume_mount_group that cannot be honoured is INVALID_ARGUMENT", Covers(requirement.PrepareMountGroupRefused), func(t *trial) {
		r := t.request(t.volume())
		group := "65533"
		if t.features[VolumeMountGroup] {
			group = "csi-prepare-nobody-has-this-group"
		}
		r.VolumeCapability = &csi.VolumeCapability{
			AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{VolumeMountGroup: group}},
			AccessMode: r.GetVolumeCapability().GetAccessMode(),
		}
		_, err := t.prepare(r)
		t.wantCode(requirement.PrepareMountGroupRefused, err, codes.InvalidArgument)
	}, accessMount)
	s.spec("a volume that is not staged there is FAILED_PRECONDITION", Covers(requirement.PrepareStagingRequired), func(t *trial) {
		v := t.volume()
		for name, change := range map[string]func(*prepareRequest){
			"without a staging_target_path":      func(r *prepareRequest) { r.StagingTargetPath = "" },
			"with another staging_target_path":   func(r *prepareRequest) { r.StagingTargetPath = t.mkdir("elsewhere") },
			"for a volume that was never staged": func(r *prepareRequest) { r.VolumeId, r.StagingTargetPath = t.unstagedVolume(), t.mkdir("never") },
		} {
			r := t.request(v)
			change(r)
			_, err := t.prepare(r)
			t.want(requirement.PrepareStagingRequired, status.Code(err) == codes.FailedPrecondition, "FAILED_PRECONDITION "+name, "%s", answered(err))
		}
	}, StageVolume)
}

// withFlags is the capability of a request with mount flags.
func (t *trial) withFlags(r *prepareRequest, flags ...string) *csi.VolumeCapability {
	return &csi.VolumeCapability{
		AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{MountFlags: flags}},
		AccessMode: r.GetVolumeCapability().GetAccessMode(),
	}
}

// goneVolume is a volume that does not exist, under an id of the form the
// plugin gives where that can be had.
func (t *trial) goneVolume() *volume {
	if !t.features[CreateDeleteVolume] {
		return &volume{id: t.name("no-such-volume"), capability: t.capability(t.defaultMode())}
	}
	v := t.bareVolume(t.capability(t.defaultMode()))
	_, err := t.clients.controller.DeleteVolume(t.ctx, &csi.DeleteVolumeRequest{VolumeId: v.id, Secrets: t.config.secrets("DeleteVolume")})
	t.sysfail("DeleteVolume", err)
	if t.features[StageVolume] {
		v.staging = t.mkdir("staging")
	}
	return v
}

func (t *trial) unstagedVolume() string {
	v := t.bareVolume(t.capability(t.defaultMode()))
	t.publish(v)
	return v.id
}

// unsupported ends the spec: what it is about is optional, and not there.
func (t *trial) unsupported(why string) { end(unsupported(why)) }
