package sanity

import (
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/csi-prepare/csi-prepare/reference/mountns"
	"github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
	"github.com/csi-prepare/csi-prepare/spec/requirement"
	"github.com/csi-prepare/csi-prepare/spec/testingv1alpha1"
)

// executorSections writes the specs of the executor's seat, in the order of
// SPEC.md.
var executorSections = []writer{
	{"Attributes", attributeSpecs},
	{"Kind FILESYSTEM", filesystemSpecs},
	{"Kind BIND", bindSpecs},
	{"Kind BLOCK_DEVICE", deviceSpecs},
	{"Kind EXTENSION", extensionSpecs},
	{"Validate", validateSpecs},
	{"Perform", performSpecs},
	{"Undo", undoSpecs},
	{"Audit", auditSpecs},
	{"The machine", hostSpecs},
	{"Crash and reboot", recoverSpecs},
	{"Attacks", attackSpecs},
	{"Secrets", executorSecretSpecs},
	{"What the plugin is asked", orchestratorSpecs},
}

type (
	mountSpec      = preparev1alpha1.MountSpec
	attributes     = preparev1alpha1.MountAttributes
	performRequest = testingv1alpha1.PerformRequest
)

// grantName is the one granted directory of a performance.
const grantName = "data"

// stage is what one performance needs: a consumer with a root of its own in
// the namespace of the spec, and a granted directory with a volume in it.
type rig struct {
	*trial
	root   string // of the consumer, a tmpfs
	target string // below root, with a sentinel in it
	grant  string
	volume string // in grant, has "file", "dir/inner" and "other/inner"
	text   string // in volume/file
}

// rig makes a stage.
func (t *trial) rig() *rig {
	c := t.consumer()
	g := &rig{trial: t, root: filepath.Dir(c.target), target: c.target, grant: t.mkdir("grant"), text: t.nonce()}
	t.cleanup(func() error { return os.RemoveAll(g.grant) })
	g.volume = filepath.Join(g.grant, "volume")
	for _, dir := range []string{g.volume, g.volume + "/dir", g.volume + "/dir/inner", g.volume + "/other", g.volume + "/other/inner"} {
		t.sysfail("making a directory", os.Mkdir(dir, 0o755))
	}
	t.write(filepath.Join(g.volume, "file"), g.text)
	return g
}

// namespacePath is how another process opens the namespace of the spec. The
// number is used once a run, so that what a performer keeps of it leads
// nowhere later, and not into the namespace of another spec.
func (t *trial) namespacePath() string {
	if t.nsFile == 0 {
		t.mu.Lock()
		t.descriptors++
		least := t.descriptors + 100
		t.mu.Unlock()
		fd, err := unix.FcntlInt(uintptr(t.ns.FD()), unix.F_DUPFD_CLOEXEC, least)
		t.sysfail("duplicating the descriptor of a namespace", err)
		t.nsFile = fd
	}
	return fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), t.nsFile)
}

// performance is a request to perform specs at the target, under an id of
// its own.
func (g *rig) performance(specs ...*mountSpec) *performRequest {
	return &performRequest{
		Id:     g.name("perform"),
		Target: &testingv1alpha1.Target{Namespace: g.namespacePath(), Path: g.target},
		Request: &testingv1alpha1.Request{
			Performer: &preparev1alpha1.Performer{
				Kernel: preparev1alpha1.Performer_NODE,
				Kinds: []preparev1alpha1.MountKind{
					preparev1alpha1.MountKind_MOUNT_KIND_FILESYSTEM, preparev1alpha1.MountKind_MOUNT_KIND_BIND,
				},
				FsTypes: []string{"tmpfs", "ext4"},
				Grants:  []string{grantName},
			},
			Grants: map[string]string{grantName: g.grant},
		},
		MountSpecs: specs,
	}
}

// perform makes the call; whatever comes of it is undone when the spec ends.
func (g *rig) perform(r *performRequest) ([]string, error) {
	answer, err := g.clients.performer.Perform(g.ctx, r)
	receipts := answer.GetReceipts()
	g.cleanup(func() error {
		if receipts == nil {
			return nil
		}
		return wrap("Undo", g.undoCall(r, receipts))
	})
	return receipts, err
}

// performed makes a call that has to be OK for the spec to go on.
func (g *rig) performed(r *performRequest) []string {
	receipts, err := g.perform(r)
	g.need(requirement.PerformVerified, err, "OK to mount specs that keep every rule")
	return receipts
}

func (g *rig) undoCall(r *performRequest, receipts []string) error {
	_, err := g.clients.performer.Undo(g.ctx, &testingv1alpha1.UndoRequest{Id: r.GetId(), Target: r.GetTarget(), Receipts: receipts})
	return err
}

// bind is a BIND of the volume, or of what relative names below it.
func bind(target, relative string, a *attributes) *mountSpec {
	return &mountSpec{Target: target, Attributes: a, Kind: &preparev1alpha1.MountSpec_Bind{Bind: &preparev1alpha1.BindMount{
		Source: &preparev1alpha1.PathRef{Base: preparev1alpha1.PathRef_GRANTED, Grant: grantName, Relative: filepath.Join("volume", relative)},
	}}}
}

func fileBind(target, relative string) *mountSpec {
	s := bind(target, relative, nil)
	s.GetBind().IsFile = true
	return s
}

// tmpfsOf is a FILESYSTEM of type tmpfs with a size.
func tmpfsOf(target string, a *attributes, extra ...*preparev1alpha1.FsParameter) *mountSpec {
	parameters := append([]*preparev1alpha1.FsParameter{textParameter("size", "1048576")}, extra...)
	return &mountSpec{Target: target, Attributes: a, Kind: &preparev1alpha1.MountSpec_Filesystem{Filesystem: &preparev1alpha1.FilesystemMount{
		FsType: "tmpfs", Parameters: parameters,
	}}}
}

func textParameter(key, value string) *preparev1alpha1.FsParameter {
	return &preparev1alpha1.FsParameter{Key: key, Value: &preparev1alpha1.FsParameter_Text{Text: value}}
}

// table reads the consumer's mount table.
func (t *trial) table() *mountns.Table {
	table, err := t.ns.Table(t.ctx)
	t.sysfail("reading the mount table", err)
	return table
}

// only returns the one mount at a place; it is a failure if there is none or
// more than one.
func (g *rig) only(id requirement.ID, place string) mountns.Mount {
	stack := g.table().At(place)
	if len(stack) != 1 {
		g.fail(id, "exactly one mount at "+place, count(len(stack), "mount"))
	}
	return stack[0]
}

// wantNothing wants the target untouched: no mount at or below it, and the
// sentinel as it was.
func (g *rig) wantNothing(id requirement.ID, when string) {
	if below := g.table().Below(g.target); len(below) > 0 {
		g.fail(id, "no mount at or below the target "+when, count(len(below), "mount"))
	}
	same, found := holds(filepath.Join(g.target, "sentinel"), sentinel)
	g.want(id, same, "the directory below the mount point as it was", "the file in it: %s", found)
}

// wantRefused wants an error, and nothing performed.
func (g *rig) wantRefused(id requirement.ID, what string, r *performRequest) {
	_, err := g.perform(r)
	g.alive(err)
	g.want(id, err != nil, "an error to "+what, "OK")
	g.wantNothing(id, "after the refusal of "+what)
}

// elsewhere ends the spec if the suite cannot mount where the performer
// finds its sources without mounting in a namespace others use.
func (g *rig) elsewhere() {
	if g.beyond == nil {
		end(couldNotRun("the spec mounts in the performer's own namespace; --exec 'CMD …' lets the suite start it in one of its own"))
	}
}

// mountBeyond mounts a tmpfs where the performer sees it.
func (g *rig) mountBeyond(dir string) {
	g.elsewhere()
	g.sysfail("mounting in the performer's namespace", g.beyond.Do(g.ctx, func() error {
		return unix.Mount("source", dir, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "size=1m")
	}))
	g.cleanup(func() error {
		return g.beyond.Do(g.ctx, func() error { return unix.Unmount(dir, 0) })
	})
}

// watch runs seen over and over in the consumer's namespace while during
// runs, and reports whether it was ever true.
func (t *trial) watch(seen func() bool, during func()) bool {
	stop, started, found := make(chan struct{}), make(chan struct{}), make(chan bool, 1)
	go func() {
		was := false
		err := t.ns.Do(t.ctx, func() error {
			close(started)
			for {
				was = was || seen()
				select {
				case <-stop:
					return nil
				default:
				}
			}
		})
		found <- was && err == nil
	}()
	<-started
	e := caught(during)
	close(stop)
	was := <-found
	if e != nil {
		end(e)
	}
	return was
}

// with copies a spec and changes it.
func with(s *mountSpec, change func(*mountSpec)) *mountSpec {
	c := proto.Clone(s).(*mountSpec)
	change(c)
	return c
}

// busyCode is how the testing service says that something is in use.
func (g *rig) wantBusy(id requirement.ID, err error) {
	g.alive(err)
	g.want(id, status.Code(err) == codes.FailedPrecondition, "FAILED_PRECONDITION to undo of a busy mount", "%s", answered(err))
}

// canWrite reports whether a file can be opened for writing.
func canWrite(path string) bool {
	f, err := os.OpenFile(path, os.O_WRONLY, 0) //nolint:gosec // a path of the suite's own
	if err == nil {
		_ = f.Close()
	}
	return err == nil
}

// ids returns the unique ids of the mounts at and below the target.
func (g *rig) idsBelow() []uint64 {
	var ids []uint64
	for _, m := range g.table().Below(g.target) {
		ids = append(ids, m.ID)
	}
	return ids
}

func (g *rig) stillThere(ids []uint64) bool {
	table := g.table()
	for _, id := range ids {
		if _, ok := table.ByID(id); ok {
			return true
		}
	}
	return false
}
