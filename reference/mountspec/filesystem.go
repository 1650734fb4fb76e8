package mountspec

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

func (c *check) filesystem(k *Filesystem) {
	c.fsType(k.Type)
	c.fsSource(k)
	c.parameters(k.Parameters)
	c.addresses(k)
	c.version(k)
}

func (c *check) fsType(t string) {
	const field = "filesystem.fs_type"
	c.text(field, t)
	if t == "" || len(t) > maxFSType || !only(t, "_-", false) {
		// A '.' would name a subtype, for which programs are started, and a
		// '/' selects code in containerd.
		c.add(requirement.FilesystemTypeCharset, field,
			"%s: send the kernel's name of the type, 1 to %d bytes of [a-z0-9_-]", show(t), maxFSType)
	}
	if why, no := forbiddenTypes[t]; no {
		c.add(requirement.FilesystemTypeForbidden, field, "%s is %s: %s", t, why.reason, why.instead)
	}
	if t != "" && !slices.Contains(c.req.Performer.FSTypes, t) {
		c.add(requirement.FilesystemTypeOffered, field,
			"%s is not in performer.fs_types: return a type it has, or FAILED_PRECONDITION", show(t))
	}
}

func (c *check) fsSource(k *Filesystem) {
	const field = "filesystem.opaque"
	if k.Device != nil {
		c.device("filesystem.device", k.Device)
	}
	if k.Source == "" {
		return
	}
	c.text(field, k.Source)
	if len(k.Source) > maxValue {
		c.add(requirement.FilesystemSourceLength, field, "%d bytes: at most %d", len(k.Source), maxValue)
	}
	if hasDotDot(k.Source) {
		c.add(requirement.FilesystemSourceNoDotdot, field,
			`has the component "..": name what is meant from the top of what the server exports`)
	}
	switch {
	case k.Device != nil:
		c.add(requirement.FilesystemSourceNoPath, field, "set beside device: set one of them")
	case slices.Contains(deviceTypes, k.Type):
		c.add(requirement.FilesystemSourceNoPath, field,
			"%s opens its source as a path of whoever performs: send filesystem.device", k.Type)
	case k.Source[0] == '/' && (!slices.Contains(uncTypes, k.Type) || !strings.HasPrefix(k.Source, "//")):
		c.add(requirement.FilesystemSourceNoPath, field,
			"%s is a path of the node: send filesystem.device, or a bind", show(k.Source))
	}
}

// maxParameters is how many parameters fit maxJoined, one byte and a comma
// each. Those after it are not examined.
const maxParameters = (maxJoined + 1) / 2

func (c *check) parameters(all []Parameter) {
	if n := joinedLength(all); n > maxJoined {
		c.add(requirement.FilesystemParametersLength, "filesystem.parameters",
			"%d bytes as a comma-separated list: at most %d", n, maxJoined)
	}
	all = all[:min(len(all), maxParameters)]
	for i := range all {
		c.parameterKey(all, i)
		c.parameterValue(&all[i], i)
	}
}

// joinedLength is the length of "key=value,flag,…", in bytes.
func joinedLength(all []Parameter) int {
	n := max(len(all)-1, 0) // commas
	for i := range all {
		n += len(all[i].Key)
		if v := len(all[i].Text) + len(all[i].Secret.text); v > 0 {
			n += 1 + v
		}
	}
	return n
}

func parameterField(i int, name string) string {
	return fmt.Sprintf("filesystem.parameters[%d].%s", i, name)
}

func (c *check) parameterKey(all []Parameter, i int) {
	key := all[i].Key
	if fault := textFault(key); fault != "" {
		c.add(requirement.SpecText, parameterField(i, "key"), "%s: send text", fault)
	}
	if key == "" || len(key) > maxKey || !only(key, "._:-", true) {
		c.add(requirement.FilesystemParameterKey, parameterField(i, "key"),
			"%s: send 1 to %d bytes of [A-Za-z0-9._:-]", showKey(key), maxKey)
	}
	if w, no := forbiddenWord(key); no {
		c.add(w.rule, parameterField(i, "key"), "%s %s: %s", showKey(key), w.reason, w.instead)
	}
	for j := range i {
		switch earlier := all[j].Key; {
		case earlier == key:
			c.add(requirement.FilesystemParameterOnce, parameterField(i, "key"),
				"%s is parameters[%d] too: send each key once", showKey(key), j)
			return
		case negates(earlier, key), negates(key, earlier):
			c.add(requirement.FilesystemParameterOnce, parameterField(i, "key"),
				"%s contradicts parameters[%d]: send one of them", showKey(key), j)
			return
		}
	}
}

// negates reports whether a is "no" and b.
func negates(a, b string) bool {
	return b != "" && len(a) == len(b)+2 && a[:2] == "no" && a[2:] == b
}

// parameterValue never repeats the value in a detail: a Plugin may have sent
// a secret as text.
func (c *check) parameterValue(p *Parameter, i int) {
	value, name := p.Text, "text"
	if !p.Secret.IsZero() {
		if p.Text != "" {
			c.add(requirement.FilesystemParameterValue, parameterField(i, "text"),
				"set beside secret: set one of them")
		}
		value, name = p.Secret.text, "secret"
	}
	if fault := textFault(value); fault != "" {
		c.add(requirement.SpecText, parameterField(i, name), "%s: send text", fault)
	}
	if len(value) > maxValue {
		c.add(requirement.FilesystemParameterValue, parameterField(i, name),
			"%d bytes: at most %d", len(value), maxValue)
	}
	if strings.ContainsAny(value, "\x00,\n") {
		// Where the parameters are joined, a comma begins the next one.
		c.add(requirement.FilesystemParameterValue, parameterField(i, name),
			"holds a NUL byte, comma or newline: send a value without; it cannot be quoted")
	}
	if p.Key == "subvol" && hasDotDot(value) {
		c.add(requirement.FilesystemNoObjectWords, parameterField(i, name),
			`has the component "..": name a subvolume from the top of the filesystem`)
	}
}

func hasDotDot(path string) bool {
	for rest, more := path, true; more; {
		var name string
		if name, rest, more = strings.Cut(rest, "/"); name == ".." {
			return true
		}
	}
	return false
}

// addresses judges that the kernel need not ask anyone for the address of the
// server: it does not resolve names, and what would do it for it is a helper.
func (c *check) addresses(k *Filesystem) {
	keys, needed := addressKeys[k.Type]
	if !needed {
		return
	}
	for i := range k.Parameters {
		p := &k.Parameters[i]
		if !slices.Contains(keys, p.Key) {
			continue
		}
		if _, err := netip.ParseAddr(p.Text); err != nil {
			c.add(requirement.FilesystemNamesResolved, parameterField(i, "text"),
				"%s is not a numeric address: resolve the name while preparing", p.Key)
		}
		return
	}
	c.add(requirement.FilesystemNamesResolved, "filesystem.parameters",
		"%s without %s=: resolve the server while preparing and send its address",
		k.Type, strings.Join(keys, "= or "))
}

// fixedVersions are what the kernel's NFS client does not choose a version for.
var fixedVersions = []string{"3", "4.0", "4.1", "4.2"}

// version judges that the kernel does not choose the version of the protocol.
func (c *check) version(k *Filesystem) {
	if k.Type != "nfs" && k.Type != "nfs4" {
		return
	}
	for i := range k.Parameters {
		if p := &k.Parameters[i]; p.Key == "vers" {
			if !slices.Contains(fixedVersions, p.Text) {
				c.add(requirement.FilesystemVersionExplicit, parameterField(i, "text"),
					"vers leaves a choice: send one of %s", strings.Join(fixedVersions, ", "))
			}
			return
		}
	}
	c.add(requirement.FilesystemVersionExplicit, "filesystem.parameters",
		"%s without vers=: send one of %s", k.Type, strings.Join(fixedVersions, ", "))
}
