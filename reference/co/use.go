package co

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/proto"

	"github.com/csi-prepare/csi-prepare/reference/mountns"
	"github.com/csi-prepare/csi-prepare/reference/mountspec/wire"
	"github.com/csi-prepare/csi-prepare/reference/perform"
	"github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

// Use is one use of a volume by one consumer.
type Use struct {
	// Endpoint is the plugin's, as "unix:///path".
	Endpoint string
	VolumeID string
	// PrepareID is the caller's name of this use: 1 to 128 bytes of
	// [A-Za-z0-9._-], not beginning with '.', and no other consumer's.
	PrepareID  string
	Capability *csi.VolumeCapability
	Readonly   bool
	// Ephemeral says that the volume lives from its first use to its last:
	// it is never staged.
	Ephemeral bool
	// CallerStages says that staging and unstaging are the caller's, and
	// StagingPath where it has staged the volume, empty if nowhere. Otherwise
	// they are the CO's.
	CallerStages                  bool
	StagingPath                   string
	PublishContext, VolumeContext map[string]string
	// StageSecrets and Secrets are for NodeStageVolume and
	// NodePrepareVolume. They are kept nowhere.
	StageSecrets, Secrets map[string]string
	// Target is the place in the consumer. It stays the caller's.
	Target perform.Target
	// UserNamespace says that the consumer has one of its own.
	UserNamespace bool
}

var prepareID = regexp.MustCompile(`^[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}$`)

func (u *Use) check() error {
	switch {
	case u.VolumeID == "":
		return errors.New("volume id: is empty")
	case !prepareID.MatchString(u.PrepareID):
		return fmt.Errorf("prepare id %q: has to be 1 to 128 bytes of [A-Za-z0-9._-] and not begin with '.' [%s]", u.PrepareID, requirement.PreparePrepareIDAlphabet)
	case u.Capability.GetAccessType() == nil || u.Capability.GetAccessMode() == nil:
		return errors.New("volume capability: needs an access type and an access mode")
	case !strings.HasPrefix(u.Target.Path, "/"):
		return fmt.Errorf("target %q: has to be absolute", u.Target.Path)
	case u.StagingPath != "" && !cleanPath(u.StagingPath):
		return fmt.Errorf("staging path %q: has to be absolute, in its shortest form and not /", u.StagingPath)
	}
	return nil
}

func (u *Use) namespaceID() (uint64, error) {
	if u.Target.Namespace != nil {
		return u.Target.Namespace.ID(), nil
	}
	own, err := mountns.Own()
	if err != nil {
		return 0, err
	}
	defer own.Close()
	return own.ID(), nil
}

// digestWith identifies the arguments that a repeat must not change: all but
// secrets and the keys that the plugin lets be refreshed.
func (u *Use) digestWith(refreshable map[string]bool, namespace uint64) string {
	capability, err := proto.MarshalOptions{Deterministic: true}.Marshal(u.Capability)
	if err != nil {
		// A message that was made in this process has nothing to fail with.
		capability = []byte(err.Error())
	}
	texts := []string{
		string(capability), strconv.FormatBool(u.Readonly), strconv.FormatBool(u.Ephemeral),
		u.Target.Path, strconv.FormatUint(namespace, 10), u.StagingPath,
	}
	for _, k := range sortedKeys(u.PublishContext) {
		texts = append(texts, "publish", k, u.PublishContext[k])
	}
	for _, k := range sortedKeys(u.VolumeContext) {
		if !refreshable[k] {
			texts = append(texts, "volume", k, u.VolumeContext[k])
		}
	}
	return digest(texts...)
}

// stage returns the NodeStageVolume request for r.
func (u *Use) stage(r *Record) *csi.NodeStageVolumeRequest {
	return &csi.NodeStageVolumeRequest{
		VolumeId: r.VolumeID, PublishContext: u.PublishContext, StagingTargetPath: r.StagingPath,
		VolumeCapability: u.Capability, Secrets: u.StageSecrets, VolumeContext: u.VolumeContext,
	}
}

// prepare returns the NodePrepareVolume request for r.
func (u *Use) prepare(r *Record, s *Settings) *preparev1alpha1.NodePrepareVolumeRequest {
	return &preparev1alpha1.NodePrepareVolumeRequest{
		VolumeId: r.VolumeID, PrepareId: r.PrepareID, PublishContext: u.PublishContext,
		StagingTargetPath: r.StagingPath, VolumeCapability: u.Capability, Readonly: u.Readonly,
		Secrets: u.Secrets, VolumeContext: u.VolumeContext, PreparePath: r.PreparePath,
		Performer: wire.PerformerProto(s.Performer(u.Ephemeral, u.UserNamespace)),
	}
}

// mask is an error without the secrets of the use, whoever repeated them.
type mask struct {
	text string
	err  error
}

// Error returns the text without secrets.
func (m *mask) Error() string { return m.text }

// Unwrap returns the error for errors.Is and errors.As.
func (m *mask) Unwrap() error { return m.err }

// hidden are the texts that no error may show: secrets, values of mount flags,
// and contexts that a repeat may refresh, since those are tokens.
func (u *Use) hidden(refreshable map[string]bool) []string {
	var hidden []string
	for _, m := range []map[string]string{u.StageSecrets, u.Secrets} {
		for _, v := range m {
			hidden = append(hidden, v)
		}
	}
	for k, v := range u.VolumeContext {
		if refreshable[k] {
			hidden = append(hidden, v)
		}
	}
	for _, flag := range u.Capability.GetMount().GetMountFlags() {
		if _, value, ok := strings.Cut(flag, "="); ok {
			hidden = append(hidden, value)
		}
	}
	return hidden
}

// secretsOf are the secrets in mount specs.
func secretsOf(specs []*preparev1alpha1.MountSpec) []string {
	var hidden []string
	for _, spec := range specs {
		for _, p := range spec.GetFilesystem().GetParameters() {
			hidden = append(hidden, p.GetSecret())
		}
	}
	return hidden
}

// masked takes hidden texts out of an error's.
func masked(err error, hidden []string) error {
	if err == nil {
		return nil
	}
	return &mask{hide(err.Error(), hidden), err}
}

const shownInstead = "***stripped***"

// hide leaves texts of fewer than four bytes: they would tear any text apart.
func hide(text string, hidden []string) string {
	// A long secret first: it may contain a short one.
	slices.SortFunc(hidden, func(a, b string) int { return len(b) - len(a) })
	for _, h := range hidden {
		if len(h) >= 4 {
			text = strings.ReplaceAll(text, h, shownInstead)
		}
	}
	return text
}
