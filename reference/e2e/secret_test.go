package e2e

import (
	"bytes"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"github.com/csi-prepare/csi-prepare/reference/mountspec"
	"github.com/csi-prepare/csi-prepare/reference/mountspec/oci"
)

// TestASecretStaysOffTheDisk has a parameter that is a secret: it is refused
// for a configuration, which is a file, and performed by the CO instead.
func TestASecretStaysOffTheDisk(t *testing.T) {
	onEach(t, "private", "secret", func(n *node, e *engine, o *outcome) {
		const secret = "1234567"
		v := n.ext4()
		k := v.specs[0].Kind.(*mountspec.Filesystem)
		k.Parameters = []mountspec.Parameter{{Key: "commit", Secret: mountspec.NewSecret(secret)}}
		options := oci.Options{Destination: place, NodeNetwork: true, Features: e.features()}
		_, err := oci.Convert(v.specs, []mountspec.Place{{Found: v.found}}, options)
		o.refused(n.T, err)
		o.Note = "in the configuration " + o.Note
		if bytes.Contains([]byte(err.Error()), []byte(secret)) {
			n.Errorf("the error tells the secret: %v", err)
		}
		entries, err := oci.Convert(v.specs, []mountspec.Place{n.place(v)}, options)
		must(n.T, err)
		b := newBundle(n.T, "cat /data/word")
		b.add(entries)
		out, err := e.run(n.T, b)
		must(n.T, err)
		if out != v.word {
			n.Errorf("the volume has %q, want %q", out, v.word)
		}
		for _, dir := range []string{b.dir, filepath.Join(base, "state-"+e.name), filepath.Join(base, "cd")} {
			_ = filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
				if err == nil && d.Type().IsRegular() && filepath.Base(path) != "busybox" {
					if text, _ := os.ReadFile(path); bytes.Contains(text, []byte(secret)) {
						n.Errorf("%s has the secret", path)
					}
				}
				return nil // what cannot be read is no file
			})
		}
	})
}
