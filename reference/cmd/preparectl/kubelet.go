package main

import (
	"encoding/json"
	"errors"
	"os"
	"path"
	"slices"
	"strings"

	"golang.org/x/sync/errgroup"

	"github.com/csi-prepare/csi-prepare/reference/mountns"
)

// published is a place where a kubelet has, or had, a volume by way of
// NodeStageVolume or NodePublishVolume.
type published struct {
	Driver   string `json:"driver"`
	VolumeID string `json:"volume_id"`
	// Pod is the uid, empty for a place that a volume is staged at.
	Pod   string `json:"pod,omitempty"`
	Path  string `json:"path"`
	Block bool   `json:"block,omitempty"`
	// Mounts are at Path, in whatever namespace.
	Mounts []placed `json:"mounts"`
	// State is one of the constants below.
	State string `json:"state"`
	// Answers is what the root of the mount answers.
	Answers string `json:"answers,omitempty"`
}

// What can be told of a place.
const (
	isMounted  = "mounted"
	notMounted = "not mounted" // being made, being removed, or left behind
	stacked    = "stacked"     // several mounts, one on the other
	elsewhere  = "elsewhere"   // mounted in other namespaces only
	silent     = "silent"      // its server does not answer
	dead       = "dead"        // its server is gone
	unused     = "staged only" // staged, and no pod of the node has it
	unreadable = "unreadable"
)

// volumeData is vol_data.json, as the kubelet keeps it beside a volume.
type volumeData struct {
	DriverName   string `json:"driverName"`
	VolumeHandle string `json:"volumeHandle"`
	SpecVolID    string `json:"specVolID"`
}

// kubelet is the directory of a kubelet.
type kubelet struct {
	dir string
	ask *asker
}

// names lists a directory; one that is not there is empty.
func (k *kubelet) names(dir string) ([]string, error) {
	a, err := k.ask.ask("list", dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	slices.Sort(a.Names)
	return a.Names, err
}

// data reads vol_data.json; what it does not say stays empty.
func (k *kubelet) data(dir string) (d volumeData) {
	a, err := k.ask.ask("read", path.Join(dir, "vol_data.json"))
	if err == nil {
		_ = json.Unmarshal([]byte(a.Text), &d)
	}
	return d
}

// csiVolumes is the directory of a pod with its CSI volumes.
const csiVolumes = "kubernetes.io~csi"

// volumes finds every place, by the layout of directories and by what is
// mounted below it: a place may be there without the other. Errors are of
// single directories.
func (k *kubelet) volumes(m *machine) ([]published, error) {
	var all []published
	var errs []error
	note := func(err error) bool {
		if err != nil {
			errs = append(errs, err)
		}
		return err == nil
	}
	pods, err := k.names(path.Join(k.dir, "pods"))
	note(err)
	for _, pod := range pods {
		dir := path.Join(k.dir, "pods", pod, "volumes", csiVolumes)
		names, err := k.names(dir)
		note(err)
		for _, name := range names {
			at := path.Join(dir, name)
			d := k.data(at)
			all = append(all, published{Driver: d.DriverName, VolumeID: d.VolumeHandle, Pod: pod, Path: path.Join(at, "mount")})
		}
	}
	plugins := path.Join(k.dir, "plugins/kubernetes.io/csi")
	drivers, err := k.names(plugins)
	note(err)
	for _, driver := range drivers {
		if driver == "volumeDevices" {
			continue
		}
		names, err := k.names(path.Join(plugins, driver))
		note(err)
		for _, name := range names {
			at := path.Join(plugins, driver, name)
			d := k.data(at)
			if d.DriverName == "" && driver != "pv" {
				d.DriverName = driver
			}
			all = append(all, published{Driver: d.DriverName, VolumeID: d.VolumeHandle, Path: path.Join(at, "globalmount")})
		}
	}
	all = append(all, k.blocks(path.Join(plugins, "volumeDevices"), note)...)
	k.judge(all, m)
	return all, errors.Join(errs...)
}

// blocks finds the places of raw block volumes.
func (k *kubelet) blocks(dir string, note func(error) bool) (all []published) {
	staged, err := k.names(path.Join(dir, "staging"))
	note(err)
	for _, name := range staged {
		d := k.data(path.Join(dir, name, "data"))
		all = append(all, published{Driver: d.DriverName, VolumeID: d.VolumeHandle, Path: path.Join(dir, "staging", name), Block: true})
	}
	names, err := k.names(path.Join(dir, "publish"))
	note(err)
	for _, name := range names {
		d := k.data(path.Join(dir, name, "data"))
		pods, err := k.names(path.Join(dir, "publish", name))
		note(err)
		for _, pod := range pods {
			all = append(all, published{
				Driver: d.DriverName, VolumeID: d.VolumeHandle, Pod: pod, Path: path.Join(dir, "publish", name, pod), Block: true,
			})
		}
	}
	return all
}

// judge fills in what is mounted at each place and how it answers.
func (k *kubelet) judge(all []published, m *machine) {
	var g errgroup.Group
	g.SetLimit(8)
	for i := range all {
		g.Go(func() error {
			k.judgeOne(&all[i], m)
			return nil
		})
	}
	_ = g.Wait()
	used := map[string]bool{}
	for _, p := range all {
		if p.Pod != "" {
			used[p.Driver+"\x00"+p.VolumeID] = true
		}
	}
	for i := range all {
		p := &all[i]
		if p.Pod == "" && p.State == isMounted && p.VolumeID != "" && !used[p.Driver+"\x00"+p.VolumeID] {
			p.State = unused
		}
	}
}

func (k *kubelet) judgeOne(p *published, m *machine) {
	p.Mounts = m.where(func(t *mountns.Table) []mountns.Mount { return t.At(p.Path) })
	here := len(m.own().Table.At(p.Path))
	switch {
	case len(p.Mounts) == 0:
		p.State = notMounted
		return
	case here == 0:
		p.State = elsewhere
		return
	case here > 1:
		p.State = stacked
	default:
		p.State = isMounted
	}
	p.Answers = k.ask.health(p.Path)
	switch p.Answers {
	case answersYes:
	case answersNot:
		p.State = silent
	case answersGone:
		p.State = dead
	default:
		p.State = unreadable
	}
}

// left says that the place may be left over. Of a raw block volume there may be
// a place without a mount.
func (p *published) left() bool {
	switch p.State {
	case isMounted, unused:
		return false
	case notMounted:
		return !p.Block
	}
	return true
}

// of returns the places of a volume, by its id.
func of(all []published, volume string) (found []published) {
	for _, p := range all {
		if p.VolumeID == volume {
			found = append(found, p)
		}
	}
	return found
}

// at returns the place at a path, nil if it is none of a kubelet's.
func at(all []published, place string) *published {
	for i := range all {
		if all[i].Path == place {
			return &all[i]
		}
	}
	return nil
}

// call names the call that a kubelet makes for a place.
func (p *published) call() string {
	if p.Pod == "" {
		return "NodeStageVolume"
	}
	return "NodePublishVolume for pod " + p.Pod
}

// below says whether p is dir or below it.
func below(p, dir string) bool {
	return p == dir || strings.HasPrefix(p, strings.TrimSuffix(dir, "/")+"/")
}
