package server

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"

	prepare "github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
)

// binder is a driver whose volumes are v1 and v2, and which can be made to
// fail.
type binder struct {
	mu          sync.Mutex
	check, fail error
	calls       int
	inside      func() // called in Specs
	change      func(*prepare.MountSpec)
	accepting   bool // of any performer
}

func (b *binder) Check(_ context.Context, req *prepare.NodePrepareVolumeRequest) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case !slices.Contains([]string{"v1", "v2"}, req.GetVolumeId()):
		return status.Error(codes.NotFound, "volume_id: no such volume")
	case !b.accepting && !slices.Contains(req.GetPerformer().GetKinds(), prepare.MountKind_MOUNT_KIND_BIND):
		return status.Error(codes.FailedPrecondition, "performer.kinds: offer BIND")
	}
	return b.check
}

func (b *binder) Specs(_ context.Context, req *prepare.NodePrepareVolumeRequest) ([]*prepare.MountSpec, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.calls++
	if b.inside != nil {
		b.inside()
	}
	if b.fail != nil {
		return nil, b.fail
	}
	spec := &prepare.MountSpec{
		Kind: &prepare.MountSpec_Bind{Bind: &prepare.BindMount{Source: &prepare.PathRef{
			Base: prepare.PathRef_GRANTED, Grant: "data", Relative: req.GetVolumeId(),
		}}},
		Attributes: &prepare.MountAttributes{Readonly: req.GetReadonly()},
	}
	if b.change != nil {
		b.change(spec)
	}
	return []*prepare.MountSpec{spec}, nil
}

// plugin is a NodePrepare over a state directory, and a CO's directories.
type plugin struct {
	*NodePrepare
	t       *testing.T
	driver  *binder
	dir     string
	state   *State
	options Config
}

const bootA, bootB = "aaaaaaaa-0000-4000-8000-000000000001", "bbbbbbbb-0000-4000-8000-000000000002"

func newPlugin(t *testing.T, options Config) *plugin {
	p := &plugin{t: t, driver: &binder{}, dir: t.TempDir(), options: options}
	if p.options.BootID == "" {
		p.options.BootID = bootA
	}
	p.start()
	return p
}

// start is the start of a process, over what the last one left.
func (p *plugin) start() {
	p.t.Helper()
	if p.state != nil {
		p.state.Close()
	}
	p.state = openState(p.t, filepath.Join(p.dir, "state"))
	c := p.options
	c.Driver, c.State, c.Flights = p.driver, p.state, &Flights{}
	n, err := NewNodePrepare(c)
	if err != nil {
		p.t.Fatal(err)
	}
	p.NodePrepare = n
}

// request for a volume under a prepare_id, with a directory made for it.
func (p *plugin) request(volumeID, prepareID string, mode csi.VolumeCapability_AccessMode_Mode) *prepare.NodePrepareVolumeRequest {
	p.t.Helper()
	req := proto.CloneOf(validRequest())
	req.VolumeId, req.PrepareId = volumeID, prepareID
	req.PreparePath = filepath.Join(p.dir, volumeID+"-"+prepareID)
	req.VolumeCapability.AccessMode.Mode = mode
	if err := os.MkdirAll(req.PreparePath, 0o700); err != nil {
		p.t.Fatal(err)
	}
	return req
}

func (p *plugin) prepareOK(req *prepare.NodePrepareVolumeRequest) *prepare.NodePrepareVolumeResponse {
	p.t.Helper()
	resp, err := p.NodePrepareVolume(p.t.Context(), req)
	if err != nil {
		p.t.Fatalf("NodePrepareVolume: %v", err)
	}
	return resp
}

func (p *plugin) prepareFails(req *prepare.NodePrepareVolumeRequest, want codes.Code, words ...string) {
	p.t.Helper()
	_, err := p.NodePrepareVolume(p.t.Context(), req)
	p.failed(err, want, words...)
}

func (p *plugin) failed(err error, want codes.Code, words ...string) {
	p.t.Helper()
	if status.Code(err) != want {
		p.t.Errorf("got %v, want %v", err, want)
	}
	for _, w := range words {
		if !strings.Contains(status.Convert(err).Message(), w) {
			p.t.Errorf("message %q does not name %q", status.Convert(err).Message(), w)
		}
	}
}

func (p *plugin) unprepare(volumeID, prepareID, path string) error {
	_, err := p.NodeUnprepareVolume(p.t.Context(), &prepare.NodeUnprepareVolumeRequest{VolumeId: volumeID, PrepareId: prepareID, PreparePath: path})
	return err
}

func (p *plugin) unprepareOK(req *prepare.NodePrepareVolumeRequest) {
	p.t.Helper()
	if err := p.unprepare(req.VolumeId, req.PrepareId, req.PreparePath); err != nil {
		p.t.Fatalf("NodeUnprepareVolume: %v", err)
	}
}

// lists wants these entries, "volume/prepare_id", with '?' where uncertain.
func (p *plugin) lists(want ...string) []*prepare.NodeListPreparedVolumesResponse_Entry {
	p.t.Helper()
	resp, err := p.NodeListPreparedVolumes(p.t.Context(), &prepare.NodeListPreparedVolumesRequest{})
	if err != nil {
		p.t.Fatalf("NodeListPreparedVolumes: %v", err)
	}
	got := []string{}
	for _, e := range resp.GetEntries() {
		s := e.GetVolumeId() + "/" + e.GetPrepareId()
		if e.GetUncertain() {
			s += "?"
		}
		got = append(got, s)
	}
	slices.Sort(got)
	slices.Sort(want)
	if !slices.Equal(got, want) {
		p.t.Errorf("listed %q, want %q", got, want)
	}
	return resp.GetEntries()
}

const (
	singleWriter = csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER
	multiWriter  = csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER
	oldWriter    = csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER
	oldReader    = csi.VolumeCapability_AccessMode_SINGLE_NODE_READER_ONLY
	manyWriters  = csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER
	manyReaders  = csi.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY
	oneOfMany    = csi.VolumeCapability_AccessMode_MULTI_NODE_SINGLE_WRITER
)

// The idempotency table, with and without SINGLE_NODE_MULTI_WRITER.
func TestIdempotencyTable(t *testing.T) {
	tests := []struct {
		mode          csi.VolumeCapability_AccessMode_Mode
		capable, less codes.Code // for another prepare_id
	}{
		{manyWriters, codes.OK, codes.OK},
		{manyReaders, codes.OK, codes.OK},
		{oneOfMany, codes.OK, codes.OK},
		{multiWriter, codes.OK, codes.OK},
		{oldWriter, codes.FailedPrecondition, codes.OK},
		{oldReader, codes.FailedPrecondition, codes.OK},
		{singleWriter, codes.FailedPrecondition, codes.FailedPrecondition},
	}
	for _, capable := range []bool{true, false} {
		for _, tt := range tests {
			name := tt.mode.String() + " without the capability"
			other := tt.less
			if capable {
				name, other = tt.mode.String(), tt.capable
			}
			t.Run(name, func(t *testing.T) {
				p := newPlugin(t, Config{MultiWriter: capable})
				req := p.request("v1", "p1", tt.mode)
				first := p.prepareOK(req)
				if diff := cmp.Diff(first, p.prepareOK(req), protocmp.Transform()); diff != "" {
					t.Errorf("a repeat is answered with other specs:\n%s", diff)
				}

				changed := proto.CloneOf(req)
				changed.Readonly = !changed.Readonly
				p.prepareFails(changed, codes.AlreadyExists, "prepare_id", "readonly", "NodeUnprepareVolume")

				if _, err := p.NodePrepareVolume(t.Context(), p.request("v1", "p2", tt.mode)); status.Code(err) != other {
					t.Errorf("another prepare_id: got %v, want %v", err, other)
				}
				p.prepareOK(p.request("v2", "p1", tt.mode)) // another volume is another matter
				p.unprepareOK(req)
				p.prepareOK(p.request("v1", "p2", tt.mode)) // the first is gone
			})
		}
	}
}

// Where the modes of two calls differ, the one that excludes more decides.
func TestMixedAccessModes(t *testing.T) {
	for _, tt := range []struct {
		first, second csi.VolumeCapability_AccessMode_Mode
		want          codes.Code
	}{
		{multiWriter, singleWriter, codes.FailedPrecondition},
		{singleWriter, multiWriter, codes.FailedPrecondition},
		{manyWriters, oldWriter, codes.FailedPrecondition},
		{oldReader, manyWriters, codes.FailedPrecondition},
		{multiWriter, manyReaders, codes.OK},
	} {
		p := newPlugin(t, Config{MultiWriter: true})
		p.prepareOK(p.request("v1", "p1", tt.first))
		_, err := p.NodePrepareVolume(t.Context(), p.request("v1", "p2", tt.second))
		if status.Code(err) != tt.want {
			t.Errorf("%v then %v: got %v, want %v", tt.first, tt.second, err, tt.want)
		}
		if tt.want != codes.OK {
			p.lists("v1/p1")
		}
	}
}

// What a repeat may change, and what it may not.
func TestRepeatCompares(t *testing.T) {
	type edit func(*prepare.NodePrepareVolumeRequest)
	tests := []struct {
		name  string
		field string // that differs; "" if the repeat is equal
		edit  edit
	}{
		{"secrets", "", func(r *prepare.NodePrepareVolumeRequest) { r.Secrets = map[string]string{"k": "other"} }},
		{"handoff", "", func(r *prepare.NodePrepareVolumeRequest) {
			r.HandleSocket, r.HandoffToken, r.HeldHandles = "/run/s", []byte("0123456789abcdef"), []string{"h"}
		}},
		{"wider performer", "", func(r *prepare.NodePrepareVolumeRequest) {
			r.Performer.Kinds = append(r.Performer.Kinds, prepare.MountKind_MOUNT_KIND_FILESYSTEM, 99)
			r.Performer.FsTypes, r.Performer.Idmap, r.Performer.UserNamespace = []string{"ext4"}, true, true
		}},
		{"refreshable context", "", func(r *prepare.NodePrepareVolumeRequest) { r.VolumeContext["token"] = "new" }},
		{"refreshable context gone", "", func(r *prepare.NodePrepareVolumeRequest) { delete(r.VolumeContext, "token") }},
		{"empty map for none", "", func(r *prepare.NodePrepareVolumeRequest) { r.PublishContext = map[string]string{} }},
		{"context", "volume_context", func(r *prepare.NodePrepareVolumeRequest) { r.VolumeContext["size"] = "2" }},
		{"context key", "volume_context", func(r *prepare.NodePrepareVolumeRequest) { r.VolumeContext["more"] = "" }},
		{"publish context", "publish_context", func(r *prepare.NodePrepareVolumeRequest) { r.PublishContext = map[string]string{"a": "b"} }},
		{"readonly", "readonly", func(r *prepare.NodePrepareVolumeRequest) { r.Readonly = true }},
		{"staging path", "staging_target_path", func(r *prepare.NodePrepareVolumeRequest) { r.StagingTargetPath = "/stage" }},
		{"prepare path", "prepare_path", func(r *prepare.NodePrepareVolumeRequest) { r.PreparePath = filepath.Dir(r.PreparePath) }},
		{"access mode", "volume_capability", func(r *prepare.NodePrepareVolumeRequest) { r.VolumeCapability.AccessMode.Mode = manyWriters }},
		{"fs type", "volume_capability", func(r *prepare.NodePrepareVolumeRequest) { r.VolumeCapability.GetMount().FsType = "ext4" }},
		{"flags", "volume_capability", func(r *prepare.NodePrepareVolumeRequest) { r.VolumeCapability.GetMount().MountFlags = []string{"a,b"} }},
		{"group", "volume_capability", func(r *prepare.NodePrepareVolumeRequest) { r.VolumeCapability.GetMount().VolumeMountGroup = "7" }},
		{"access type", "volume_capability", func(r *prepare.NodePrepareVolumeRequest) {
			r.VolumeCapability.AccessType = &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}}
		}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			p := newPlugin(t, Config{MultiWriter: true, Refreshable: []string{"token"}})
			req := p.request("v1", "p1", multiWriter)
			req.VolumeContext = map[string]string{"size": "1", "token": "old"}
			req.VolumeCapability.GetMount().MountFlags = []string{"a", "b"}
			req.Secrets = map[string]string{"k": "first"}
			first := p.prepareOK(req)
			p.start() // the comparison outlives the process
			tt.edit(req)
			if tt.field != "" {
				p.prepareFails(req, codes.AlreadyExists, tt.field)
			} else if diff := cmp.Diff(first, p.prepareOK(req), protocmp.Transform()); diff != "" {
				t.Errorf("other specs:\n%s", diff)
			}
			p.lists("v1/p1")
		})
	}
}

func TestNarrowerPerformerKeepsThePreparation(t *testing.T) {
	p := newPlugin(t, Config{})
	req := p.request("v1", "p1", multiWriter)
	p.prepareOK(req)
	narrow := proto.CloneOf(req)
	narrow.Performer.Kinds = []prepare.MountKind{prepare.MountKind_MOUNT_KIND_FILESYSTEM}
	p.prepareFails(narrow, codes.FailedPrecondition, "performer")
	p.lists("v1/p1")
	p.prepareOK(req)
}

// A first call that fails for good leaves nothing; one whose outcome is not
// final is listed as uncertain until a repeat or Unprepare.
func TestFailedFirstCall(t *testing.T) {
	for _, code := range []codes.Code{
		codes.InvalidArgument, codes.FailedPrecondition, codes.NotFound, codes.ResourceExhausted, codes.Internal,
		codes.Aborted, codes.Unavailable, codes.DeadlineExceeded, codes.Canceled,
	} {
		t.Run(code.String(), func(t *testing.T) {
			final := code != codes.Aborted && code != codes.Unavailable && code != codes.DeadlineExceeded && code != codes.Canceled
			p := newPlugin(t, Config{MultiWriter: true})
			p.driver.fail = status.Error(code, "made to fail")
			req := p.request("v1", "p1", singleWriter)
			p.prepareFails(req, code)
			if final {
				p.lists()
			} else {
				p.lists("v1/p1?")
				p.prepareFails(p.request("v1", "p2", singleWriter), codes.FailedPrecondition)
				if prepared, err := p.Prepared("v1"); !prepared || err != nil {
					t.Errorf("Prepared: %v, %v", prepared, err)
				}
			}
			p.driver.fail = nil
			p.prepareOK(req)
			p.lists("v1/p1")
			p.driver.fail = status.Error(code, "made to fail")
			p.prepareFails(req, code) // a failed repeat leaves what was prepared
			p.lists("v1/p1")
			p.unprepareOK(req)
			p.lists()
		})
	}
}

func TestErrorsOfTheDriverBecomeStatuses(t *testing.T) {
	p := newPlugin(t, Config{})
	p.driver.fail = errors.New("plain")
	p.prepareFails(p.request("v1", "p1", multiWriter), codes.Internal, "plain")
	p.prepareFails(p.request("v3", "p1", multiWriter), codes.NotFound)
	p.lists()
}

func TestPreparePath(t *testing.T) {
	p := newPlugin(t, Config{})
	req := p.request("v1", "p1", multiWriter)
	file := filepath.Join(req.PreparePath, "something")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	p.prepareFails(req, codes.FailedPrecondition, "prepare_path", "not empty")
	os.Remove(file)
	os.Remove(req.PreparePath)
	p.prepareFails(req, codes.FailedPrecondition, "prepare_path", "no such file")
	if err := os.WriteFile(req.PreparePath, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	p.prepareFails(req, codes.FailedPrecondition, "prepare_path", "not a directory")
	os.Remove(req.PreparePath)
	if err := os.Symlink("/", req.PreparePath); err != nil {
		t.Fatal(err)
	}
	p.prepareFails(req, codes.FailedPrecondition, "prepare_path")
	os.Remove(req.PreparePath)
	p.lists()

	p.prepareOK(p.request("v1", "p1", multiWriter))
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	p.prepareOK(req) // only the first call needs it empty
	p.unprepareOK(req)
	if _, err := os.Stat(file); err != nil {
		t.Errorf("Unprepare removed what the driver did not make: %v", err)
	}
}

func TestUnprepare(t *testing.T) {
	p := newPlugin(t, Config{})
	req := p.request("v1", "p1", multiWriter)
	p.prepareOK(req)
	p.failed(p.unprepare("", "p1", "/p"), codes.InvalidArgument, "volume_id")
	p.failed(p.unprepare("v1", "", "/p"), codes.InvalidArgument, "prepare_id")
	p.failed(p.unprepare("v1", "p1", ""), codes.InvalidArgument, "prepare_path")
	p.failed(p.unprepare("v1", "p1", req.PreparePath+"x"), codes.InvalidArgument, "prepare_path", "NodeListPreparedVolumes")
	for _, pair := range [][2]string{{"v1", "unknown"}, {"unknown", "p1"}, {"../../etc", "p1"}, {strings.Repeat("v", 128), "p1"}} {
		if err := p.unprepare(pair[0], pair[1], req.PreparePath); err != nil {
			t.Errorf("unknown %q: %v", pair, err)
		}
	}
	p.lists("v1/p1")
	for range 3 {
		p.unprepareOK(req)
		p.lists()
	}
}

func TestListIsAsRequested(t *testing.T) {
	p := newPlugin(t, Config{})
	var want []*prepare.NodeListPreparedVolumesResponse_Entry
	for i, id := range []string{"p1", "p2", "p3"} {
		req := p.request("v1", id, multiWriter)
		req.Readonly = i == 1
		if i == 2 {
			req.StagingTargetPath = "/stage/v1"
		}
		p.prepareOK(req)
		want = append(want, &prepare.NodeListPreparedVolumesResponse_Entry{
			VolumeId: "v1", PrepareId: id, Readonly: req.Readonly, PreparePath: req.PreparePath, StagingTargetPath: req.StagingTargetPath,
		})
	}
	p.start()
	sorted := protocmp.SortRepeated(func(a, b *prepare.NodeListPreparedVolumesResponse_Entry) bool { return a.PrepareId < b.PrepareId })
	got := p.lists("v1/p1", "v1/p2", "v1/p3")
	if diff := cmp.Diff(&prepare.NodeListPreparedVolumesResponse{Entries: want}, &prepare.NodeListPreparedVolumesResponse{Entries: got},
		protocmp.Transform(), sorted); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}

	seen := map[string]int{}
	token := ""
	for range 4 {
		resp, err := p.NodeListPreparedVolumes(t.Context(), &prepare.NodeListPreparedVolumesRequest{MaxEntries: 1, StartingToken: token})
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range resp.Entries {
			seen[e.PrepareId]++
		}
		if token = resp.NextToken; token == "" {
			break
		}
	}
	if diff := cmp.Diff(map[string]int{"p1": 1, "p2": 1, "p3": 1}, seen); diff != "" {
		t.Errorf("over the pages:\n%s", diff)
	}
	_, err := p.NodeListPreparedVolumes(t.Context(), &prepare.NodeListPreparedVolumesRequest{MaxEntries: -1})
	p.failed(err, codes.InvalidArgument, "max_entries")
	_, err = p.NodeListPreparedVolumes(t.Context(), &prepare.NodeListPreparedVolumesRequest{StartingToken: "x"})
	p.failed(err, codes.Aborted, "starting_token")
}

func TestAnotherBootIsVoid(t *testing.T) {
	p := newPlugin(t, Config{MultiWriter: true})
	req := p.request("v1", "p1", singleWriter)
	p.prepareOK(req)
	// Not even a record that cannot be read outlives its boot.
	damaged := filepath.Join(p.dir, "state", "preparations", bootA, Key{"v1", "p9"}.Position()+".json")
	if err := os.WriteFile(damaged, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	p.options.BootID = bootB
	p.start()
	p.lists()
	p.unprepareOK(req)
	p.prepareOK(p.request("v1", "p2", singleWriter))
	p.lists("v1/p2")
	onlyBelow(t, filepath.Join(p.dir, "state"))
}

// A record that cannot be read stops what would have to guess, and ends with
// the Unprepare of its pair.
func TestDamagedPreparation(t *testing.T) {
	p := newPlugin(t, Config{MultiWriter: true})
	req, other := p.request("v1", "p1", multiWriter), p.request("v2", "p1", multiWriter)
	p.prepareOK(req)
	p.prepareOK(other)
	file := filepath.Join(p.dir, "state", "preparations", bootA, Key{"v1", "p1"}.Position()+".json")
	if err := os.Truncate(file, 10); err != nil {
		t.Fatal(err)
	}
	p.start()
	p.prepareFails(req, codes.Internal, file)
	p.prepareFails(p.request("v1", "p2", multiWriter), codes.Internal, file)
	_, err := p.NodeListPreparedVolumes(t.Context(), &prepare.NodeListPreparedVolumesRequest{})
	p.failed(err, codes.Internal, file)
	if _, err := p.Prepared("v1"); err == nil {
		t.Error("Prepared guesses")
	}
	p.prepareOK(other)
	p.unprepareOK(other)
	p.unprepareOK(req)
	p.lists()
	p.prepareOK(req)
}

func TestHundredCallsForOnePair(t *testing.T) {
	p := newPlugin(t, Config{MultiWriter: true})
	req := p.request("v1", "p1", singleWriter)
	var all sync.WaitGroup
	for range 100 {
		all.Go(func() {
			for { // as a CO would
				_, err := p.NodePrepareVolume(t.Context(), req)
				if status.Code(err) == codes.Aborted {
					continue
				}
				if err != nil {
					t.Errorf("got %v", err)
				}
				return
			}
		})
	}
	all.Wait()
	p.lists("v1/p1")
	onlyBelow(t, filepath.Join(p.dir, "state"))
}

// Prepare and Unprepare of one pair at the same time end as one or the other
// order would have.
func TestPrepareAgainstUnprepare(t *testing.T) {
	p := newPlugin(t, Config{MultiWriter: true})
	req := p.request("v1", "p1", singleWriter)
	for range 50 {
		var all sync.WaitGroup
		for range 4 {
			all.Go(func() {
				if _, err := p.NodePrepareVolume(t.Context(), req); err != nil && status.Code(err) != codes.Aborted {
					t.Errorf("prepare: %v", err)
				}
			})
			all.Go(func() {
				if err := p.unprepare("v1", "p1", req.PreparePath); err != nil && status.Code(err) != codes.Aborted {
					t.Errorf("unprepare: %v", err)
				}
			})
		}
		all.Wait()
	}
	p.unprepareOK(req)
	p.lists()
}

func TestCancelledPrepareCanBeRepeated(t *testing.T) {
	p := newPlugin(t, Config{MultiWriter: true})
	req := p.request("v1", "p1", singleWriter)
	ctx, cancel := context.WithCancel(t.Context())
	entered, leave := make(chan struct{}), make(chan struct{})
	p.driver.inside = func() { close(entered); <-leave }
	go func() { <-entered; cancel() }()
	_, err := p.NodePrepareVolume(ctx, req)
	p.failed(err, codes.Canceled)
	p.lists("v1/p1?") // while the driver is still at it
	p.prepareFails(req, codes.Aborted)
	if there, err := p.PreparedAt("v1", req.PreparePath); !there || err != nil {
		t.Errorf("PreparedAt: %v, %v", there, err) // and it does not wait
	}
	close(leave)
	p.config.Flights.Wait()
	p.driver.inside = nil
	p.prepareOK(req)
	p.lists("v1/p1")
}

// Nothing of the request that may be sensitive is on disk.
func TestStateHoldsNoSecret(t *testing.T) {
	const canary = "canary-6f1d2c"
	p := newPlugin(t, Config{})
	req := p.request("v1", "p1", multiWriter)
	req.Secrets = map[string]string{"password": canary}
	req.PublishContext = map[string]string{"lun": canary}
	req.VolumeContext = map[string]string{"token": canary}
	req.VolumeCapability.GetMount().MountFlags = []string{"password=" + canary}
	p.prepareOK(req)
	files, err := filepath.Glob(filepath.Join(p.dir, "state", "preparations", bootA, "*"))
	if err != nil || len(files) != 1 {
		t.Fatalf("%q, %v", files, err)
	}
	text, err := os.ReadFile(files[0])
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(text), canary) {
		t.Errorf("on disk:\n%s", text)
	}
}
