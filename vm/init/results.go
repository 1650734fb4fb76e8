package main

import (
	"archive/tar"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/csi-prepare/csi-prepare/vm/job"
)

// saveKernelLog adds what the kernel has said to the results.
func saveKernelLog() error {
	const readAll = 3
	buf := make([]byte, 1<<20)
	n, err := unix.Klogctl(readAll, buf)
	if err != nil {
		return fmt.Errorf("read the kernel's log: %w", err)
	}
	return os.WriteFile(filepath.Join(job.Results, job.KernelLog), buf[:n], 0o644)
}

// writeResults writes the results to the device as a tar archive.
func writeResults(device string) error {
	d, err := os.OpenFile(device, os.O_WRONLY, 0)
	if err != nil {
		return fmt.Errorf("results: %w", err)
	}
	archive := tar.NewWriter(d)
	err = errors.Join(archive.AddFS(os.DirFS(job.Results)), archive.Close())
	if err == nil {
		err = d.Sync()
	}
	if err = errors.Join(err, d.Close()); err != nil {
		return fmt.Errorf("results: write to %s: %w", device, err)
	}
	return nil
}
