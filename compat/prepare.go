package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

// bothTime bounds our suite over two shims.
const bothTime = 15 * time.Minute

// bothShims runs our own suite against `prepare-shim driver` before a plugin
// that mounts: a reference driver behind `prepare-shim co`. The suite starts the
// three of them, and kills them.
func bothShims(ctx context.Context, g *rig) (result Result, err error) {
	shim, at := filepath.Join(g.bin, "prepare-shim"), func(name string) string { return "unix://" + g.path(name+".sock") }
	argv := append([]string{
		shim, "driver", "--endpoint", "{endpoint}", "--plugin", at("co"), "--state-dir", g.path("front"), "--",
		shim, "co", "--endpoint", at("co"), "--plugin", at("p"), "--state-dir", g.path("both"), "--policy", g.path("policy.yaml"), "--",
		filepath.Join(g.bin, "prepare-driver"),
	}, append(g.arguments(g.dir), "--endpoint", at("p"), "--state-dir", g.path("behind"), "--node-id", "node1")...)
	ctx, cancel := context.WithTimeout(ctx, bothTime)
	defer cancel()
	args := []string{"run", "--exec", strings.Join(argv, " "), "--report", g.path("report"), "--csi.testvolumeaccesstype", g.access}
	cmd := exec.CommandContext(ctx, filepath.Join(g.bin, "prepare-sanity"), args...)
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = time.Minute
	cmd.Env = append(os.Environ(), "TMPDIR="+g.dir)
	log, err := os.Create(g.path("suite.log"))
	if err != nil {
		return result, err
	}
	defer log.Close()
	cmd.Stdout, cmd.Stderr = log, log
	failed := cmd.Run()
	files, _ := filepath.Glob(g.path("report/*.json"))
	if len(files) != 1 {
		return result, fmt.Errorf("prepare-sanity has no report: %w", failed)
	}
	text, err := os.ReadFile(files[0])
	if err != nil {
		return result, err
	}
	var report struct {
		Specs []struct {
			Name, Outcome, Message string
		}
		Summary struct {
			Passed, Failed, Unsupported int
			CouldNotRun                 int `json:"could_not_run"`
		}
	}
	if err := json.Unmarshal(text, &report); err != nil {
		return result, err
	}
	result.Passed, result.Failed, result.Skipped = report.Summary.Passed, report.Summary.Failed, report.Summary.Unsupported
	for _, s := range report.Specs {
		if s.Outcome == "failed" {
			message, _, _ := strings.Cut(s.Message, "\n")
			result.Notes = append(result.Notes, "failed: "+s.Name+": "+message)
		}
	}
	if result.Passed == 0 {
		return result, fmt.Errorf("prepare-sanity ran nothing: %w", failed)
	}
	if n := report.Summary.CouldNotRun; n > 0 {
		result.Notes = append(result.Notes, fmt.Sprintf("%d specs could not run: they stand in for another boot, at which mounts of this one would be gone", n))
	}
	return result, nil
}
