package mountns

import (
	"strings"
	"testing"
)

func TestDiffShowsWhatWasMounted(t *testing.T) {
	n := namespace(t)
	before := tableOf(t, n)
	point := t.TempDir()
	inside(t, n, func() error { return mountTmpfs(point, "size=1m") })
	changes := Diff(before, tableOf(t, n))
	if len(changes.Added) != 1 || len(changes.Removed)+len(changes.Changed) != 0 {
		t.Fatalf("want one mount added, have:\n%s", changes)
	}
	m := changes.Added[0]
	if m.Point != point || m.FSType != "tmpfs" || m.Propagation != Private {
		t.Errorf("added %+v", m)
	}
	if want := " tmpfs on " + point + " (private)"; !strings.HasSuffix(changes.String(), want) || !strings.HasPrefix(changes.String(), "+ ") {
		t.Errorf("String() = %q, want it to end in %q", changes, want)
	}
	own, err := Own()
	must(t, err)
	defer own.Close()
	if at := tableOf(t, own).At(point); len(at) != 0 {
		t.Errorf("the mount is in the machine's own namespace: %v", at)
	}
}
