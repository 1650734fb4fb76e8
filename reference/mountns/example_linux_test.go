package mountns_test

import (
	"context"
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/reference/mountns"
)

// What did a step do to the mounts of a namespace?
func ExampleDiff() {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	ns, err := mountns.New(ctx) // private, gone with Close
	if err != nil {
		fmt.Println(err)
		return
	}
	defer func() { _ = ns.Close() }()

	before, err := ns.Table(ctx)
	if err != nil {
		fmt.Println(err)
		return
	}
	err = ns.Do(ctx, func() error {
		return unix.Mount("tmpfs", "/tmp", "tmpfs", unix.MS_NOSUID, "size=1m")
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	after, err := ns.Table(ctx)
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(mountns.Diff(before, after)) // + 2147597311 tmpfs on /tmp (private)
}
