package nfs

import (
	"context"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Lookup returns the addresses of a host, as net.Resolver does.
type Lookup func(ctx context.Context, network, host string) ([]netip.Addr, error)

const (
	// lookupTime bounds the question for a name, dialTime that whether an
	// address answers.
	lookupTime = 10 * time.Second
	dialTime   = 2 * time.Second
	// portNFS is where a server of version 4 always is.
	portNFS = 2049
)

// resolve returns the address that the kernel is to use, which is asked for at
// each call: of those that the name has now, the first that takes a connection.
// If none does it is the first, and whoever performs learns why: this process
// may not be in the node's network.
func (d *Driver) resolve(ctx context.Context, o *options) (netip.Addr, error) {
	all, err := d.addresses(ctx, o.network())
	if err != nil {
		return netip.Addr{}, err
	}
	if len(all) == 1 {
		return all[0], nil
	}
	return firstToAnswer(ctx, all, o.port()), nil
}

// addresses of the export's host, each once, in the resolver's order.
func (d *Driver) addresses(ctx context.Context, network string) ([]netip.Addr, error) {
	host := d.config.Export.Host
	ctx, cancel := context.WithTimeout(ctx, lookupTime)
	defer cancel()
	var all []netip.Addr
	if a, err := netip.ParseAddr(host); err == nil {
		all = []netip.Addr{a}
	} else if all, err = d.config.Lookup(ctx, "ip", host); err != nil {
		// The volume may be fine: the call can be repeated.
		return nil, status.Errorf(codes.Unavailable, "resolve the server %s: %v; see that its name is known to this node", host, err)
	}
	var usable []netip.Addr
	for _, a := range all {
		a = a.Unmap()
		if network == "ip4" && !a.Is4() || network == "ip6" && !a.Is6() || slices.Contains(usable, a) {
			continue
		}
		usable = append(usable, a)
	}
	if len(usable) == 0 {
		return nil, status.Errorf(codes.Unavailable, "resolve the server %s: it has no address of the family that proto= asks for; use another proto", host)
	}
	return usable, nil
}

// firstToAnswer asks all addresses at once, and waits for a later one only as
// long as an earlier one may still answer.
func firstToAnswer(ctx context.Context, all []netip.Addr, port int) netip.Addr {
	ctx, cancel := context.WithTimeout(ctx, dialTime)
	defer cancel()
	answers := make([]chan bool, len(all))
	for i, a := range all {
		answers[i] = make(chan bool, 1)
		go func() {
			var dialer net.Dialer
			c, err := dialer.DialContext(ctx, "tcp", net.JoinHostPort(a.String(), strconv.Itoa(port)))
			if err == nil {
				_ = c.Close()
			}
			answers[i] <- err == nil
		}()
	}
	for i, answer := range answers {
		if <-answer {
			return all[i]
		}
	}
	return all[0]
}
