package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/csi-prepare/csi-prepare/reference/co"
	"github.com/csi-prepare/csi-prepare/reference/mountns"
	"github.com/csi-prepare/csi-prepare/reference/mountspec/wire"
	"github.com/csi-prepare/csi-prepare/spec/preparev1alpha1"
)

// option is what became of one option of one mount.
type option struct {
	MountID uint64 `json:"mount_id,omitempty"`
	Target  string `json:"target"`
	Name    string `json:"option"`
	// Requested, Spec and Effective are the option as it was asked for, as the
	// mount spec has it, and as the kernel shows it; "" where it is not.
	Requested string `json:"requested,omitempty"`
	Spec      string `json:"spec,omitempty"`
	Effective string `json:"effective,omitempty"`
	// Verdict is one of the constants below.
	Verdict string `json:"verdict"`
}

// What can become of an option.
const (
	applied    = "applied"
	addedTo    = "added" // by policy, or by the kernel's default
	ignored    = "ignored by the kernel"
	dropped    = "not in the mount spec" // the plugin, or whoever asked it, has left it out
	refused    = "refused"
	notShown   = "not shown by the kernel" // a default, or nothing the filesystem tells
	notThere   = "not mounted"
	notKernels = "for mount(8), not for the kernel"
	noValue    = "in effect; the value asked for is not kept"
)

func newDiff() *cobra.Command {
	var specs string
	var requested []string
	cmd := &cobra.Command{
		Use:   "diff VOLUME",
		Short: "Compare what was requested, what the mount spec says and what is in effect",
		Long: `diff follows each option of a volume from the request to the mount spec to what
the kernel shows: applied, added by policy, not in the mount spec, ignored by the
kernel, or refused. It exits 1 if something that was asked for is not in effect. Nothing is read but
mount tables.

For a volume that a kubelet has published there are no mount specs, and nothing
on the node says what was asked for: give it with --option.`,
		Example: "  preparectl diff vol-1\n  preparectl diff vol-1 --option noatime --option commit=60\n  preparectl diff vol-1 --specs specs.json",
		Args:    cobra.ExactArgs(1),
	}
	dirs, print := bothDirs(cmd), output(cmd)
	cmd.Flags().StringVar(&specs, "specs", "", "`file` with the mount specs (protojson), if the ledger does not have them")
	cmd.Flags().StringArrayVar(&requested, "option", nil, "an `option` that was asked for; may be repeated")
	cmd.ValidArgsFunction = completeVolumes(dirs, 1)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		ctx, cancel := context.WithTimeout(cmd.Context(), limit)
		defer cancel()
		k := &asker{}
		defer k.close()
		var messages []*preparev1alpha1.MountSpec
		if specs != "" {
			text, err := readFile(specs)
			if err == nil {
				messages, err = wire.Unmarshal(text)
			}
			if err != nil {
				return failure{err}
			}
		}
		m, err := readMachine(ctx)
		if err != nil {
			return failure{err}
		}
		records, damaged := dirs.records()
		all, unread := dirs.published(k, m)
		options := []option{}
		known := false
		for i := range records {
			if r := &records[i]; r.VolumeID == args[0] || r.PrepareID == args[0] {
				known = true
				options = append(options, diffRecord(r, messages, requested, m)...)
			}
		}
		for _, p := range of(all, args[0]) {
			known = true
			options = append(options, diffPlace(&p, m.own().ID, requested)...)
		}
		if !known {
			return failure{errors.Join(damaged, unread, fmt.Errorf("%s: no such volume in the ledger or the kubelet's directory", args[0]))}
		}
		bad, rows := 0, [][]string{}
		for _, o := range options {
			if o.Verdict == ignored || o.Verdict == dropped || o.Verdict == refused || o.Verdict == notThere {
				bad++
			}
			rows = append(rows, []string{o.Target, o.Name, o.Requested, o.Spec, o.Effective, o.Verdict})
		}
		if err := print(options, "TARGET\tOPTION\tREQUESTED\tSPEC\tEFFECTIVE\tVERDICT", rows); err != nil {
			return err
		}
		if bad > 0 {
			return failure{errors.New(plural(bad, "option is", "options are") + " not in effect")}
		}
		return nil
	}
	return cmd
}

// diffRecord compares the mounts of a preparation, one for each mount spec.
func diffRecord(r *co.Record, messages []*preparev1alpha1.MountSpec, requested []string, m *machine) (all []option) {
	if r.Asked != nil {
		requested = append(slices.Clone(r.Asked.MountFlags), requested...)
	}
	if r.Readonly {
		requested = append([]string{"ro"}, requested...)
	}
	if messages == nil && r.Specs != nil {
		// What the CO wrote is what it reads; else there is nothing to compare.
		messages, _ = wire.Unmarshal(r.Specs)
	}
	if r.Error != "" {
		all = append(all, option{Target: r.Target, Name: "(last act)", Effective: r.Error, Verdict: refused})
	}
	for i, receipt := range r.Receipts {
		var spec *preparev1alpha1.MountSpec
		if i < len(messages) {
			spec = messages[i]
		}
		var mount mountns.Mount
		found := false
		if space := m.space(receipt.MntnsID); space != nil {
			mount, found = space.Table.ByID(receipt.MountID)
		}
		if !found {
			all = append(all, option{MountID: receipt.MountID, Target: receipt.Target, Name: "(mount)", Verdict: notThere})
			continue
		}
		all = append(all, diffMount(&mount, spec, requested)...)
	}
	return all
}

// diffPlace compares what is mounted at a place of a kubelet.
func diffPlace(p *published, own uint64, requested []string) (all []option) {
	if len(p.Mounts) == 0 {
		return []option{{Target: p.Path, Name: "(mount)", Verdict: notThere}}
	}
	for i := range p.Mounts {
		if at := &p.Mounts[i]; at.Namespace == own || p.State == elsewhere {
			all = append(all, diffMount(&at.Mount, nil, requested)...)
		}
	}
	return all
}

// word is an option that the mount has, not the superblock.
type word struct {
	name string
	bit  uint64
	// unset says that the word asks for the bit not to be set.
	unset bool
}

var words = []word{
	{"ro", mountns.AttrReadonly, false},
	{"rw", mountns.AttrReadonly, true},
	{"nosuid", mountns.AttrNosuid, false},
	{"suid", mountns.AttrNosuid, true},
	{"nodev", mountns.AttrNodev, false},
	{"dev", mountns.AttrNodev, true},
	{"noexec", mountns.AttrNoexec, false},
	{"exec", mountns.AttrNoexec, true},
	{"nosymfollow", mountns.AttrNosymfollow, false},
	{"noatime", mountns.AttrNoatime, false},
	{"strictatime", mountns.AttrStrictatime, false},
	{"relatime", mountns.AttrAtimeMask, true},
	{"nodiratime", mountns.AttrNodiratime, false},
}

// holds says that a mount is as the word asks. A superblock that is read-only
// makes it read-only as well.
func (w *word) holds(m *mountns.Mount) bool {
	set := m.Attr&w.bit != 0 || w.bit == mountns.AttrReadonly && m.SBReadonly
	return set != w.unset
}

// asks says that a mount spec asks for the word.
func (w *word) asks(s *preparev1alpha1.MountSpec) bool {
	a := s.GetAttributes()
	switch w.name {
	case "ro":
		return a.GetReadonly() || s.GetFilesystem().GetSuperblockReadonly()
	case "nosuid":
		return a.GetNosuid()
	case "nodev":
		return a.GetNodev()
	case "noexec":
		return a.GetNoexec()
	case "nosymfollow":
		return a.GetNosymfollow()
	case "nodiratime":
		return a.GetNodiratime()
	case "noatime":
		return a.GetAtime() == preparev1alpha1.MountAttributes_NOATIME
	case "strictatime":
		return a.GetAtime() == preparev1alpha1.MountAttributes_STRICTATIME
	case "relatime":
		return a.GetAtime() == preparev1alpha1.MountAttributes_RELATIME
	}
	return false
}

func diffMount(m *mountns.Mount, spec *preparev1alpha1.MountSpec, requested []string) (all []option) {
	asked := map[string]string{} // by key, the whole option
	for _, o := range requested {
		key, _, _ := strings.Cut(o, "=")
		asked[key] = o
	}
	add := func(name, request, inSpec, effective, verdict string) {
		all = append(all, option{m.ID, m.Point, name, request, inSpec, effective, verdict})
	}
	for i := range words {
		w := &words[i]
		request, inSpec, effective := asked[w.name], "", ""
		delete(asked, w.name)
		if w.asks(spec) {
			inSpec = w.name
		}
		if w.holds(m) {
			effective = w.name
		}
		switch wanted := request != "" || inSpec != ""; {
		case wanted && effective != "":
			add(w.name, request, inSpec, effective, applied)
		case wanted && spec != nil && inSpec == "":
			add(w.name, request, "", "", dropped)
		case wanted:
			add(w.name, request, inSpec, "", ignored)
		case effective != "" && !w.unset:
			add(w.name, "", "", effective, addedTo)
		}
	}
	shown := parameters(m.SBOptions)
	for _, p := range spec.GetFilesystem().GetParameters() {
		key, inSpec := p.GetKey(), p.GetKey()
		if p.GetText() != "" {
			inSpec += "=" + p.GetText()
		}
		secret := p.GetSecret() != "" || p.GetText() == stripped
		if secret {
			inSpec = key + "=" + stripped
		}
		effective, found := shown[key]
		switch {
		case secret, !found:
			add(key, asked[key], inSpec, "", notShown)
		case effective == inSpec:
			add(key, asked[key], inSpec, effective, applied)
		default:
			add(key, asked[key], inSpec, effective, ignored)
		}
		delete(asked, key)
	}
	for _, o := range requested {
		key, _, _ := strings.Cut(o, "=")
		if asked[key] == "" {
			continue
		}
		delete(asked, key)
		effective, found := shown[key]
		switch {
		case userWord(key):
			add(key, o, "", "", notKernels)
		case found && strings.HasSuffix(o, "="):
			add(key, o, "", effective, noValue)
		case found && effective == o:
			add(key, o, "", effective, applied)
		case found || spec == nil:
			add(key, o, "", effective, ignored)
		default:
			add(key, o, "", "", dropped)
		}
	}
	return all
}

// stripped stands for a secret where mount specs are kept.
const stripped = "***stripped***"

// parameters are the options that a superblock shows, by key.
func parameters(options string) map[string]string {
	all := map[string]string{}
	for o := range strings.SplitSeq(options, ",") {
		key, _, _ := strings.Cut(o, "=")
		all[key] = o
	}
	return all
}

// userWord says that mount(8) acts on an option and no kernel gets it.
func userWord(key string) bool {
	switch key {
	case "defaults", "auto", "noauto", "nofail", "_netdev", "user", "users", "nouser", "owner", "group", "loop", "offset", "sizelimit", "bg", "fg":
		return true
	}
	return strings.HasPrefix(key, "x-") || strings.HasPrefix(key, "X-")
}
