// Package publish serves NodePublishVolume and NodeUnpublishVolume, as today's
// COs call them, over a plugin that serves NodePrepare: it prepares, and
// performs at target_path what the plugin answers. All other calls go on to the
// plugin.
//
// A publication is a preparation of package co, with a prepare_id made of its
// target_path. So its record is durable before the kernel is touched, undo is
// exact, a repeated NodePublishVolume repeats NodePrepareVolume and disturbs
// nobody, and after a crash everything is wholly published or gone. A process
// of this package is one CO for its plugin, and needs a directory of its own
// that the plugin sees under the same path.
//
// Staging stays the caller's, at its own path. volume_path in a call for stats
// or expansion is translated, since a plugin that mounts nothing does not know
// a target_path.
package publish
