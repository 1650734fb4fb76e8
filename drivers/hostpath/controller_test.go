package hostpath

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/testing/protocmp"

	"github.com/csi-prepare/csi-prepare/drivers/directory"
)

func TestCreateVolumeRules(t *testing.T) {
	s := newSite(t)
	s.start()
	type edit func(*csi.CreateVolumeRequest)
	caps := func(c ...*csi.VolumeCapability) edit {
		return func(r *csi.CreateVolumeRequest) { r.VolumeCapabilities = c }
	}
	mount := func(set func(*csi.VolumeCapability_MountVolume)) edit {
		c := capability(multiWriter)
		set(c.GetMount())
		return caps(c)
	}
	bytes := func(required, limit int64) edit {
		return func(r *csi.CreateVolumeRequest) {
			r.CapacityRange = &csi.CapacityRange{RequiredBytes: required, LimitBytes: limit}
		}
	}
	topology := func(node string) edit {
		return func(r *csi.CreateVolumeRequest) {
			r.AccessibilityRequirements = &csi.TopologyRequirement{Requisite: []*csi.Topology{{Segments: map[string]string{TopologyKey: node}}}}
		}
	}
	tests := []struct {
		name  string
		edit  edit
		want  codes.Code
		words []string
	}{
		{"plain", func(*csi.CreateVolumeRequest) {}, codes.OK, nil},
		{"no name", func(r *csi.CreateVolumeRequest) { r.Name = "" }, codes.InvalidArgument, []string{"name:"}},
		{"name too long", func(r *csi.CreateVolumeRequest) { r.Name = strings.Repeat("n", 129) }, codes.InvalidArgument, []string{"name:", "129"}},
		{"control character", func(r *csi.CreateVolumeRequest) { r.Name = "a\x00b" }, codes.InvalidArgument, []string{"name:"}},
		{"name of a path", func(r *csi.CreateVolumeRequest) { r.Name = "../../../etc" }, codes.OK, nil},
		{"name of another script", func(r *csi.CreateVolumeRequest) { r.Name = "Übervolume 💾 \t" }, codes.OK, nil},
		{"no capabilities", caps(), codes.InvalidArgument, []string{"volume_capabilities:"}},
		{"second capability unset", caps(capability(multiWriter), nil), codes.InvalidArgument, []string{"volume_capabilities[1]"}},
		{"block", caps(block(multiWriter)), codes.InvalidArgument, []string{"access_type", "block"}},
		{"multi-node", caps(capability(manyWriters)), codes.InvalidArgument, []string{"access_mode", "MULTI_NODE_MULTI_WRITER"}},
		{"fs type", mount(func(m *csi.VolumeCapability_MountVolume) { m.FsType = "ext4" }), codes.InvalidArgument, []string{"fs_type"}},
		{"mount flag", mount(func(m *csi.VolumeCapability_MountVolume) { m.MountFlags = []string{"size=UNSHOWN"} }), codes.InvalidArgument, []string{"mount_flags", `"size="`}},
		{"mount group", mount(func(m *csi.VolumeCapability_MountVolume) { m.VolumeMountGroup = "1000" }), codes.InvalidArgument, []string{"volume_mount_group"}},
		{"unknown parameter", func(r *csi.CreateVolumeRequest) { r.Parameters = map[string]string{"color": "UNSHOWN"} }, codes.InvalidArgument, []string{`parameters["color"]`}},
		{"unknown grant", func(r *csi.CreateVolumeRequest) { r.Parameters = map[string]string{"grant": "UNSHOWN"} }, codes.InvalidArgument, []string{`parameters["grant"]`}},
		{"grant", func(r *csi.CreateVolumeRequest) { r.Parameters = map[string]string{"grant": "data"} }, codes.OK, nil},
		{"mutable parameter", func(r *csi.CreateVolumeRequest) { r.MutableParameters = map[string]string{"a": "b"} }, codes.InvalidArgument, []string{"mutable_parameters"}},
		{"source", func(r *csi.CreateVolumeRequest) { r.VolumeContentSource = &csi.VolumeContentSource{} }, codes.InvalidArgument, []string{"volume_content_source"}},
		{"required bytes", bytes(1, 0), codes.OutOfRange, []string{"capacity_range"}},
		{"limit bytes", bytes(0, 1<<40), codes.OutOfRange, []string{"capacity_range"}},
		{"empty range", bytes(0, 0), codes.OK, nil},
		{"negative required bytes", bytes(-1, 0), codes.InvalidArgument, []string{"required_bytes"}},
		{"negative limit bytes", bytes(0, -1), codes.InvalidArgument, []string{"limit_bytes"}},
		{"contradiction", bytes(2, 1), codes.InvalidArgument, []string{"capacity_range"}},
		{"this node", topology("node1"), codes.OK, nil},
		{"another node", topology("node2"), codes.ResourceExhausted, []string{"accessibility_requirements"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			req := createRequest("volume of " + tt.name)
			tt.edit(req)
			resp, err := s.controller.CreateVolume(t.Context(), req)
			s.code(tt.name, err, tt.want, tt.words...)
			if err != nil {
				if strings.Contains(err.Error(), "UNSHOWN") {
					t.Errorf("the message holds a value: %v", err)
				}
				return
			}
			id := resp.GetVolume().GetVolumeId()
			want := &csi.Volume{VolumeId: id, AccessibleTopology: []*csi.Topology{{Segments: map[string]string{TopologyKey: "node1"}}}}
			if diff := cmp.Diff(want, resp.GetVolume(), protocmp.Transform()); diff != "" || len(id) != 32 {
				t.Errorf("volume (-want +got):\n%s", diff)
			}
			info, err := os.Lstat(s.path(id))
			if err != nil || info.Mode() != os.ModeDir|0o777 {
				t.Errorf("its directory: %v, %v", info, err)
			}
			s.code("delete", s.delete(id), codes.OK)
			if exists(s.path(id)) {
				t.Error("its directory is left")
			}
		})
	}
	if left, err := filepath.Glob(s.path("*")); err != nil || len(left) > 0 {
		t.Errorf("left: %q, %v", left, err)
	}
	if info, err := os.Stat(filepath.Dir(s.path("x"))); err != nil || info.Mode().Perm() != 0o700 {
		t.Errorf("the directory of all volumes: %v, %v", info, err)
	}
}

func TestCreateAndDeleteAreIdempotent(t *testing.T) {
	s := newSite(t, Grant{Name: "a", Dir: t.TempDir()}, Grant{Name: "b", Dir: t.TempDir()})
	s.start()
	v := s.create("name")
	if again := s.create("name"); again.GetVolumeId() != v.GetVolumeId() {
		t.Errorf("one name, two volumes: %v, %v", v, again)
	}
	other := createRequest("name")
	other.Parameters = map[string]string{"grant": "b"}
	_, err := s.controller.CreateVolume(t.Context(), other)
	s.code("another grant", err, codes.AlreadyExists, "parameters")
	other = createRequest("name")
	other.CapacityRange = &csi.CapacityRange{RequiredBytes: 1}
	_, err = s.controller.CreateVolume(t.Context(), other)
	s.code("another size", err, codes.AlreadyExists, "capacity_range")

	for range 3 {
		s.code("delete", s.delete(v.GetVolumeId()), codes.OK)
	}
	for _, id := range []string{"unknown", "..", "../../etc", "/", strings.Repeat("v", 128)} {
		s.code("delete "+id, s.delete(id), codes.OK)
	}
	s.code("delete nothing", s.delete(""), codes.InvalidArgument, "volume_id")
	if again := s.create("name"); again.GetVolumeId() == v.GetVolumeId() {
		t.Error("the id of a deleted volume was given again")
	}
}

func TestConcurrentCreateMakesOneVolume(t *testing.T) {
	s := newSite(t)
	s.start()
	var (
		all sync.WaitGroup
		mu  sync.Mutex
		ids = map[string]bool{}
	)
	for range 50 {
		all.Go(func() {
			for {
				resp, err := s.controller.CreateVolume(t.Context(), createRequest("name"))
				if status.Code(err) == codes.Aborted {
					continue
				}
				if err != nil {
					t.Errorf("got %v", err)
					return
				}
				mu.Lock()
				defer mu.Unlock()
				ids[resp.GetVolume().GetVolumeId()] = true
				return
			}
		})
	}
	all.Wait()
	if found, err := filepath.Glob(s.path("*")); len(ids) != 1 || len(found) != 1 {
		t.Errorf("ids %v, directories %q, %v", ids, found, err)
	}
}

func TestListVolumes(t *testing.T) {
	s := newSite(t)
	s.start()
	want := map[string]int{}
	for i := range 7 {
		want[s.create(fmt.Sprint("v", i)).GetVolumeId()] = 1
	}
	got := map[string]int{}
	token := ""
	for {
		resp, err := s.controller.ListVolumes(t.Context(), &csi.ListVolumesRequest{MaxEntries: 3, StartingToken: token})
		if err != nil || len(resp.GetEntries()) > 3 {
			t.Fatalf("%v, %v", resp, err)
		}
		for _, e := range resp.GetEntries() {
			got[e.GetVolume().GetVolumeId()]++
		}
		if token = resp.GetNextToken(); token == "" {
			break
		}
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("over the pages (-want +got):\n%s", diff)
	}
	_, err := s.controller.ListVolumes(t.Context(), &csi.ListVolumesRequest{StartingToken: "x"})
	s.code("bad token", err, codes.Aborted)
	_, err = s.controller.ListVolumes(t.Context(), &csi.ListVolumesRequest{MaxEntries: -1})
	s.code("negative", err, codes.InvalidArgument, "max_entries")
}

func TestValidateVolumeCapabilities(t *testing.T) {
	s := newSite(t)
	s.start()
	id := s.create("v").GetVolumeId()
	for _, tt := range []struct {
		name string
		caps []*csi.VolumeCapability
		word string // of the message; "" if confirmed
	}{
		{"all modes", []*csi.VolumeCapability{capability(multiWriter), capability(singleWriter), capability(oldReader)}, ""},
		{"block", []*csi.VolumeCapability{block(multiWriter)}, "block"},
		{"one of two", []*csi.VolumeCapability{capability(multiWriter), capability(manyWriters)}, "volume_capabilities[1]"},
		{"a flag", []*csi.VolumeCapability{capability(multiWriter, "data=journal")}, `"data="`},
	} {
		resp, err := s.controller.ValidateVolumeCapabilities(t.Context(), &csi.ValidateVolumeCapabilitiesRequest{VolumeId: id, VolumeCapabilities: tt.caps})
		if err != nil {
			t.Errorf("%s: %v", tt.name, err)
			continue
		}
		if confirmed := resp.GetConfirmed() != nil; confirmed != (tt.word == "") || !strings.Contains(resp.GetMessage(), tt.word) {
			t.Errorf("%s: %v", tt.name, resp)
		}
	}
	_, err := s.controller.ValidateVolumeCapabilities(t.Context(), &csi.ValidateVolumeCapabilitiesRequest{VolumeId: id})
	s.code("none", err, codes.InvalidArgument, "volume_capabilities")
	_, err = s.controller.ValidateVolumeCapabilities(t.Context(), &csi.ValidateVolumeCapabilitiesRequest{VolumeId: "x", VolumeCapabilities: []*csi.VolumeCapability{capability(multiWriter)}})
	s.code("unknown", err, codes.NotFound, "volume_id")
}

func TestDeleteWhilePrepared(t *testing.T) {
	s := newSite(t)
	s.start()
	id := s.create("v").GetVolumeId()
	req := s.request(id, "p1")
	s.prepare(req)
	file := filepath.Join(s.path(id), "data")
	if err := os.WriteFile(file, []byte("kept"), 0o600); err != nil {
		t.Fatal(err)
	}
	s.code("delete", s.delete(id), codes.FailedPrecondition, "NodeUnprepareVolume")
	s.code("unprepare", s.unprepare(req), codes.OK)
	if text, err := os.ReadFile(file); string(text) != "kept" {
		t.Errorf("data after Unprepare: %q, %v", text, err)
	}
	s.code("delete", s.delete(id), codes.OK)
	if exists(s.path(id)) {
		t.Error("its directory is left")
	}
}

// A size is kept by a filesystem of the volume's own, or refused.
func TestSizedGrants(t *testing.T) {
	if !inOwnNamespace(t) {
		return
	}
	const size = 4 << 20
	grants := []Grant{{Name: "plain", Dir: t.TempDir()}}
	for i, n := range []int{size, 2 * size} {
		dir := t.TempDir()
		if err := unix.Mount("none", dir, "tmpfs", 0, fmt.Sprint("size=", n)); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { unix.Unmount(dir, 0) })
		grants = append(grants, Grant{Name: fmt.Sprint("sized", i), Dir: dir, Sized: true})
	}
	s := newSite(t, grants...)
	stop := s.start()
	create := func(name string, required, limit int64) (*csi.Volume, error) {
		req := createRequest(name)
		req.CapacityRange = &csi.CapacityRange{RequiredBytes: required, LimitBytes: limit}
		resp, err := s.controller.CreateVolume(t.Context(), req)
		return resp.GetVolume(), err
	}
	largest := func(want int64) {
		t.Helper()
		resp, err := s.controller.GetCapacity(t.Context(), &csi.GetCapacityRequest{})
		if err != nil || resp.GetMaximumVolumeSize().GetValue() != want || resp.GetAvailableCapacity() <= 0 {
			t.Errorf("GetCapacity: %v, %v; want a largest size of %d", resp, err, want)
		}
	}
	largest(2 * size)
	_, err := create("between", size+1, 2*size-1)
	s.code("no filesystem of that size", err, codes.OutOfRange, "capacity_range")
	v, err := create("fits", 1, size)
	s.code("smallest that fits", err, codes.OK)
	if v.GetCapacityBytes() != size {
		t.Errorf("capacity %d, want %d", v.GetCapacityBytes(), size)
	}
	_, err = create("exact", size, size)
	s.code("the one that fits is in use", err, codes.ResourceExhausted)
	_, err = create("fits", size, 0)
	s.code("a repeat that is satisfied", err, codes.OK)
	_, err = create("fits", 2*size, 2*size)
	s.code("a repeat with another size", err, codes.AlreadyExists, "capacity_range")
	unsized := s.create("unsized")
	if unsized.GetCapacityBytes() != 0 || !exists(filepath.Join(grants[0].Dir, directory.VolumesDir, unsized.GetVolumeId())) {
		t.Errorf("without a range: %v", unsized)
	}

	// The size holds: the filesystem ends where the volume does.
	path := filepath.Join(grants[1].Dir, directory.VolumesDir, v.GetVolumeId())
	if err := os.WriteFile(filepath.Join(path, "full"), make([]byte, size), 0o600); err != nil {
		t.Errorf("the volume takes less than it was created with: %v", err)
	}
	if err := os.WriteFile(filepath.Join(path, "more"), make([]byte, 8192), 0o600); err == nil {
		t.Error("the volume takes more than its limit")
	}

	stop()
	s.start() // who holds what is known from the records
	_, err = create("exact", size, size)
	s.code("after a restart", err, codes.ResourceExhausted)
	s.code("delete", s.delete(v.GetVolumeId()), codes.OK)
	v, err = create("exact", size, size)
	s.code("free again", err, codes.OK)
	largest(2 * size)

	if err := unix.Unmount(grants[2].Dir, 0); err != nil {
		t.Fatal(err)
	}
	_, err = create("nothing mounted", 2*size, 2*size)
	s.code("nothing mounted", err, codes.Internal, "not the root of a mounted filesystem")
	s.code("delete", s.delete(v.GetVolumeId()), codes.OK)
}

func TestGrantsAreChecked(t *testing.T) {
	dir := t.TempDir()
	link := filepath.Join(dir, "link")
	if err := os.Symlink("/", link); err != nil {
		t.Fatal(err)
	}
	below := filepath.Join(dir, "below")
	if err := os.Mkdir(below, 0o700); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name   string
		grants []Grant
		word   string // of the error; "" if fine
	}{
		{"one", []Grant{{Name: "a-0", Dir: dir}}, ""},
		{"none", nil, "at least one"},
		{"no name", []Grant{{Dir: dir}}, "1 to 63 bytes"},
		{"name", []Grant{{Name: "A", Dir: dir}}, "[a-z0-9-]"},
		{"long name", []Grant{{Name: strings.Repeat("a", 64), Dir: dir}}, "1 to 63 bytes"},
		{"relative", []Grant{{Name: "a", Dir: "data"}}, "absolute"},
		{"unclean", []Grant{{Name: "a", Dir: dir + "/../x"}}, "absolute"},
		{"missing", []Grant{{Name: "a", Dir: dir + "/missing"}}, "no such file"},
		{"link", []Grant{{Name: "a", Dir: link}}, "not a directory"},
		{"name twice", []Grant{{Name: "a", Dir: dir}, {Name: "a", Dir: "/"}}, "twice"},
		{"one in the other", []Grant{{Name: "a", Dir: dir}, {Name: "b", Dir: below}}, "lies in the other"},
		{"the other in one", []Grant{{Name: "a", Dir: below}, {Name: "b", Dir: dir}}, "lies in the other"},
		{"sized, not a mount", []Grant{{Name: "a", Dir: below, Sized: true}}, "not the root of a mounted filesystem"},
	} {
		c := Config{Endpoint: "unix:///x/csi.sock", StateDir: "/x", NodeID: "n", Grants: tt.grants}
		err := c.Check()
		if (err == nil) != (tt.word == "") || err != nil && !strings.Contains(err.Error(), tt.word) {
			t.Errorf("%s: %v", tt.name, err)
		}
	}
	for _, text := range []string{"", "a", "=/x", "a=", "a=x"} {
		if g, err := ParseGrant(text, false); err == nil {
			t.Errorf("%q is %v", text, g)
		}
	}
}
