// Package vm runs programs in a guest with a kernel of its own, from nothing:
// User-Mode Linux, which needs neither KVM nor root. The guest is there for what
// the host's kernel lacks, such as NFS, and for an older kernel.
//
// A guest boots an initramfs with vm/init as its only process, which runs the
// steps of a job and leaves what they wrote on a device. What the guest sees of
// the host it sees read-only.
package vm
