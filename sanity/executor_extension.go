package sanity

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
	"github.com/csi-prepare/csi-prepare/spec/requirement"
	"github.com/csi-prepare/csi-prepare/spec/testingv1alpha1"
)

// commandMountURL is the type URL of the worked extension.
const commandMountURL = "type.csi-prepare.dev/csi.prepare.testing.v1alpha1.CommandMount"

// commandMount is a mount spec of a filesystem that a shell script fills. Its
// bytes may end with a field of a later version.
func commandMount(script string, later bool) *mountSpec {
	value, err := proto.Marshal(&testingv1alpha1.CommandMount{Program: "sh", Arguments: []string{"-c", script}})
	if err != nil {
		end(couldNotRun("making the message of an extension: %v", err))
	}
	if later {
		value = protowire.AppendVarint(protowire.AppendTag(value, 77, protowire.VarintType), 1)
	}
	return &mountSpec{Kind: &preparev1alpha1.MountSpec_Extension{Extension: &anypb.Any{TypeUrl: commandMountURL, Value: value}}}
}

// extended is a performance in which the extension is offered.
func (g *rig) extended(specs ...*mountSpec) *performRequest {
	r := g.performance(specs...)
	r.Request.Performer.Kinds = append(r.Request.Performer.Kinds, preparev1alpha1.MountKind_MOUNT_KIND_EXTENSION)
	r.Request.Performer.Extensions = []string{commandMountURL}
	return r
}

// extends ends the spec if the performer does not perform the extension, as it
// need not.
func (g *rig) extends() {
	r := g.extended(commandMount(":", false))
	receipts, err := g.perform(r)
	g.alive(err)
	if code := status.Code(err); code == codes.Unimplemented || code == codes.FailedPrecondition || code == codes.InvalidArgument {
		g.unsupported("the performer does not perform the worked extension: " + status.Convert(err).Message())
	}
	g.want(requirement.PerformVerified, err == nil, "OK to an extension whose program does nothing", "%s", answered(err))
	g.need(requirement.UndoIdempotent, g.undoCall(r, receipts), "OK to undo")
}

func extensionSpecs(s *section) {
	s.spec("the program of an extension runs in a sandbox of its own", Covers(requirement.ExtensionSandboxed), func(t *trial) {
		g := t.rig()
		g.extends()
		secret := filepath.Join(g.mkdir("secret"), "file")
		g.write(secret, "of the machine")
		g.sysfail("opening a file to everybody", os.Chmod(secret, 0o644))
		g.cleanup(func() error { return os.Remove(secret) })
		text := strings.TrimSpace(g.nonce())
		r := g.extended(commandMount(fmt.Sprintf(`echo %s > file; id -u > user; echo "$CSI_ENDPOINT$HOME" > environment
if test -e %s; then echo seen > leak; fi; echo $$ > pid`, text, secret), false))
		receipts := g.performed(r)
		same, found := holds(filepath.Join(g.target, "file"), text+"\n")
		g.want(requirement.PerformVerified, same, "the file that the program made", "%s", found)
		for name, want := range map[string]func(string) bool{
			"user":        func(s string) bool { return s != "0" },
			"environment": func(s string) bool { return s == "" },
			"pid":         func(s string) bool { return s == "1" || s == "2" },
		} {
			got, err := os.ReadFile(filepath.Join(g.target, name))
			g.sysfail("reading what the program found", err)
			line := strings.TrimSpace(string(got))
			g.want(requirement.ExtensionSandboxed, want(line), "a program without the CO's "+name, "%s %q", name, line)
		}
		g.want(requirement.ExtensionSandboxed, !exists(filepath.Join(g.target, "leak")), "a program that sees no file of the machine", "it sees %s", secret)
		g.need(requirement.UndoIdempotent, g.undoCall(r, receipts), "OK to undo")
		g.wantNothing(requirement.UndoReverseOrder, "after undo")
	})
	s.spec("an extension that is not offered is refused", Covers(requirement.ValidateNothingPerformed), func(t *trial) {
		g := t.rig()
		g.wantRefused(requirement.ValidateNothingPerformed, "an extension that performer.extensions does not name", g.performance(commandMount("echo x > file", false)))
	})
	s.spec("an extension with a field of a later version is refused", Covers(requirement.ExtensionUnknownField), func(t *trial) {
		g := t.rig()
		g.extends()
		g.wantRefused(requirement.ExtensionUnknownField, "an extension with an unknown field", g.extended(commandMount("echo x > file", true)))
	})
	s.spec("no extension is offered of the CO's own accord", Covers(requirement.ExtensionOperatorAllows), func(t *trial) {
		p := t.stub(nil)
		var offered []string
		p.prepare = func(r *prepareRequest) (*prepareResponse, error) {
			offered = append(offered, r.GetPerformer().GetExtensions()...)
			if slices.Contains(r.GetPerformer().GetKinds(), preparev1alpha1.MountKind_MOUNT_KIND_EXTENSION) {
				offered = append(offered, "the kind EXTENSION")
			}
			return nil, nil //nolint:nilnil // the right answer is then given
		}
		t.isUp(t.user(p, "v"), p)
		t.want(requirement.ExtensionOperatorAllows, len(offered) == 0, "no extension in performer, since no operator allowed one", "%s", strings.Join(offered, ", "))
	}, Orchestrate)
}
