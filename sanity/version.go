package sanity

import "runtime/debug"

// Version returns the version of the suite: that of its module, with the
// commit where it was built in a checkout.
func Version() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "unknown"
	}
	const module = "github.com/csi-prepare/csi-prepare"
	version := info.Main.Version
	if info.Main.Path != module {
		for _, d := range info.Deps {
			if d.Path == module {
				version = d.Version
			}
		}
	}
	return orElse(version, "(devel)")
}
