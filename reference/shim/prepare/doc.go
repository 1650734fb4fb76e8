// Package prepare serves NodePrepare for a plugin of today, which mounts by
// itself and knows nothing of mount specs. It has the plugin publish into
// prepare_path, looks at what is mounted there, and answers with that: a
// BLOCK_DEVICE for a block volume; for any other a HANDLE of the mount where the
// CO can take one, else a BIND. All other calls go on to the plugin.
//
// # Propagation
//
// The plugin mounts in its own mount namespace, and the mount has to reach the
// process of this package, which runs best in the same one. A BIND has to reach
// the CO's besides; for a HANDLE that is not needed, since the mount itself is
// sent. Where the plugin says OK and nothing arrives, the call is
// FAILED_PRECONDITION and the message says in which namespace the mount is.
//
// # What the plugin is held to
//
// Repeats are forwarded, each of them: so a plugin gets the new tokens of a
// refresh. Idempotency, exclusive access modes, and the record of what is
// prepared are kept here, since plugins differ in them. A mount flag that is an
// attribute of a mount is made one of the mount spec, whether the plugin heeds
// it or not; one that the plugin cannot have heeded is INVALID_ARGUMENT.
package prepare
