package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"google.golang.org/protobuf/proto"
)

const (
	bufVersion = "1.75.0"
	// bufDir is where npm puts buf, below the root of the checkout.
	bufDir = "out/tools/buf-" + bufVersion
	// bufBroken is buf's exit status for "ran, and found breaking changes".
	bufBroken = 100

	bufConfig = `{"version":"v2","breaking":{"use":["FILE"]}}`
)

// breaking compares the contract with the accepted one. couldNot is not empty
// if the comparison could not run here; that is neither a fault nor a pass.
func (t *tree) breaking(ctx context.Context) (faults []fault, couldNot string, err error) {
	if t.baseline == "" {
		return []fault{{acceptedProto, 0, "missing: run speccheck accept"}}, "", nil
	}
	dir, err := csiDir(ctx, t.root)
	if err != nil {
		return nil, "", err
	}
	now, wrong, err := image(ctx, dir, t.doc.protoText())
	if err != nil {
		return nil, "", err
	}
	if len(wrong) > 0 {
		return nil, "prepare.proto does not compile", nil
	}
	before, wrong, err := image(ctx, dir, t.baseline)
	if err != nil {
		return nil, "", err
	}
	if len(wrong) > 0 {
		for _, f := range wrong {
			faults = append(faults, fault{acceptedProto, f.line, f.text})
		}
		return faults, "", nil
	}

	buf, couldNot := installBuf(ctx, t.root)
	if couldNot != "" {
		return nil, couldNot, nil
	}
	tmp, err := os.MkdirTemp("", "speccheck-")
	if err != nil {
		return nil, "", err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(tmp)) }()
	nowFile, beforeFile := filepath.Join(tmp, "now.binpb"), filepath.Join(tmp, "accepted.binpb")
	if err := errors.Join(os.WriteFile(nowFile, now, 0o600), os.WriteFile(beforeFile, before, 0o600)); err != nil {
		return nil, "", err
	}
	cmd := exec.CommandContext(ctx, buf, "breaking", nowFile, "--against", beforeFile, "--config", bufConfig, "--error-format", "json")
	cmd.Dir = tmp
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err = cmd.Run()
	var exit *exec.ExitError
	switch {
	case err == nil:
		return nil, "", nil
	case errors.As(err, &exit) && exit.ExitCode() == bufBroken:
		faults, err = t.bufFaults(stdout.Bytes())
		return faults, "", err
	default:
		return nil, fmt.Sprintf("buf breaking: %v: %s", err, bytes.TrimSpace(stderr.Bytes())), nil
	}
}

// image is prepare.proto and its imports as buf reads them.
func image(ctx context.Context, csiDir, text string) ([]byte, []fault, error) {
	files, faults, err := compile(ctx, csiDir, map[string]string{prepareProto: text}, prepareProto)
	if err != nil || len(faults) > 0 {
		return nil, faults, err
	}
	b, err := proto.MarshalOptions{Deterministic: true}.Marshal(descriptors(files))
	return b, nil, err
}

// bufFaults reads buf's findings, one JSON object a line.
func (t *tree) bufFaults(out []byte) ([]fault, error) {
	var faults []fault
	for line := range bytes.Lines(out) {
		var found struct {
			Line    int    `json:"start_line"`
			Type    string `json:"type"`
			Message string `json:"message"`
		}
		if err := json.Unmarshal(line, &found); err != nil {
			return nil, fmt.Errorf("read the findings of buf: %w", err)
		}
		faults = append(faults, fault{
			specFile, t.doc.specLine(found.Line),
			fmt.Sprintf("breaking change: %s (%s); if it is meant, run speccheck accept", found.Message, found.Type),
		})
	}
	return faults, nil
}

// installBuf returns the path of the pinned buf, which it takes from npm once.
func installBuf(ctx context.Context, root string) (path, couldNot string) {
	dir, err := filepath.Abs(filepath.Join(root, bufDir))
	if err != nil {
		return "", err.Error()
	}
	path = filepath.Join(dir, "node_modules", ".bin", "buf")
	if out, err := exec.CommandContext(ctx, path, "--version").Output(); err == nil && strings.TrimSpace(string(out)) == bufVersion {
		return path, ""
	}
	npm, err := exec.LookPath("npm")
	if err != nil {
		return "", "npm, which brings buf, is not installed"
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err.Error()
	}
	cmd := exec.CommandContext(ctx, npm, "install", "--prefix", dir, "--no-save", "--no-audit", "--no-fund", "--loglevel=error", "@bufbuild/buf@"+bufVersion)
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Sprintf("npm install @bufbuild/buf@%s: %v: %s", bufVersion, err, lastLine(out))
	}
	return path, ""
}

func lastLine(b []byte) string {
	b = bytes.TrimSpace(b)
	return string(b[bytes.LastIndexByte(b, '\n')+1:])
}
