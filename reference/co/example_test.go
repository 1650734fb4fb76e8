package co_test

import (
	"context"
	"errors"
	"log"
	"os"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/csi-prepare/csi-prepare/reference/co"
	"github.com/csi-prepare/csi-prepare/reference/perform"
)

// The whole life of one volume on a node, for a consumer whose directory is
// given. Everything that may block is bounded by the context and by the
// deadlines of the policy, and what Up returns an error for is gone again.
func Example() {
	co.Child() // first thing in main: steps in the kernel run as children of this program

	policy, err := co.ReadPolicy("/etc/csi-prepare/policy.yaml")
	if errors.Is(err, os.ErrNotExist) {
		policy, err = &co.Policy{}, nil // the defaults
	}
	if err != nil {
		log.Fatal(err)
	}
	c, err := co.Open(co.Config{Dir: "/var/lib/csi-prepare", Policy: policy})
	if err != nil {
		log.Fatal(err)
	}
	defer c.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	if _, err := c.Recover(ctx); err != nil {
		log.Print(err) // of single volumes: the others are recovered
	}

	record, err := c.Up(ctx, co.Use{
		Endpoint: "unix:///run/csi/plugin.sock", VolumeID: "vol-1", PrepareID: "consumer-1",
		Capability: &csi.VolumeCapability{
			AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{}},
			AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER},
		},
		Target: perform.Target{Path: "/srv/app/data"},
	})
	if err != nil {
		log.Fatal(err) // nothing is left, or the error and the ledger say what is
	}
	// The consumer uses /srv/app/data.
	if err := c.Down(ctx, record.Key()); err != nil {
		log.Fatal(err) // in use, most likely: the error says by whom
	}
}

// A volume for a process that runs already, at a path as the process sees it.
func ExampleConsumerOf() {
	const pid = 4711
	consumer, err := co.ConsumerOf(pid)
	if err != nil {
		log.Fatal(err) // it has ended, most likely
	}
	defer consumer.Close()
	c, err := co.Open(co.Config{Dir: "/var/lib/csi-prepare"})
	if err != nil {
		log.Fatal(err)
	}
	defer c.Close()
	_, err = c.Up(context.Background(), co.Use{
		Endpoint: "unix:///run/csi/plugin.sock", VolumeID: "vol-1", PrepareID: "consumer-1",
		Target: consumer.Target("/data"), UserNamespace: consumer.UserNamespace,
	})
	if err != nil {
		log.Fatal(err)
	}
}
