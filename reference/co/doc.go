// Package co is the CO's side of the contract on one node: it stages,
// prepares, performs, undoes, unprepares and unstages volumes for consumers,
// and keeps a ledger of what it does, so that after a crash of whatever part
// everything is either wholly performed or gone.
//
//	c, err := co.Open(ctx, co.Config{Dir: "/var/lib/csi-prepare"})
//	record, err := c.Up(ctx, co.Use{Endpoint: "unix:///run/csi.sock", VolumeID: …})
//	err = c.Down(ctx, record.Key())
//
// A program that uses it calls Child first thing in main: whatever may block
// in the kernel runs in a child process of the program's own, which can be
// killed.
//
// # Rules it keeps
//
// A record is durable before the act it is of, and says which boot it is of
// and whether the outcome of the last call is known. Nothing is concluded from
// what lies in a directory, and a record that cannot be read is reported and
// never taken for none. A plugin's answer is validated as a whole before
// anything is performed, and a refused one is unprepared. What was performed
// is known by unique mount ids; undo is exact, keeps what is busy, and is
// followed by a look at the table. Directories go by one rmdir(2), after every
// mount namespace was searched for mounts below them. Secrets are in memory
// alone: not in the ledger, an error, a log or an argument.
//
// # What it does not do
//
// It performs no extension kind and does not map ids. Where several COs share
// a node, each has a directory of its own.
package co
