package nfsd

import (
	"context"
	"encoding/binary"
	"time"

	"golang.org/x/sys/unix"
)

// cldMessage is struct cld_msg_v2 of the kernel's include/uapi/linux/nfsd/cld.h:
// version u8, command u8, status s16, xid u32, and a union.
const cldMessage = 8 + 1024 + 4 + 32 + 4

const cldGetVersion = 5

// keepClients answers the kernel's questions about the clients it knew before
// it was started, in place of nfsdcld: there are none. Without an answer the
// kernel waits ten seconds at each start.
func keepClients(ctx context.Context, pipe string) {
	fd := -1
	for fd < 0 {
		var err error
		if fd, err = unix.Open(pipe, unix.O_RDWR|unix.O_CLOEXEC, 0); err != nil {
			select {
			case <-ctx.Done():
				return
			case <-time.After(5 * time.Millisecond):
			}
		}
	}
	answerQuestions(fd, cldMessage, func(m []byte) {
		if len(m) <= 8 {
			return
		}
		binary.NativeEndian.PutUint16(m[2:], 0) // status: done
		if m[1] == cldGetVersion {
			m[8] = 1
		}
		_, _ = unix.Write(fd, m)
	})
}
