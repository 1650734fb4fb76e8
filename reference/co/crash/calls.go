package crash

import (
	"fmt"
	"sync"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/proto"

	"github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
)

// calls is the log of what one plugin is asked, held against the contract:
//
//   - a volume is prepared while it is staged, if it is staged at all
//   - it is unprepared after its performance was undone
//   - it is unstaged after all its preparations were unprepared
//   - a CO has one call for a volume in flight
type calls struct {
	// isPerformed says whether there is a mount at a consumer's place now.
	isPerformed func(volumeID, prepareID string) bool

	mu       sync.Mutex
	life     int // of the CO
	count    int
	broken   []string
	stages   bool
	staged   map[string]bool
	prepared map[string]map[string]bool // volume, prepare id: maybe
	flying   map[string]int             // volume: the life of a call in flight
}

func newCalls(isPerformed func(volumeID, prepareID string) bool) *calls {
	return &calls{
		isPerformed: isPerformed, staged: map[string]bool{},
		prepared: map[string]map[string]bool{}, flying: map[string]int{},
	}
}

func (c *calls) next() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.life++
}

func (c *calls) take() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	broken := c.broken
	c.broken = nil
	return broken
}

// about is who a request is about; messages have their fields in common.
func about(method string, request []byte) (volume, id string) {
	var m proto.Message
	switch method {
	case "NodeStageVolume":
		m = &csi.NodeStageVolumeRequest{}
	case "NodeUnstageVolume":
		m = &csi.NodeUnstageVolumeRequest{}
	case "NodePrepareVolume":
		m = &preparev1alpha1.NodePrepareVolumeRequest{}
	case "NodeUnprepareVolume":
		m = &preparev1alpha1.NodeUnprepareVolumeRequest{}
	default:
		return "", ""
	}
	if proto.Unmarshal(request, m) != nil {
		return "", ""
	}
	if p, ok := m.(interface{ GetPrepareId() string }); ok {
		id = p.GetPrepareId()
	}
	return m.(interface{ GetVolumeId() string }).GetVolumeId(), id
}

// begin notes a call and returns what notes its end.
func (c *calls) begin(method string, request []byte) func(error) {
	volume, id := about(method, request)
	if volume == "" {
		return func(error) {}
	}
	performed := method == "NodeUnprepareVolume" && c.isPerformed(volume, id)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.count++
	wrong := func(format string, args ...any) {
		c.broken = append(c.broken, method+" of "+volume+" "+id+": "+fmt.Sprintf(format, args...))
	}
	life := c.life
	if c.flying[volume] == life && life > 0 {
		wrong("another call for the volume is in flight")
	}
	c.flying[volume] = life
	if c.prepared[volume] == nil {
		c.prepared[volume] = map[string]bool{}
	}
	switch method {
	case "NodeStageVolume":
		c.stages = true
	case "NodePrepareVolume":
		if c.stages && !c.staged[volume] {
			wrong("the volume is not staged")
		}
		c.prepared[volume][id] = true
	case "NodeUnprepareVolume":
		if performed {
			wrong("it is still performed")
		}
	case "NodeUnstageVolume":
		if len(c.prepared[volume]) > 0 {
			wrong("it may still be prepared: %v", c.prepared[volume])
		}
		c.staged[volume] = false
	}
	return func(err error) {
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.flying[volume] == life {
			delete(c.flying, volume)
		}
		if err != nil {
			return
		}
		switch method {
		case "NodeStageVolume":
			c.staged[volume] = true
		case "NodeUnprepareVolume":
			delete(c.prepared[volume], id)
		}
	}
}
