package fuse

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/csi-prepare/csi-prepare/reference/handoff"
)

// act is what a serving process is told to do.
type act string

const (
	// start asks the CO for a mount and serves it.
	start act = "start"
	// resume asks the CO for the device of a mount that a dead process served.
	resume act = "resume"
	// join asks the CO for the mount this process serves already, for another
	// preparation that is to share it.
	join act = "join"
	// deposit gives the CO the device that is being served.
	deposit act = "deposit"
	// report asks which connection is being served.
	report act = "report"
	// end asks whether the mount is gone; the process ends if it is.
	end act = "end"
)

// order is what the process behind the CSI socket tells a serving process. It
// holds the token of the pending call, and so goes over a socket of the two
// alone.
type order struct {
	Act act `json:"act"`

	// Of the pending call.
	Socket  string `json:"socket,omitempty"`
	Token   []byte `json:"token,omitempty"`
	Volume  string `json:"volume,omitempty"`
	Prepare string `json:"prepare,omitempty"`
	Handle  string `json:"handle,omitempty"`

	// What to serve: a directory, or whatever a program makes of a source.
	Data    string            `json:"data,omitempty"`
	Orphans string            `json:"orphans,omitempty"`
	Program Program           `json:"program,omitempty"`
	Source  string            `json:"source,omitempty"`
	Secrets map[string][]byte `json:"secrets,omitempty"`
	UID     uint32            `json:"uid,omitempty"`
	GID     uint32            `json:"gid,omitempty"`
	// Share lets other preparations of the volume have the mount too.
	Share bool `json:"share,omitempty"`
	// Target is where the process mounts by itself, instead of the CO.
	Target string `json:"target,omitempty"`

	// Deadline of the act.
	Deadline time.Time `json:"deadline"`
}

// server names the server that an order is for.
func (o *order) server() string {
	if o.Share {
		return sharedName(o.Volume)
	}
	return nameOf(o.Volume, o.Prepare)
}

// answer is what comes of an order.
type answer struct {
	// Handle is the id for the CO, or in answer to report the connection.
	Handle string `json:"handle,omitempty"`
	// Gone says that the mount is gone and the process is ending.
	Gone bool `json:"gone,omitempty"`
	// Code and Error are the CO's refusal, or Error alone another failure.
	Code  codes.Code `json:"code,omitempty"`
	Error string     `json:"error,omitempty"`
}

// err is what went wrong, nil if nothing did.
func (a answer) err() error {
	switch {
	case a.Error == "":
		return nil
	case a.Code != codes.OK:
		return &handoff.Refusal{Code: a.Code, Message: a.Error}
	}
	return fmt.Errorf("serving process: %s", a.Error)
}

// failure makes an answer of an error.
func failure(err error) answer {
	var refused *handoff.Refusal
	if errors.As(err, &refused) {
		return answer{Code: refused.Code, Error: refused.Message}
	}
	return answer{Error: err.Error()}
}

// maxPacket is the most bytes an order or an answer has.
const maxPacket = 64 << 10

// errGone says that no process serves.
var errGone = errors.New("no process serves the preparation")

// tell sends an order and waits for the answer. A process that ends meanwhile
// is errGone.
func tell(ctx context.Context, path string, o order) (answer, error) {
	var d net.Dialer
	conn, err := d.DialContext(ctx, "unixpacket", path)
	if err != nil {
		if ctx.Err() != nil {
			return answer{}, context.Cause(ctx)
		}
		return answer{}, errGone // nobody listens, or there is no socket
	}
	defer func() { _ = conn.Close() }()
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	o.Deadline, _ = ctx.Deadline()
	text, err := json.Marshal(o)
	if err != nil {
		return answer{}, err
	}
	if len(text) > maxPacket {
		return answer{}, status.Errorf(codes.InvalidArgument, "secrets: are too large for a serving process; all that is to be said to it has at most %d bytes", maxPacket)
	}
	buf := make([]byte, maxPacket)
	n := 0
	if _, err = conn.Write(text); err == nil {
		n, err = conn.Read(buf)
	}
	switch {
	case ctx.Err() != nil:
		return answer{}, context.Cause(ctx)
	case err != nil: // it ended before it answered
		return answer{}, errGone
	}
	var a answer
	if err := json.Unmarshal(buf[:n], &a); err != nil {
		return answer{}, fmt.Errorf("answer of a serving process: %w", err)
	}
	return a, nil
}

// digest makes a file name of foreign text.
func digest(s string) string {
	sum := sha256.Sum256([]byte(s))
	return hex.EncodeToString(sum[:16])
}
