package nfs

import (
	"context"
	"net/netip"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	prepare "github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
)

func withMountFlags(flags ...string) *csi.VolumeCapability {
	return &csi.VolumeCapability{
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER},
		AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{MountFlags: flags}},
	}
}

func joined(all []*prepare.FsParameter) string {
	var words []string
	for _, p := range all {
		w := p.GetKey()
		if p.GetText() != "" {
			w += "=" + p.GetText()
		}
		words = append(words, w)
	}
	return strings.Join(words, ",")
}

// The kernel is told all that it would choose by itself, or ask mount.nfs for.
func TestParameters(t *testing.T) {
	for name, tt := range map[string]struct {
		flags   []string
		given   version
		address string
		want    string
	}{
		"nothing asked": {nil, "", "192.0.2.1", "addr=192.0.2.1,vers=4.2,proto=tcp,hard,sec=sys"},
		"IPv6":          {nil, "", "2001:db8::1", "addr=2001:db8::1,vers=4.2,proto=tcp6,hard,sec=sys"},
		"version 3": {
			[]string{"vers=3"},
			"", "192.0.2.1",
			"addr=192.0.2.1,vers=3,proto=tcp,mountaddr=192.0.2.1,mountproto=tcp,nolock,hard,sec=sys",
		},
		"of the volume":     {nil, "4.1", "192.0.2.1", "addr=192.0.2.1,vers=4.1,proto=tcp,hard,sec=sys"},
		"said twice, alike": {[]string{"nfsvers=4.1"}, "4.1", "192.0.2.1", "addr=192.0.2.1,vers=4.1,proto=tcp,hard,sec=sys"},
		"all sorts": {
			[]string{"soft", "timeo=600", "retrans=3", "nconnect=4", "sec=sys", "proto=tcp", "port=20490"},
			"", "192.0.2.1",
			"addr=192.0.2.1,vers=4.2,proto=tcp,nconnect=4,port=20490,retrans=3,sec=sys,soft,timeo=600",
		},
		"of the mount": {[]string{"ro", "noatime"}, "", "192.0.2.1", "addr=192.0.2.1,vers=4.2,proto=tcp,hard,sec=sys"},
	} {
		t.Run(name, func(t *testing.T) {
			o, err := parseOptions("volume_capability", withMountFlags(tt.flags...), false, tt.given)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tt.want, joined(o.parameters(netip.MustParseAddr(tt.address)))); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// What the kernel does not take, or takes for something else, is refused by
// name, and a value is never shown.
func TestRefusedMountFlags(t *testing.T) {
	for _, tt := range []struct{ flag, want string }{
		{"bg", `"bg" asks mount.nfs`},
		{"retry=3", `"retry=" asks mount.nfs`},
		{"_netdev", `"_netdev" is for mount.nfs or mount(8)`},
		{"nofail", "mount(8)"},
		{"sloppy", "mount.nfs"},
		{"addr=192.0.2.66", `"addr=" is set by the plugin`},
		{"mountaddr=192.0.2.66", "set by the plugin"},
		{"clientaddr=192.0.2.66", "set by the plugin"},
		{"lock", "rpc.statd"},
		{"fsc", "cachefilesd"},
		{"context=secret", "security label"},
		{"remount", "another operation"},
		{"rshared", "propagation"},
		{"vers=4", "3, 4.0, 4.1 or 4.2"},
		{"vers=2", "3, 4.0, 4.1 or 4.2"},
		{"nfsvers=5", "3, 4.0, 4.1 or 4.2"},
		{"v4.1", "lets the kernel choose"},
		{"minorversion=1", "lets the kernel choose"},
		{"sec=krb5", "needs one of sys"},
		{"proto=rdma", "tcp, tcp6"},
		{"timeo=0", "from 1 to 65535"},
		{"timeo=1s", "from 1 to 65535"},
		{"timeo=+60", "from 1 to 65535"},
		{"nconnect=17", "from 1 to 16"},
		{"hard=1", "takes no value"},
		{"timeo=600,ro", "after which another option could follow"},
		{"lookupcache=none,addr=192.0.2.66", "another option"},
		{"x-systemd.automount", "comment"},
		{"dev", "cannot be honoured"},
		{"user=root", "mount.nfs"},
	} {
		t.Run(tt.flag, func(t *testing.T) {
			_, err := parseOptions("volume_capability", withMountFlags(tt.flag), false, "")
			if status.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), tt.want) {
				t.Fatalf("got %v, want INVALID_ARGUMENT with %q", err, tt.want)
			}
			if !strings.Contains(err.Error(), "mount_flags") {
				t.Errorf("%v names no field", err)
			}
			if _, value, ok := strings.Cut(tt.flag, "="); ok && len(value) > 8 && strings.Contains(err.Error(), value) {
				t.Errorf("%v shows the value", err)
			}
		})
	}
}

func TestContradictingMountFlags(t *testing.T) {
	for _, flags := range [][]string{
		{"hard", "soft"},
		{"timeo=1", "timeo=2"},
		{"vers=3", "vers=4.2"},
		{"ac", "noac"},
		{"vers=4.2", "nolock"},
		{"vers=4.2", "mountport=20048"},
		{"actimeo=1", "acregmin=1"},
	} {
		if _, err := parseOptions("volume_capability", withMountFlags(flags...), false, ""); status.Code(err) != codes.InvalidArgument {
			t.Errorf("%v: got %v, want INVALID_ARGUMENT", flags, err)
		}
	}
	if _, err := parseOptions("volume_capability", withMountFlags("vers=3"), false, "4.2"); status.Code(err) != codes.InvalidArgument {
		t.Errorf("another version than the volume's: got %v, want INVALID_ARGUMENT", err)
	}
}

// A mount flag is one option, however it is spelled, or refused.
func FuzzMountFlags(f *testing.F) {
	for _, flag := range []string{"vers=3", "timeo=600,ro", "soft", "x-y", "=", ",", "proto=tcp6", "context=a"} {
		f.Add(flag)
	}
	f.Fuzz(func(t *testing.T, flag string) {
		o, err := parseOptions("volume_capability", withMountFlags(flag), false, "")
		if err != nil {
			return
		}
		for _, text := range []string{joined(o.parameters(netip.MustParseAddr("192.0.2.1"))), o.helperText()} {
			keys := map[string]bool{}
			for word := range strings.SplitSeq(text, ",") {
				key, _, _ := strings.Cut(word, "=")
				if keys[key] {
					t.Errorf("%q gives %q, with %s twice", flag, text, key)
				}
				if _, no := refused[key]; no && key != "addr" && key != "mountaddr" && key != "mountproto" {
					t.Errorf("%q gives %q, with a refused word", flag, text)
				}
				keys[key] = true
			}
		}
	})
}

func TestParseExport(t *testing.T) {
	for text, want := range map[string]Export{
		"server:/srv/volumes":     {"server", "/srv/volumes"},
		"nfs.example.org:/":       {"nfs.example.org", "/"},
		"192.0.2.1:/e":            {"192.0.2.1", "/e"},
		"[2001:db8::1]:/e":        {"2001:db8::1", "/e"},
		"server:/a:/b":            {"server", "/a:/b"},
		"server:/with-ümlaut/dir": {"server", "/with-ümlaut/dir"},
	} {
		got, err := ParseExport(text)
		if err != nil || got != want {
			t.Errorf("%s is %+v, %v; want %+v", text, got, err, want)
		}
		if got.source("") != text {
			t.Errorf("the source of %s is %s", text, got.source(""))
		}
	}
	for _, text := range []string{
		"", "server", "/srv", "server:srv", ":/srv", "a b:/srv", "server:/a,b", "server:/a/../b", "server:/a/",
		"server:/a b", `server:/a\b`, "server:/a\nb", "-o:/srv", "2001:db8::1:/e,ro", "[192.0.2.1]:/e", "[2001:db8::1:/e",
		"server,addr=192.0.2.66:/srv",
	} {
		if e, err := ParseExport(text); err == nil {
			t.Errorf("%q is taken for %+v", text, e)
		}
	}
}

func TestSubdirectoryStaysInTheExport(t *testing.T) {
	for dir, ok := range map[string]bool{
		"team": true, "team/a": true, "a..b": true, "...": true,
		"..": false, "../other": false, "team/../..": false, "/etc": false, "team/": false, "./team": false, "team//a": false,
		"team,ro": false, "team a": false, `team\a`: false, "a\x00b": false, strings.Repeat("x", maxSubdirectory+1): false,
	} {
		if err := checkSubdirectory(dir); (err == nil) != ok {
			t.Errorf("%q: %v", dir, err)
		}
	}
}

// The server's name is asked for at each call: what it was before is forgotten.
func TestResolve(t *testing.T) {
	v4, v6 := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1")
	mapped := netip.MustParseAddr("::ffff:192.0.2.1")
	for name, tt := range map[string]struct {
		flags []string
		found []netip.Addr
		want  netip.Addr
		code  codes.Code
	}{
		"one":             {nil, []netip.Addr{v4}, v4, codes.OK},
		"mapped":          {nil, []netip.Addr{mapped}, v4, codes.OK},
		"of a family":     {[]string{"proto=tcp6"}, []netip.Addr{v4, v6}, v6, codes.OK},
		"none of that":    {[]string{"proto=tcp6"}, []netip.Addr{v4}, v6, codes.Unavailable},
		"the same, twice": {nil, []netip.Addr{v4, mapped}, v4, codes.OK},
		"none":            {nil, nil, v4, codes.Unavailable},
	} {
		t.Run(name, func(t *testing.T) {
			d := &Driver{config: Config{Export: Export{"server", "/e"}, Lookup: func(context.Context, string, string) ([]netip.Addr, error) {
				return tt.found, nil
			}}}
			o, err := parseOptions("volume_capability", withMountFlags(tt.flags...), false, "")
			if err != nil {
				t.Fatal(err)
			}
			got, err := d.resolve(t.Context(), o)
			if status.Code(err) != tt.code || err == nil && got != tt.want {
				t.Errorf("got %v, %v; want %v, %v", got, err, tt.want, tt.code)
			}
		})
	}
}
