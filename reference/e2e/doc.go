// Package e2e is tests alone: mount specs given to real container runtimes, in
// the three ways a CO has. In the configuration, where the runtime makes the
// mounts; into the mount namespace of a container that runs; and performed in
// a place of the CO's own, which the runtime binds. What a container then sees
// is read in the container.
//
// The tests need root and the runtimes (Debian: runc, crun, containerd,
// busybox-static). What a machine lacks is reported as could-not-run, with the
// reason. With E2E_REPORT set to a file, the outcomes are written there.
package e2e
