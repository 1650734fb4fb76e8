// Package cri converts mount specs to what a container of the Kubernetes
// container runtime interface (CRI v1) is created with: mounts and devices.
//
// CRI has recursive binds of host paths and nothing else, and runtimes follow
// links in them. So every mount is one the CO has performed already, in a
// directory of its own. Even then the runtime sets attributes anew, and loses
// those CRI has no field for: the conversion fails, with a
// [mountspec.ConsumerError], where that happens.
//
// The types are those of k8s.io/cri-api: that module brings in gRPC and
// protobuf, which this one needs anyway, and no other code.
package cri

import (
	"strings"

	runtimev1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/csi-prepare/csi-prepare/reference/mountspec"
	"github.com/csi-prepare/csi-prepare/reference/mountspec/internal/entry"
)

const consumer entry.Consumer = "CRI"

// Options is what the CO has decided and the runtime has reported.
type Options struct {
	// ContainerPath is the place in the container the CO has chosen.
	ContainerPath string
	Policy        mountspec.Policy
	// Features is of the runtime's StatusResponse. Without mount_options a
	// runtime that is asked for nosuid, nodev or noexec ignores it.
	Features *runtimev1.RuntimeFeatures
	// Handler is of the runtime handler the container will use.
	Handler *runtimev1.RuntimeHandlerFeatures
}

// Entries is what to append to a ContainerConfig. Runtimes sort mounts by
// path, which keeps an outer target before an inner one.
type Entries struct {
	Mounts  []*runtimev1.Mount
	Devices []*runtimev1.Device
}

// Convert converts specs that [mountspec.Validate] accepts; places[i] is of
// specs[i] and says where it is performed or, for a block device, where its
// node was found.
func Convert(list []mountspec.Spec, places []mountspec.Place, o Options) (Entries, error) {
	if err := consumer.Places(list, places); err != nil {
		return Entries{}, err
	}
	var out Entries
	for i := range list {
		if err := out.add(i, &list[i], places[i], &o); err != nil {
			return Entries{}, err
		}
	}
	return out, nil
}

func (e *Entries) add(i int, s *mountspec.Spec, p mountspec.Place, o *Options) error {
	if s.Kind == nil {
		return consumer.Refuse(i, "kind", "none is set")
	}
	destination, err := consumer.Destination(i, o.ContainerPath, s.Target)
	if err != nil {
		return err
	}
	if _, ok := s.Kind.(*mountspec.BlockDevice); ok {
		return e.device(i, s, p, destination)
	}
	if p.Performed == "" {
		return consumer.Refuse(i, entry.Name(s.Kind), "there are binds of whole trees only: perform it first")
	}
	source, err := consumer.Bound(i, s, p, false)
	if err != nil {
		return err
	}
	m := &runtimev1.Mount{
		ContainerPath: destination,
		HostPath:      source,
		Propagation:   runtimev1.MountPropagation_PROPAGATION_PRIVATE,
	}
	for _, w := range entry.Words(entry.Effective(s, p, o.Policy), s) {
		switch w.Text {
		case "ro":
			m.Readonly = true
			// The mounts below were made read-only when the spec was
			// performed; this keeps them so where the runtime can.
			m.RecursiveReadOnly = o.Handler.GetRecursiveReadOnlyMounts()
		case "nosuid", "nodev", "noexec":
			if !o.Features.GetMountOptions() {
				return consumer.Refuse(i, w.Field, "the runtime has no mount_options and would drop it: "+
					"attach it in the container's mount namespace, or relax the policy")
			}
			m.MountOptions = append(m.MountOptions, w.Text)
		case "relatime":
			// What the kernel keeps, or else takes, where no mode is named.
		default:
			return consumer.Refuse(i, w.Field, "there is no field for %s and the runtime would drop it: "+
				"attach it in the container's mount namespace", w.Text)
		}
	}
	e.Mounts = append(e.Mounts, m)
	return nil
}

func (e *Entries) device(i int, s *mountspec.Spec, p mountspec.Place, destination string) error {
	if !strings.HasPrefix(destination, "/dev/") {
		return consumer.Refuse(i, "target", "the node %q would stay in the image: choose a place below /dev", destination)
	}
	node, err := consumer.Node(i, p)
	if err != nil {
		return err
	}
	permissions := "rw" // never m
	if s.Attributes.Readonly {
		permissions = "r"
	}
	e.Devices = append(e.Devices, &runtimev1.Device{
		ContainerPath: destination, HostPath: node, Permissions: permissions,
	})
	return nil
}
