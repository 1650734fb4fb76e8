package server

import (
	"fmt"
	"os"
	"path/filepath"
)

// OpenBootRecords is OpenRecords for what a reboot makes void, whatever lies
// on disk: preparations, stages, devices. It opens the records of the boot in
// the directory sub of the state's, and removes those of any other boot. They
// are written without fsync(2), which would cost most of the time of a call:
// what a crash of the machine leaves half written is removed, not read.
func OpenBootRecords[T any](s *State, sub, boot string) (*Records[T], error) {
	if !isBootID(boot) {
		return nil, fmt.Errorf("boot id %q: is not a UUID", boot)
	}
	r, err := OpenRecords[T](s, sub, boot)
	if err != nil {
		return nil, err
	}
	r.oneBoot = true
	boots, err := os.ReadDir(filepath.Join(s.dir, sub))
	if err != nil {
		return nil, err
	}
	for _, b := range boots {
		if b.Name() != boot && isBootID(b.Name()) {
			if err := dropBoot(s, filepath.Join(s.dir, sub, b.Name())); err != nil {
				return nil, fmt.Errorf("remove the %s of another boot: %w", sub, err)
			}
		}
	}
	return r, nil
}

func dropBoot(s *State, dir string) error {
	files, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, f := range files {
		if recordFile.MatchString(f.Name()) || isUnfinished(f.Name()) {
			if err := os.Remove(filepath.Join(dir, f.Name())); err != nil {
				return err
			}
		}
	}
	s.log.Info("dropped the records of another boot", "count", len(files), "directory", dir)
	return os.Remove(dir)
}
