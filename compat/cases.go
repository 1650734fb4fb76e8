package main

import (
	"context"
	"fmt"
	"path/filepath"
)

const mib = 1 << 20

// testcase is a suite against a reference driver behind the shim.
type testcase struct {
	suite, driver, access string
	// arguments starts the driver; DIR in it is a directory of the case.
	arguments func(dir string) []string
	// grants are the directories given to the driver and to the shim.
	grants func(dir string) map[string]string
	// prepare makes what the driver needs in the directory.
	prepare func(dir string) error
	// sizeless leaves capacity_range out of CreateVolume: the driver cannot
	// hold a volume to a size and says so, and the suite cannot ask for none.
	sizeless bool
	sanity   []string // arguments of csi-sanity
	// cannot says why the case cannot run here, if it cannot.
	cannot func() string
	test   func(context.Context, *rig) (Result, error)
	// alone says that the test starts driver and shim by itself, and ends them.
	alone bool
}

func (c testcase) name() string { return c.suite + " " + c.driver + " " + c.access }

const (
	sanity = "csi-sanity"
	swarm  = "swarmkit"
	both   = "prepare-sanity"
)

// smallSizes and largeSizes are how many volumes of each size the hostpath
// driver has to give.
const (
	smallSizes = 24
	largeSizes = 8
)

func cases() []testcase {
	sizes := func(first, second int64) []string {
		return []string{fmt.Sprintf("--csi.testvolumesize=%d", first), fmt.Sprintf("--csi.testvolumeexpandsize=%d", second)}
	}
	hostpath := testcase{
		driver: "hostpath", access: "mount", sanity: sizes(8*mib, 16*mib),
		prepare: makeSizedGrants,
		grants: func(dir string) map[string]string {
			grants := sizedGrants(dir)
			grants["data"] = filepath.Join(dir, "data")
			return grants
		},
		arguments: func(dir string) []string {
			args := []string{"hostpath", "--grant", "data=" + filepath.Join(dir, "data")}
			for name, path := range sizedGrants(dir) {
				args = append(args, "--sized-grant", name+"="+path)
			}
			return args
		},
	}
	block := testcase{
		driver: "block", sanity: sizes(32*mib, 64*mib),
		prepare:   makeData,
		arguments: func(dir string) []string { return []string{"block", "--dir", filepath.Join(dir, "data")} },
	}
	fuse := testcase{
		driver: "fuse", access: "mount", sanity: sizes(8*mib, 16*mib), sizeless: true,
		prepare:   makeData,
		arguments: func(dir string) []string { return []string{"fuse", "--dir", filepath.Join(dir, "data")} },
	}
	nfs := testcase{driver: "nfs", access: "mount", cannot: noNFS, sizeless: true}

	with := func(c testcase, suite, access string) testcase {
		c.suite, c.access = suite, access
		c.test = csiSanity
		switch suite {
		case swarm:
			c.test = swarmkit
		case both:
			c.test, c.alone = bothShims, true
		}
		return c
	}
	return []testcase{
		with(hostpath, sanity, "mount"),
		with(block, sanity, "mount"),
		with(block, sanity, "block"),
		with(fuse, sanity, "mount"),
		with(nfs, sanity, "mount"),
		with(hostpath, swarm, "mount"),
		with(block, swarm, "mount"),
		with(block, swarm, "block"),
		with(fuse, swarm, "mount"),
		with(hostpath, both, "mount"),
		with(block, both, "mount"),
	}
}

// explained are the specs of csi-sanity that fail without a fault of the shim
// or of the driver. One that does not fail is told as well: it is not
// explained any more.
var explained = []explanation{
	{
		driver: "block", access: "mount", spec: "should work if node-expand is called after node-publish",
		reason:  "this machine does not let a process have CAP_SYS_RESOURCE, without which the kernel does not grow a mounted ext4; the driver answers so",
		applies: func() bool { return !mayHave(capSysResource) },
	},
}

type explanation struct {
	driver, access string // "" is any
	spec           string // how it ends
	reason         string
	// applies, if set, says whether it does on this machine.
	applies func() bool
}
