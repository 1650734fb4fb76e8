package nfsd

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
)

// call is an ONC RPC call (RFC 5531) on a byte stream; args is XDR (RFC 4506).
type call struct {
	xid, program, version, procedure uint32
	args                             []byte
}

var be = binary.BigEndian

const maxCall = 64 << 10

var errCall = errors.New("malformed call")

// readCall reads one record.
func readCall(r *bufio.Reader) (call, error) {
	var mark [4]byte
	if _, err := io.ReadFull(r, mark[:]); err != nil {
		return call{}, err
	}
	const last = 1 << 31
	n := be.Uint32(mark[:])
	if n&last == 0 || n&^last > maxCall {
		return call{}, errCall
	}
	text := make([]byte, n&^last)
	if _, err := io.ReadFull(r, text); err != nil {
		return call{}, err
	}
	words := 6
	if len(text) < 4*words || be.Uint32(text[4:]) != 0 || be.Uint32(text[8:]) != 2 {
		return call{}, errCall
	}
	c := call{be.Uint32(text), be.Uint32(text[12:]), be.Uint32(text[16:]), be.Uint32(text[20:]), text[24:]}
	for range 2 { // credential and verifier
		if len(c.args) < 4 {
			return call{}, errCall
		}
		c.args = c.args[4:]
		if _, err := c.opaque(); err != nil {
			return call{}, err
		}
	}
	return c, nil
}

func (c *call) uint32() (uint32, error) {
	if len(c.args) < 4 {
		return 0, errCall
	}
	v := be.Uint32(c.args)
	c.args = c.args[4:]
	return v, nil
}

func (c *call) opaque() ([]byte, error) {
	n, err := c.uint32()
	padded := (uint64(n) + 3) &^ 3
	if err != nil || uint64(len(c.args)) < padded {
		return nil, errCall
	}
	v := c.args[:n]
	c.args = c.args[padded:]
	return v, nil
}

func appendOpaque(b, v []byte) []byte {
	b = append(be.AppendUint32(b, uint32(len(v))), v...)
	for len(b)%4 != 0 {
		b = append(b, 0)
	}
	return b
}

// writeReply writes an accepted, successful reply.
func writeReply(w io.Writer, xid uint32, result []byte) error {
	const reply, accepted, noAuth, success = 1, 0, 0, 0
	b := be.AppendUint32(nil, uint32(24+len(result))|1<<31)
	for _, v := range []uint32{xid, reply, accepted, noAuth, 0, success} {
		b = be.AppendUint32(b, v)
	}
	_, err := w.Write(append(b, result...))
	return err
}

// serve answers calls on every connection of a listener.
func serve(l net.Listener, answer func(*call) ([]byte, error)) {
	for {
		conn, err := l.Accept()
		if err != nil {
			return
		}
		go func() {
			defer func() { _ = conn.Close() }()
			r := bufio.NewReader(conn)
			for {
				c, err := readCall(r)
				if err != nil {
					return
				}
				result, err := answer(&c)
				if err == nil {
					err = writeReply(conn, c.xid, result)
				}
				if err != nil {
					return
				}
			}
		}()
	}
}

const (
	programPortmap = 100000
	programNFS     = 100003
	programMount   = 100005

	portPortmap = 111
	portNFS     = 2049
	portMount   = 20048
)

// portmap answers as rpcbind (RFC 1833): the kernel registers its services,
// which is always granted, and clients ask for the ports of NFS and MOUNT.
func portmap(c *call) ([]byte, error) {
	const getPort = 3 // GETADDR from version 3 on
	if c.procedure == 0 {
		return nil, nil
	}
	if c.procedure != getPort {
		return be.AppendUint32(nil, 1), nil
	}
	program, err := c.uint32()
	if err != nil {
		return nil, err
	}
	port := map[uint32]uint32{programNFS: portNFS, programMount: portMount}[program]
	if c.version == 2 {
		return be.AppendUint32(nil, port), nil
	}
	if _, err := c.uint32(); err != nil { // the version asked for
		return nil, err
	}
	netid, err := c.opaque()
	if err != nil {
		return nil, err
	}
	if port == 0 {
		return appendOpaque(nil, nil), nil
	}
	host := "0.0.0.0"
	if string(netid) == "tcp6" {
		host = "::"
	}
	return appendOpaque(nil, fmt.Appendf(nil, "%s.%d.%d", host, port>>8, port&0xff)), nil
}

// mountd answers MOUNT version 3 (RFC 1813, appendix I) with the handles that
// handle gives for paths.
func mountd(handle func(path string) ([]byte, error)) func(*call) ([]byte, error) {
	const (
		procedureMount = 1
		statusNoEnt    = 2
		authSys        = 1
	)
	return func(c *call) ([]byte, error) {
		if c.procedure != procedureMount {
			return nil, nil
		}
		path, err := c.opaque()
		if err != nil {
			return nil, err
		}
		fh, err := handle(string(path))
		if err != nil {
			fmt.Fprintf(os.Stderr, "nfs server: mount of %s is refused: %v\n", path, err)
			return be.AppendUint32(nil, statusNoEnt), nil
		}
		b := appendOpaque(be.AppendUint32(nil, 0), fh)
		return be.AppendUint32(be.AppendUint32(b, 1), authSys), nil
	}
}
