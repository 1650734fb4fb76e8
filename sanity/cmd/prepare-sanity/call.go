package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/dynamicpb"

	"github.com/csi-prepare/csi-prepare/sanity"
)

func newCall() *cobra.Command {
	var endpoint string
	var timeout time.Duration
	cmd := &cobra.Command{
		Use:   "call METHOD [JSON]",
		Short: "Make one call to a plugin, as a failure message tells it",
		Long: `call makes one call of csi.v1 or csi.prepare.v1alpha1 and prints the answer. The
request is protojson of the message; "-" reads it from standard input, which
keeps secrets off the command line. It exits 1 if the answer is an error.`,
		Example: `  export CSI_ENDPOINT=unix:///run/csi.sock
  prepare-sanity call GetPluginInfo
  prepare-sanity call NodeUnprepareVolume '{"volume_id": "v1", "prepare_id": "p1", "prepare_path": "/run/p1"}'`,
		Args: cobra.RangeArgs(1, 2),
		ValidArgsFunction: func(_ *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
			if len(args) > 0 {
				return nil, cobra.ShellCompDirectiveNoFileComp
			}
			return methodNames(), cobra.ShellCompDirectiveNoFileComp
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if endpoint == "" {
				return errors.New("--csi.endpoint: is empty, and so is $CSI_ENDPOINT; give the plugin's socket")
			}
			request := "{}"
			if len(args) == 2 {
				request = args[1]
			}
			if request == "-" {
				text, err := io.ReadAll(cmd.InOrStdin())
				if err != nil {
					return fmt.Errorf("reading the request: %w", err)
				}
				request = string(text)
			}
			ctx, cancel := context.WithTimeout(cmd.Context(), timeout)
			defer cancel()
			return call(ctx, cmd.OutOrStdout(), endpoint, args[0], request)
		},
	}
	cmd.Flags().StringVar(&endpoint, "csi.endpoint", os.Getenv("CSI_ENDPOINT"), "`endpoint` of the plugin; by default $CSI_ENDPOINT")
	cmd.Flags().DurationVar(&timeout, "timeout", sanity.DefaultTimeout, "deadline of the call")
	return cmd
}

// methods are the calls of the services a plugin may serve, by name.
func methods() map[string]protoreflect.MethodDescriptor {
	found := map[string]protoreflect.MethodDescriptor{}
	protoregistry.GlobalFiles.RangeFiles(func(f protoreflect.FileDescriptor) bool {
		if f.Package() != "csi.v1" && f.Package() != "csi.prepare.v1alpha1" {
			return true
		}
		for i := range f.Services().Len() {
			all := f.Services().Get(i).Methods()
			for j := range all.Len() {
				found[string(all.Get(j).Name())] = all.Get(j)
			}
		}
		return true
	})
	return found
}

func methodNames() []string {
	var names []string
	for name := range methods() {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

func call(ctx context.Context, out io.Writer, endpoint, name, text string) error {
	method, ok := methods()[name]
	if !ok {
		return fmt.Errorf("%s: no service of a plugin has this call; there are %s", name, strings.Join(methodNames(), ", "))
	}
	request, answer := dynamicpb.NewMessage(method.Input()), dynamicpb.NewMessage(method.Output())
	if err := protojson.Unmarshal([]byte(text), request); err != nil {
		return fmt.Errorf("the request is no %s: %w", method.Input().Name(), err)
	}
	if strings.HasPrefix(endpoint, "/") {
		endpoint = "unix://" + endpoint
	}
	conn, err := grpc.NewClient(endpoint, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithAuthority("localhost"))
	if err != nil {
		return fmt.Errorf("--csi.endpoint %s: %w", endpoint, err)
	}
	defer func() { _ = conn.Close() }()
	if err := conn.Invoke(ctx, fmt.Sprintf("/%s/%s", method.Parent().FullName(), method.Name()), request, answer); err != nil {
		return exit{1, fmt.Errorf("%s: %s: %s", name, status.Code(err), status.Convert(err).Message())}
	}
	_, err = fmt.Fprintln(out, protojson.MarshalOptions{Multiline: true, UseProtoNames: true, EmitUnpopulated: true}.Format(answer))
	return err
}
