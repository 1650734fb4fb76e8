package device

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// Identity tells a device from the one that has its path or number at another
// time.
type Identity struct {
	// Hardware is what the device itself says it is: its world wide name,
	// serial number or device-mapper uuid. It outlives a reboot. Empty where
	// there is none.
	Hardware string `json:"hardware,omitempty"`
	// Number and Diskseq are of one boot.
	Number  Number `json:"number"`
	Diskseq uint64 `json:"diskseq,omitempty"`
	// Size in bytes.
	Size int64 `json:"size"`
}

// hardwareIDs are the files of sysfs that may hold what a device says it is.
var hardwareIDs = []string{"wwid", "device/wwid", "dm/uuid", "md/uuid", "serial", "device/serial"}

// Identify returns the identity of the whole device at a path, which may be a
// link.
func (n *Nodes) Identify(path string) (Identity, error) {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return Identity{}, &os.PathError{Op: "stat", Path: path, Err: err}
	}
	if st.Mode&unix.S_IFMT != unix.S_IFBLK {
		return Identity{}, fmt.Errorf("%s: is not a block device", path)
	}
	id := Identity{Number: numberOf(st.Rdev)}
	if _, err := os.Stat(filepath.Join(sysBlock(id.Number), "partition")); err == nil {
		return id, fmt.Errorf("%s: is a partition, which has no identity of its own; name a whole disk or a logical volume", path)
	}
	f, err := n.Open(id.Number, unix.O_RDONLY)
	if err != nil {
		return id, fmt.Errorf("%s: %w", path, err)
	}
	defer f.Close()
	if id.Size, err = Size(f); err != nil {
		return id, fmt.Errorf("%s: %w", path, err)
	}
	if id.Diskseq, err = Diskseq(id.Number); err != nil {
		return id, fmt.Errorf("%s: %w", path, err)
	}
	for _, name := range hardwareIDs {
		text, err := os.ReadFile(filepath.Join(sysBlock(id.Number), name))
		if value := strings.TrimSpace(string(text)); err == nil && value != "" {
			id.Hardware = name + " " + value
			break
		}
	}
	return id, nil
}

// Same tells whether now is the device that was id, in the same boot or in
// another one. A device that says what it is may have another number by now;
// one that does not is known for a boot alone.
func (id Identity) Same(now Identity, sameBoot bool) bool {
	switch {
	case id.Hardware != now.Hardware, now.Size < id.Size:
		return false
	case id.Hardware != "":
		return true
	}
	return sameBoot && id.Number == now.Number && id.Diskseq != 0 && id.Diskseq == now.Diskseq
}
