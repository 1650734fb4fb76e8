// Package sanity is the conformance suite of csi.prepare.v1alpha1, as a
// library over Ginkgo.
//
// Two lines embed it in the tests of a driver:
//
//	func TestSanity(t *testing.T) {
//		sanity.Run(t, &sanity.Config{Endpoint: "unix:///run/my.sock"})
//	}
//
// and Register adds it to a Ginkgo suite that exists already. With
// Config.Performer set it is the other seat that is tested: whoever performs
// mount specs, over csi.prepare.testing.v1alpha1.
//
// # What a spec is
//
// Each spec names, by Covers and in no other way, the requirements of SPEC.md
// it tests; the names are constants generated from SPEC.md, so that a wrong
// one does not compile. It runs in a mount namespace of its own, on a thread
// of its own, with a deadline on each call. What it makes is taken away after
// it, the last first, however it ended, and the mount tables, the loop devices
// and the suite's directories are compared with what they were before.
//
// # What an outcome means
//
// A spec fails where a requirement does not hold, and says which, with the
// call, what was expected and what was found. What could not be tried is not
// a failure: a spec is unsupported where the plugin does not claim the
// feature, and could-not-run where the environment, or an earlier failure it
// points at, is in the way. A plugin that is gone fails one spec, not all that
// follow.
//
// Linux only. Making mount namespaces takes root (CAP_SYS_ADMIN).
package sanity
