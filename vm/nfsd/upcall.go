package nfsd

import (
	"bytes"
	"encoding/hex"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Flags of an export, from the kernel's include/uapi/linux/nfsd/export.h.
const (
	exportReadonly       = 0x0001
	exportInsecurePort   = 0x0002
	exportNoSubtreeCheck = 0x0400
	exportFSID           = 0x2000
	exportCrossMount     = 0x4000
	exportV4Root         = 0x10000
)

// domain is the one that every client belongs to.
const domain = "*"

// forever is the time until which an answer holds.
func forever() string { return strconv.FormatInt(time.Now().Add(24*time.Hour).Unix(), 10) }

// answerUpcalls answers what the kernel asks on a channel of
// /proc/net/rpc, one line at a time (Documentation/filesystems/nfs/rpc-cache).
func answerUpcalls(channel int, answer func(words []string) string) {
	answerQuestions(channel, 32<<10, func(text []byte) {
		for line := range bytes.Lines(text) {
			words := strings.Fields(string(line))
			for i, w := range words {
				words[i] = unquote(w)
			}
			a := answer(words)
			if _, err := unix.Write(channel, []byte(a+"\n")); err != nil {
				fmt.Fprintf(os.Stderr, "nfs server: the kernel refuses the answer %q to %q: %v\n", a, line, err)
			}
		}
	})
}

// answerQuestions has answer called with each question the kernel asks by a
// file that has nothing to be read, instead of blocking, while there is none.
func answerQuestions(fd, size int, answer func([]byte)) {
	buf := make([]byte, size)
	for {
		if _, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, -1); err != nil && err != unix.EINTR {
			return
		}
		n, err := unix.Read(fd, buf)
		switch {
		case err == nil && n > 0:
			answer(buf[:n])
		case err != nil && err != unix.EINTR && err != unix.EAGAIN:
			return
		}
	}
}

// unquote undoes the kernel's qword_add and qword_addhex: \ooo, and \xHEX for
// the whole word, which is left as it is.
func unquote(w string) string {
	if strings.HasPrefix(w, `\x`) {
		return w
	}
	var b strings.Builder
	for i := 0; i < len(w); i++ {
		if w[i] == '\\' && i+3 < len(w) {
			if v, err := strconv.ParseUint(w[i+1:i+4], 8, 8); err == nil {
				b.WriteByte(byte(v))
				i += 3
				continue
			}
		}
		b.WriteByte(w[i])
	}
	return b.String()
}

func quote(w string) string {
	var b strings.Builder
	for i := range len(w) {
		if c := w[i]; c <= ' ' || c == '\\' || c >= 0x7f {
			fmt.Fprintf(&b, `\%03o`, c)
		} else {
			b.WriteByte(c)
		}
	}
	return b.String()
}

// clientOf answers auth.unix.ip: "nfsd ADDRESS".
func clientOf(words []string) string {
	if len(words) != 2 {
		return ""
	}
	return strings.Join([]string{words[0], words[1], forever(), domain}, " ")
}

// export is what the kernel gets to know of a path.
type export struct {
	path  string
	fsid  uint32
	flags int
}

// exportOf answers nfsd.export: "DOMAIN PATH".
func (s *Server) exportOf(words []string) string {
	if len(words) != 2 {
		return ""
	}
	answer := strings.Join([]string{quote(words[0]), quote(words[1]), forever()}, " ")
	if e, ok := s.exportAt(words[1]); ok {
		const anonymous = 65534
		answer += fmt.Sprintf(" %d %d %d %d", e.flags, anonymous, anonymous, e.fsid)
	}
	return answer
}

// pathOf answers nfsd.fh: "DOMAIN TYPE \xFSID".
func (s *Server) pathOf(words []string) string {
	if len(words) != 3 {
		return ""
	}
	answer := strings.Join([]string{quote(words[0]), words[1], words[2], forever()}, " ")
	raw, err := hex.DecodeString(strings.TrimPrefix(words[2], `\x`))
	const byNumber = "1" // FSID_NUM
	if err != nil || words[1] != byNumber || len(raw) != 4 {
		return answer
	}
	fsid := uint32(raw[0]) | uint32(raw[1])<<8 | uint32(raw[2])<<16 | uint32(raw[3])<<24
	if path, ok := s.pathWith(fsid); ok {
		answer += " " + quote(path)
	}
	return answer
}
