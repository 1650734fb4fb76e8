package sanity

import (
	"bytes"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

func securitySpecs(s *section) {
	s.spec("names from a request reach nothing outside", Covers(requirement.SecurityIDConfined), confinedSpec)
	s.spec("no secret shows in an error", Covers(requirement.SecuritySecretsSP), func(t *trial) {
		canary := t.canary()
		secret := map[string]string{"password": canary}
		v := t.volume()
		good := t.request(v)
		good.Secrets = secret
		t.prepared(good)
		for _, spoil := range []func(*prepareRequest){
			func(r *prepareRequest) { r.VolumeId = "no-such-volume" },
			func(r *prepareRequest) { r.PrepareId = "" },
			func(r *prepareRequest) { r.PreparePath = filepath.Join(r.PreparePath, "missing") },
			func(r *prepareRequest) { r.VolumeCapability = nil },
			func(r *prepareRequest) { r.VolumeCapability = t.withFlags(r, "no_such_flag_at_all") },
			func(r *prepareRequest) { r.Performer.Kinds = nil },
			func(r *prepareRequest) { r.PrepareId, r.Readonly = good.PrepareId, true },
		} {
			r := t.request(v)
			r.Secrets = secret
			spoil(r)
			_, err := t.clients.prepare.NodePrepareVolume(t.ctx, r)
			t.cleanup(func() error { return ignoreInvalid(t.unprepare(r)) })
			t.alive(err)
			t.want(requirement.SecuritySecretsSP, !strings.Contains(fmt.Sprint(status.Convert(err).Proto()), canary),
				"an error without the secret of the call", "%s with the secret in it", codeName(status.Code(err)))
		}
	})
	s.spec("no secret shows in a log, a file or a process", Covers(requirement.SecuritySecretsSP), func(t *trial) {
		canary := t.canary()
		r := t.request(t.volume())
		r.Secrets = map[string]string{"password": canary}
		t.prepared(r)
		bad := clone(r)
		bad.Readonly = !bad.Readonly
		_, err := t.clients.prepare.NodePrepareVolume(t.ctx, bad)
		t.alive(err)
		if t.process != nil {
			t.want(requirement.SecuritySecretsSP, !t.process.log.contains(canary), "no secret in the plugin's output", "the secret of the call is in it")
		}
		places := []string{t.config.StateDir, r.GetPreparePath(), r.GetStagingTargetPath()}
		for _, grant := range t.config.Grants {
			places = append(places, grant)
		}
		for _, place := range places {
			if file := t.fileWith(place, canary); file != "" {
				t.fail(requirement.SecuritySecretsSP, "no secret in clear in a file", "the secret of the call is in "+file)
			}
		}
		if pid := t.pid(); pid != 0 {
			for _, f := range []string{"cmdline", "environ", "mountinfo"} {
				text, err := os.ReadFile(fmt.Sprintf("/proc/%d/%s", pid, f))
				t.want(requirement.SecuritySecretsSP, err != nil || !bytes.Contains(text, []byte(canary)), "no secret in /proc/PID/"+f, "the secret of the call is in it")
			}
		}
		t.unprepared(r)
	})
}

// confinedSpec gives names that climb, and watches the directories around
// those of the plugin.
func confinedSpec(t *trial) {
	around := []string{t.Suite.dir, t.dir}
	for _, dir := range t.config.Grants {
		around = append(around, filepath.Dir(dir))
	}
	if t.config.StateDir != "" {
		around = append(around, filepath.Dir(t.config.StateDir))
	}
	v := t.volume()
	r := t.request(v)
	trap := filepath.Join(t.dir, "trap")
	t.sysfail("making a directory", os.Mkdir(trap, 0o755))
	t.cleanup(func() error { return os.Remove(trap) })
	t.write(filepath.Join(trap, "file"), sentinel)
	t.cleanup(func() error { return ignoreMissing(os.Remove(filepath.Join(trap, "file"))) })
	before := listings(around)
	climbing := []string{"../climbs", "../../climbs", "a/../../climbs", "..", "/etc/climbs", trap}
	for _, name := range climbing {
		bad := clone(r)
		bad.VolumeId = name
		_, err := t.clients.prepare.NodePrepareVolume(t.ctx, bad)
		t.alive(err)
		t.want(requirement.SecurityIDConfined, err != nil, "an error to a volume_id that is none", "OK")
		t.alive(t.unprepare(bad))
		bad = clone(r)
		bad.PrepareId = name
		_, err = t.clients.prepare.NodePrepareVolume(t.ctx, bad)
		t.wantCode(requirement.SecurityIDConfined, err, codes.InvalidArgument)
		t.alive(t.unprepare(bad))
		if t.features[CreateDeleteVolume] {
			t.climb(name)
		}
	}
	same, found := holds(filepath.Join(trap, "file"), sentinel)
	t.want(requirement.SecurityIDConfined, same, "a directory of the suite untouched", "its file: %s", found)
	for dir, was := range before {
		if now := names(dir); !slices.Equal(was, now) {
			t.fail(requirement.SecurityIDConfined, dir+" as it was: "+strings.Join(was, " "), strings.Join(now, " "))
		}
	}
}

// climb creates and deletes a volume whose name is a path.
func (t *trial) climb(name string) {
	answer, err := t.clients.controller.CreateVolume(t.ctx, &csi.CreateVolumeRequest{
		Name: name, VolumeCapabilities: []*csi.VolumeCapability{t.capability(t.defaultMode())},
		Parameters: t.config.VolumeParameters, Secrets: t.config.secrets("CreateVolume"),
	})
	t.alive(err)
	ids := []string{name}
	if err == nil {
		ids = append(ids, answer.GetVolume().GetVolumeId())
	}
	for _, id := range ids {
		_, err = t.clients.controller.DeleteVolume(t.ctx, &csi.DeleteVolumeRequest{VolumeId: id, Secrets: t.config.secrets("DeleteVolume")})
		t.alive(err)
	}
}

func listings(dirs []string) map[string][]string {
	found := map[string][]string{}
	for _, dir := range dirs {
		found[dir] = names(dir)
	}
	return found
}

func ignoreInvalid(err error) error {
	if status.Code(err) == codes.InvalidArgument {
		return nil
	}
	return wrap("NodeUnprepareVolume", err)
}

// fileWith returns a file below dir that holds a text, "" if none does. Files
// of more than a megabyte are volume data, and are passed over.
func (t *trial) fileWith(dir, text string) string {
	if dir == "" {
		return ""
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return "" // what is gone or closed to us shows nothing
	}
	defer func() { _ = root.Close() }()
	found := ""
	_ = fs.WalkDir(root.FS(), ".", func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return nil //nolint:nilerr // what is gone or closed to us shows nothing
		}
		if info, err := d.Info(); err != nil || info.Size() > 1<<20 {
			return nil //nolint:nilerr // as above
		}
		if b, err := root.ReadFile(path); err == nil && bytes.Contains(b, []byte(text)) {
			found = filepath.Join(dir, path)
			return fs.SkipAll
		}
		return nil
	})
	return found
}
