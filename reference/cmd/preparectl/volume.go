package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/spf13/cobra"
	"sigs.k8s.io/yaml"

	"github.com/csi-prepare/csi-prepare/reference/co"
	"github.com/csi-prepare/csi-prepare/reference/perform"
)

func newVolume() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "volume",
		Short: "Take a volume through its life: up and down",
		Args:  cobra.NoArgs,
	}
	cmd.AddCommand(newUp(), newDown())
	return cmd
}

// defaultPolicy is where a CO has the operator's policy.
const defaultPolicy = "/etc/csi-prepare/policy.yaml"

// policyFlag adds --policy and returns what reads it. Without a file at the
// default place the defaults hold.
func policyFlag(cmd *cobra.Command) func() (*co.Policy, error) {
	file := cmd.Flags().String("policy", defaultPolicy, "`file` with what the operator allows")
	_ = cmd.MarkFlagFilename("policy", "yaml", "yml", "json")
	return func() (*co.Policy, error) {
		text, err := readFile(*file)
		if errors.Is(err, os.ErrNotExist) && !cmd.Flags().Changed("policy") {
			return &co.Policy{}, nil
		}
		if err != nil {
			return nil, fmt.Errorf("policy: %w", err)
		}
		p, err := co.ParsePolicy(text)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", *file, err)
		}
		return p, nil
	}
}

// noPolicy is for commands that perform nothing.
func noPolicy() (*co.Policy, error) { return nil, nil }

// opened opens the CO's directory, which no other CO may have.
func opened(cmd *cobra.Command, dir string, policy func() (*co.Policy, error)) (*co.CO, error) {
	p, err := policy()
	if err == nil {
		err = answering(dir)
	}
	if err != nil {
		return nil, err
	}
	level := slog.LevelError + 1 // what fails is told by the command
	if v, err := cmd.Flags().GetBool("verbose"); err == nil && v {
		level = slog.LevelDebug
	}
	return co.Open(co.Config{
		Dir: dir, Policy: p, Log: slog.New(slog.NewTextHandler(cmd.ErrOrStderr(), &slog.HandlerOptions{Level: level})),
	})
}

// upFlags are the flags of volume up.
type upFlags struct {
	endpoint, target, prepareID, accessMode, fsType string
	pid                                             int
	readonly, block, ephemeral                      bool
	mountFlags                                      []string
	volumeContext, publishContext                   map[string]string
	secrets, stageSecrets                           string
	create                                          bool
	size                                            int64
}

func newUp() *cobra.Command {
	var f upFlags
	cmd := &cobra.Command{
		Use:   "up VOLUME",
		Short: "Stage, prepare and perform a volume for a directory or a process",
		Long: `up takes a volume through stage, prepare and perform, at a directory of this mount
namespace, or with --pid at a path as a process sees it. It returns when all is
done and verified; what fails is taken back. Repeated, it prepares again and
leaves what is performed as it is.

--create makes the volume first: the driver has to serve the controller at the
same endpoint. Secrets are read from files (YAML or JSON, a
map), never from the command line.`,
		Example: `  preparectl volume up vol-1 --endpoint unix:///run/csi.sock --target /mnt/data
  preparectl volume up vol-1 --endpoint unix:///run/csi.sock --pid 4711 --target /data --readonly
  preparectl volume up scratch --create --size 67108864 --endpoint unix:///run/csi.sock --target /mnt/data`,
		Args: cobra.ExactArgs(1),
	}
	flags := cmd.Flags()
	flags.StringVar(&f.endpoint, "endpoint", os.Getenv("CSI_ENDPOINT"), "the driver's socket, unix:///path; or CSI_ENDPOINT")
	flags.StringVar(&f.target, "target", "", "absolute `path` to perform at")
	flags.IntVar(&f.pid, "pid", 0, "`process` that is to have the volume; the target is a path as it sees it")
	flags.StringVar(&f.prepareID, "prepare-id", "", "`name` of this use; default: one made of target and process")
	flags.StringVar(&f.accessMode, "access-mode", "SINGLE_NODE_WRITER", "access `mode` of CSI")
	flags.StringVar(&f.fsType, "fs-type", "", "`type` of filesystem to ask for")
	flags.BoolVar(&f.readonly, "readonly", false, "read-only")
	flags.BoolVar(&f.block, "block", false, "as a raw block device")
	flags.BoolVar(&f.ephemeral, "ephemeral", false, "a volume that lives from its first use to its last")
	flags.StringArrayVar(&f.mountFlags, "mount-flag", nil, "`flag` of the volume capability; may be repeated")
	flags.StringToStringVar(&f.volumeContext, "volume-context", nil, "`key=value` of the volume context")
	flags.StringToStringVar(&f.publishContext, "publish-context", nil, "`key=value` of the publish context")
	flags.StringVar(&f.secrets, "secrets", "", "`file` with secrets for NodePrepareVolume")
	flags.StringVar(&f.stageSecrets, "stage-secrets", "", "`file` with secrets for NodeStageVolume")
	flags.BoolVar(&f.create, "create", false, "create the volume first, with VOLUME as its name")
	flags.Int64Var(&f.size, "size", 0, "so many `bytes`, with --create; 0 leaves it to the driver")
	flags.BoolP("verbose", "v", false, "tell each step")
	_ = cmd.RegisterFlagCompletionFunc("access-mode", cobra.FixedCompletions(accessModes(), cobra.ShellCompDirectiveNoFileComp))
	dir, policy, print := stateDir(cmd), policyFlag(cmd), output(cmd)
	cmd.ValidArgsFunction = completeVolumes(&places{state: defaultState, cmd: cmd}, 1)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if !strings.HasPrefix(f.target, "/") {
			return errors.New("--target: has to be an absolute path")
		}
		use, consumer, err := f.use(args[0])
		if err != nil {
			return err
		}
		defer func() { _ = consumer.Close() }()
		c, err := opened(cmd, *dir, policy)
		if err != nil {
			return failure{err}
		}
		defer func() { _ = c.Close() }()
		ctx := cmd.Context()
		if f.create {
			if err := createVolume(ctx, &use, f.size); err != nil {
				return failure{err}
			}
		}
		r, err := c.Up(ctx, use)
		if err != nil {
			return failure{err}
		}
		var ids []string
		for _, receipt := range r.Receipts {
			ids = append(ids, number(receipt.MountID))
		}
		return print(r, "DRIVER\tVOLUME\tPREPARE ID\tSTATE\tTARGET\tMOUNT IDS",
			[][]string{{r.Driver, r.VolumeID, r.PrepareID, phaseOf(r), r.Target, strings.Join(ids, " ")}})
	}
	return cmd
}

// use is what Up is asked for.
func (f *upFlags) use(volume string) (co.Use, *co.Consumer, error) {
	mode, known := csi.VolumeCapability_AccessMode_Mode_value[f.accessMode]
	if !known {
		return co.Use{}, nil, fmt.Errorf("--access-mode %s: have %s", f.accessMode, strings.Join(accessModes(), ", "))
	}
	capability := &csi.VolumeCapability{AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_Mode(mode)}}
	if f.block {
		capability.AccessType = &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}}
	} else {
		capability.AccessType = &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{FsType: f.fsType, MountFlags: f.mountFlags}}
	}
	u := co.Use{
		Endpoint: f.endpoint, VolumeID: volume, PrepareID: f.prepareID, Capability: capability,
		Readonly: f.readonly, Ephemeral: f.ephemeral,
		PublishContext: f.publishContext, VolumeContext: f.volumeContext,
		Target: perform.Target{Path: f.target},
	}
	var err error
	if u.Secrets, err = readSecrets(f.secrets); err == nil {
		u.StageSecrets, err = readSecrets(f.stageSecrets)
	}
	if err != nil {
		return u, nil, err
	}
	if u.PrepareID == "" {
		u.PrepareID = prepareIDOf(f.target, f.pid)
	}
	consumer := &co.Consumer{}
	if f.pid != 0 {
		if consumer, err = co.ConsumerOf(f.pid); err != nil {
			return u, nil, failure{err}
		}
		u.Target, u.UserNamespace = consumer.Target(f.target), consumer.UserNamespace
	}
	return u, consumer, nil
}

func accessModes() (names []string) {
	for i := range int32(len(csi.VolumeCapability_AccessMode_Mode_name)) {
		if name := csi.VolumeCapability_AccessMode_Mode_name[i]; name != "" && i != 0 {
			names = append(names, name)
		}
	}
	return names
}

// readSecrets reads a map of texts. An error never repeats a value.
func readSecrets(file string) (map[string]string, error) {
	if file == "" {
		return nil, nil
	}
	text, err := readFile(file)
	if err != nil {
		return nil, err
	}
	var secrets map[string]string
	if yaml.UnmarshalStrict(text, &secrets) != nil {
		return nil, fmt.Errorf("%s: want a map of texts, in YAML or JSON", file)
	}
	return secrets, nil
}

func newDown() *cobra.Command {
	var all, delete bool
	var timeout time.Duration
	cmd := &cobra.Command{
		Use:   "down VOLUME [PREPARE-ID]",
		Short: "Undo, unprepare and unstage a volume",
		Long: `down takes a volume away from a consumer: undo, unprepare, and unstage where it
was the last. What is in use stays, and the error says by whom. A volume with
several consumers needs the id of one, or --all.`,
		Example: "  preparectl volume down vol-1\n  preparectl volume down vol-1 consumer-1\n  preparectl volume down vol-1 --all --delete",
		Args:    cobra.RangeArgs(1, 2),
	}
	cmd.Flags().BoolVar(&all, "all", false, "of all consumers")
	cmd.Flags().BoolVar(&delete, "delete", false, "delete the volume afterwards; the driver has to serve the controller")
	cmd.Flags().DurationVar(&timeout, "timeout", 2*time.Minute, "give up after so `long`")
	cmd.Flags().BoolP("verbose", "v", false, "tell each step")
	dirs, policy, print := &places{cmd: cmd}, policyFlag(cmd), output(cmd)
	cmd.Flags().StringVar(&dirs.state, "state-dir", defaultState, "`directory` of the CO, which must not be running")
	cmd.ValidArgsFunction = completeVolumes(dirs, 2)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		ctx, cancel := context.WithTimeout(cmd.Context(), timeout)
		defer cancel()
		c, err := opened(cmd, dirs.state, policy)
		if err != nil {
			return failure{err}
		}
		defer func() { _ = c.Close() }()
		records, err := c.Records()
		if err != nil {
			fmt.Fprintln(cmd.ErrOrStderr(), err)
		}
		chosen, err := chosen(records, args, all)
		if err != nil {
			return failure{err}
		}
		keys, rows := []co.Key{}, [][]string{}
		endpoints := map[string]bool{}
		for _, r := range chosen {
			if err := c.Down(ctx, r.Key()); err != nil {
				return failure{withBusy(err)}
			}
			keys = append(keys, r.Key())
			rows = append(rows, []string{r.Driver, r.VolumeID, r.PrepareID, "down", r.Target})
			endpoints[r.Endpoint] = true
		}
		if delete {
			for endpoint := range endpoints {
				if err := deleteVolume(ctx, endpoint, args[0]); err != nil {
					return failure{err}
				}
			}
		}
		return print(keys, "DRIVER\tVOLUME\tPREPARE ID\tSTATE\tTARGET", rows)
	}
	return cmd
}

// withBusy says how to find out more about what is in use.
func withBusy(err error) error {
	var busy *perform.BusyError
	if errors.As(err, &busy) {
		return fmt.Errorf("%w; preparectl explain-busy %s", err, busy.Target)
	}
	return err
}

// chosen are the records that the arguments name.
func chosen(records []co.Record, args []string, all bool) (found []co.Record, err error) {
	for _, r := range records {
		if r.VolumeID == args[0] && (len(args) == 1 || r.PrepareID == args[1]) {
			found = append(found, r)
		}
	}
	switch {
	case len(found) == 0:
		return nil, fmt.Errorf("%s: the ledger has no such preparation; preparectl ls tells what it has", strings.Join(args, " "))
	case len(found) > 1 && !all:
		var ids []string
		for _, r := range found {
			ids = append(ids, r.PrepareID)
		}
		return nil, fmt.Errorf("%s has %d consumers (%s): name one, or use --all", args[0], len(found), strings.Join(ids, ", "))
	}
	return found, nil
}
