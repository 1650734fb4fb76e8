// Package crash kills a CO, and apart from it its plugins, with SIGKILL: at
// every boundary between two steps, and at random moments. After each kill it
// compares what there is with what there should be: mounts with the ledger and
// the plugins' preparations, loop devices and directories with the mounts, the
// order of the calls with the contract, and data with what was written.
//
// A campaign is several processes of one program. The CO is one; it acts for
// consumers that come and go, and for one of each volume that stays. The latter
// is written to all the time by another process, which must never notice a
// kill. The plugins are the reference drivers; between CO and plugin is a proxy,
// which sees every call. All of it is in a mount namespace of its own and in one
// directory.
package crash
