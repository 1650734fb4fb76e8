package main

import (
	"context"
	"fmt"
	"net"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/csi-prepare/csi-prepare/reference/mountns"
	"github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
)

// driver asks a driver who it is, what it serves and what it needs, and
// compares its view of the mounts with the own.
func (d *doctor) driver(ctx context.Context, endpoint string) {
	name := "driver " + endpoint
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	conn, err := grpc.NewClient(endpoint, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		d.add(name, failed, err.Error(), "an endpoint is unix:///path")
		return
	}
	defer func() { _ = conn.Close() }()
	info, err := csi.NewIdentityClient(conn).GetPluginInfo(ctx, &csi.GetPluginInfoRequest{})
	if err != nil {
		why := status.Convert(err).Message()
		if status.Code(err) == codes.DeadlineExceeded {
			why = fmt.Sprintf("did not answer within %s", patience)
		}
		d.add(name, failed, why, "see whether it runs, and its log")
		return
	}
	detail := fmt.Sprintf("%s %s", info.GetName(), info.GetVendorVersion())
	r, err := preparev1alpha1.NewNodePrepareClient(conn).NodePrepareGetCapabilities(ctx, &preparev1alpha1.NodePrepareGetCapabilitiesRequest{})
	if status.Code(err) == codes.Unimplemented {
		d.add(name, warning, detail+" serves no NodePrepare: it mounts itself, at every target",
			"publish with it as before, or put prepare-shim before it")
		return
	}
	if err != nil {
		d.add(name, failed, detail+": "+status.Convert(err).Message(), "")
		return
	}
	propagates := false
	for _, c := range r.GetCapabilities() {
		propagates = propagates || c.GetRequiresPropagation() != nil
	}
	if !propagates {
		d.add(name, fine, detail+" serves NodePrepare, and needs no propagation", "")
		return
	}
	shared, view, err := d.shares(endpoint, d.dirs.state)
	detail += " serves NodePrepare, and mounts where the CO has to see it"
	switch {
	case err != nil:
		d.add(name, blind, detail+": "+err.Error(), "")
	case shared:
		d.add(name, fine, detail+": "+view, "")
	default:
		d.add(name, failed, detail+": "+view, "give it "+d.dirs.state+" with Bidirectional propagation, on a mount that is shared here")
	}
}

// shares says whether what the driver mounts below dir comes to be seen here.
func (d *doctor) shares(endpoint, dir string) (bool, string, error) {
	pid, err := peer(strings.TrimPrefix(endpoint, "unix://"))
	if err != nil {
		return false, "", err
	}
	ns, err := mountns.OfPID(pid)
	if err != nil {
		return false, "", err
	}
	defer ns.Close()
	if ns.ID() == d.machine.own().ID {
		return true, "it is in the same mount namespace", nil
	}
	its := d.machine.space(ns.ID())
	if its == nil {
		return false, "", fmt.Errorf("mount namespace %d of process %d could not be read", ns.ID(), pid)
	}
	here, found := covering(d.machine.own().Table, dir)
	there, alsoFound := covering(its.Table, dir)
	if !found || !alsoFound {
		return false, "", fmt.Errorf("%s is in no mount of the table", dir)
	}
	if group := there.PeerGroup; group != 0 && (here.PeerGroup == group || here.Master == group) {
		return true, fmt.Sprintf("what it mounts below %s comes here", dir), nil
	}
	return false, fmt.Sprintf("what it mounts below %s does not come here: it is on %s there, on %s here", dir, there, here), nil
}

// peer is the process behind a socket.
func peer(path string) (int, error) {
	conn, err := net.DialTimeout("unix", path, patience)
	if err != nil {
		return 0, err
	}
	defer func() { _ = conn.Close() }()
	raw, err := conn.(*net.UnixConn).SyscallConn()
	if err != nil {
		return 0, err
	}
	var credentials *unix.Ucred
	cerr := raw.Control(func(fd uintptr) { credentials, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) })
	if cerr != nil {
		return 0, cerr
	}
	if err != nil {
		return 0, err
	}
	return int(credentials.Pid), nil
}
