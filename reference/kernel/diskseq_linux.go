package kernel

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// Diskseq returns the sequence number of the block device open at fd. Each disk
// that appears, and each file attached to a loop device, gets the next one, so
// that unlike the device number it names one disk until the next boot.
// BLKGETDISKSEQ; Linux 5.15, ENOTTY before.
func Diskseq(fd int) (uint64, error) {
	var seq uint64
	_, errno := nsIoctl(fd, unix.BLKGETDISKSEQ, unsafe.Pointer(&seq))
	return seq, callError("ioctl BLKGETDISKSEQ", errno)
}
