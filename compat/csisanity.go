package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"time"

	"github.com/onsi/ginkgo/v2/types"
)

// suiteTime bounds one run of csi-sanity, which sets no deadline on a call.
const suiteTime = 4 * time.Minute

// csiSanity runs upstream csi-sanity, as it is.
func csiSanity(ctx context.Context, g *rig) (result Result, err error) {
	endpoint, err := g.endpoint()
	if err != nil {
		return result, err
	}
	ctx, cancel := context.WithTimeout(ctx, suiteTime)
	defer cancel()
	report := g.path("suite.json")
	args := append([]string{
		"--csi.endpoint", endpoint, "--csi.mountdir", g.path("target"), "--csi.stagingdir", g.path("staging"),
		"--csi.testvolumeaccesstype", g.access, "--ginkgo.json-report", report, "--ginkgo.no-color",
	}, g.sanity...)
	cmd := exec.CommandContext(ctx, g.bin+"/csi-sanity", args...)
	log, err := os.Create(g.path("suite.log"))
	if err != nil {
		return result, err
	}
	defer log.Close()
	cmd.Stdout, cmd.Stderr, cmd.Dir = log, log, g.dir
	failed := cmd.Run()
	text, err := os.ReadFile(report)
	if err != nil {
		return result, fmt.Errorf("csi-sanity has no result: %w, %w", failed, err)
	}
	var reports []types.Report
	if err := json.Unmarshal(text, &reports); err != nil {
		return result, fmt.Errorf("the report of csi-sanity: %w", err)
	}
	failures := 0
	for _, r := range reports {
		for _, s := range r.SpecReports {
			if s.LeafNodeType == types.NodeTypeIt {
				result.count(g, &s)
			}
			if s.Failed() {
				failures++
			}
		}
	}
	if result.Passed == 0 {
		return result, fmt.Errorf("csi-sanity ran nothing: %w", failed)
	}
	if failed != nil && failures == 0 {
		return result, fmt.Errorf("csi-sanity: %w", failed)
	}
	result.stale(g)
	return result, nil
}

func (r *Result) count(g *rig, s *types.SpecReport) {
	name := strings.Join(append(append([]string{}, s.ContainerHierarchyTexts...), s.LeafNodeText), " ")
	switch {
	case s.State.Is(types.SpecStatePassed):
		r.Passed++
	case s.State.Is(types.SpecStatePending):
		r.Pending++
	case s.State.Is(types.SpecStateSkipped):
		r.Skipped++
	default:
		for _, e := range explained {
			if e.matches(g) && strings.HasSuffix(name, e.spec) {
				r.Explained = append(r.Explained, Explained{name, e.reason})
				return
			}
		}
		r.Failed++
		message, _, _ := strings.Cut(s.Failure.Message, "\n{") // a dump of a Go struct
		r.Notes = append(r.Notes, fmt.Sprintf("failed: %s: %s", name, message))
	}
}

func (e *explanation) matches(g *rig) bool {
	return (e.driver == "" || e.driver == g.driver) && (e.access == "" || e.access == g.access) && (e.applies == nil || e.applies())
}

// stale counts explanations of what does not fail as failures.
func (r *Result) stale(g *rig) {
	for _, e := range explained {
		if !e.matches(g) {
			continue
		}
		used := false
		for _, x := range r.Explained {
			used = used || strings.HasSuffix(x.Spec, e.spec)
		}
		if !used {
			r.Failed++
			r.Notes = append(r.Notes, "explained and did not fail: "+e.spec)
		}
	}
}
