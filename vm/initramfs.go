package vm

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/cavaliergopher/cpio"

	"github.com/csi-prepare/csi-prepare/vm/job"
)

// writeInitramfs writes an archive in the kernel's newc format: the init, the
// modules and the job. j.Modules gets the modules' names in the guest.
func writeInitramfs(w io.Writer, initPath, moduleDir string, modules []string, j *job.Job) error {
	a := archive{cpio.NewWriter(w)}
	for _, dir := range []string{"proc", "sys", "dev", "tmp", "modules"} {
		if err := a.dir(dir); err != nil {
			return err
		}
	}
	if err := a.file("init", initPath, 0o755); err != nil {
		return err
	}
	j.Modules = nil
	for _, m := range modules {
		name := "/modules/" + filepath.Base(m)
		if err := a.file(name[1:], filepath.Join(moduleDir, m), 0o644); err != nil {
			return err
		}
		j.Modules = append(j.Modules, name)
	}
	text, err := json.Marshal(j)
	if err != nil {
		return err
	}
	if err := a.bytes(job.File[1:], text); err != nil {
		return err
	}
	return a.Close()
}

type archive struct{ *cpio.Writer }

func (a archive) dir(name string) error {
	return a.WriteHeader(&cpio.Header{Name: name, Mode: cpio.TypeDir | 0o755, Links: 2})
}

func (a archive) bytes(name string, text []byte) error {
	if err := a.WriteHeader(&cpio.Header{Name: name, Mode: cpio.TypeReg | 0o644, Links: 1, Size: int64(len(text))}); err != nil {
		return err
	}
	_, err := a.Write(text)
	return err
}

func (a archive) file(name, from string, mode cpio.FileMode) error {
	f, err := os.Open(from)
	if err != nil {
		return err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return err
	}
	if err := a.WriteHeader(&cpio.Header{Name: name, Mode: cpio.TypeReg | mode, Links: 1, Size: info.Size()}); err != nil {
		return err
	}
	if _, err := io.Copy(a, f); err != nil {
		return fmt.Errorf("add %s: %w", from, err)
	}
	return nil
}
