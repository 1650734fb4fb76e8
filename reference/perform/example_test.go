package perform_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/reference/mountns"
	"github.com/csi-prepare/csi-prepare/reference/mountspec"
	"github.com/csi-prepare/csi-prepare/reference/perform"
)

// A runtime performs what a plugin answered in a container's mount namespace,
// and takes it away again when the container has ended.
func Example() {
	if os.Getuid() != 0 {
		return // mounting takes a privilege
	}
	ctx := context.Background()
	dir, err := os.MkdirTemp("", "example")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(dir)
	for _, d := range []string{"pool/volume", "data"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o755); err != nil {
			log.Fatal(err)
		}
	}

	// The container; most often it is mountns.OfProcess of its first process.
	container, err := mountns.New(ctx)
	if err != nil {
		log.Fatal(err)
	}
	defer container.Close()

	// What came back from NodePrepareVolume, and what was offered in it.
	specs := []mountspec.Spec{{
		Kind: &mountspec.Bind{Source: mountspec.PathRef{
			Base: mountspec.BaseGranted, Grant: "pool", Relative: "volume",
		}},
		Attributes: mountspec.Attributes{Readonly: true},
	}}
	options := perform.Options{
		Request: mountspec.Request{Performer: mountspec.Performer{
			Kinds: []mountspec.KindName{mountspec.KindBind}, Grants: []string{"pool"},
		}},
		Grants: map[string]string{"pool": filepath.Join(dir, "pool")},
		Journal: func(receipts []perform.Receipt) error {
			return nil // write them down, so that a crash leaves nothing unknown
		},
	}
	target := perform.Target{Namespace: container, Path: filepath.Join(dir, "data")}

	done, err := perform.Perform(ctx, target, specs, options)
	if err != nil {
		log.Fatal(err)
	}
	err = container.Do(ctx, func() error {
		return os.WriteFile(filepath.Join(dir, "data/file"), nil, 0o644)
	})
	fmt.Println("writing in the container:", errors.Is(err, unix.EROFS))

	if err := perform.Undo(ctx, container, done.Receipts); err != nil {
		log.Fatal(err)
	}
	fmt.Println("undone")
	// Output:
	// writing in the container: true
	// undone
}
