package mountspec

import (
	"slices"

	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

func (c *check) bind(k *Bind) {
	c.pathRef("bind.source", &k.Source)
	c.text("bind.mount_fs_type", k.MountFSType)
	c.length("bind.mount_fs_type", k.MountFSType, maxText)
}

// pathRef judges that r names something below a directory of this very call,
// as far as text can: what the path leads to is seen when it is opened.
func (c *check) pathRef(field string, r *PathRef) {
	switch r.Base {
	case BasePrepare: // the request always has a prepare_path
	case BaseStaging:
		if !c.req.Staging {
			c.add(requirement.BindBaseSet, field+".base",
				"STAGING, but the request had no staging_target_path: use a base of this call")
		}
	case BaseGranted:
		if !slices.Contains(c.req.Performer.Grants, r.Grant) {
			c.add(requirement.BindGrantOffered, field+".grant",
				"%s is not in performer.grants: use a directory the operator granted, or FAILED_PRECONDITION",
				show(r.Grant))
		}
	default:
		c.add(requirement.BindBaseKnown, field+".base",
			"value %d: use STAGING, PREPARE or GRANTED", r.Base)
	}
	if r.Grant != "" && r.Base != BaseGranted {
		c.add(requirement.BindGrantOnlyGranted, field+".grant",
			"%s with base %s: set grant with base GRANTED only", show(r.Grant), r.Base)
	}
	if len(r.Grant) > maxGrant {
		c.add(requirement.SpecFieldLength, field+".grant", "%d bytes: at most %d", len(r.Grant), maxGrant)
	}
	if fault := textFault(r.Grant); fault != "" {
		c.add(requirement.SpecText, field+".grant", "%s: send text", fault)
	}

	if fault := textFault(r.Relative); fault != "" {
		c.add(requirement.SpecText, field+".relative", "%s: send text", fault)
	}
	if fault := pathFault(r.Relative); fault != "" {
		c.add(requirement.BindRelative, field+".relative",
			"%s %s: give plain names below the base, separated by single '/'", show(r.Relative), fault)
	}
	if excess := pathExcess(r.Relative); excess != "" {
		c.add(requirement.SpecFieldLength, field+".relative", "%s", excess)
	}
}
