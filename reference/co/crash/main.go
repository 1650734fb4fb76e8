package crash

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"syscall"
	"time"

	"github.com/csi-prepare/csi-prepare/reference/co"
)

// The processes of a campaign.
const (
	roleVariable = "CSI_PREPARE_CRASH_ROLE"
	roleCampaign = "campaign"
	roleCO       = "co"
	roleConsumer = "consumer"
)

// Main has to be called first thing in main. In a process that a campaign has
// started it does that process's part and ends it. Otherwise it starts the
// program again in a mount namespace of its own, where Main returns, and ends
// with it.
func Main() {
	co.Child()
	switch os.Getenv(roleVariable) {
	case roleCO:
		os.Exit(exit(runCO(os.Stdin, os.Stdout)))
	case roleConsumer:
		os.Exit(exit(runConsumer(os.Stdin, os.Stdout)))
	case roleCampaign:
		return
	}
	cmd := self(roleCampaign)
	cmd.Args = append(cmd.Args[:1], os.Args[1:]...)
	cmd.Stdin, cmd.Stdout = os.Stdin, os.Stdout
	cmd.SysProcAttr.Unshareflags = syscall.CLONE_NEWNS
	err := cmd.Run()
	var ended *exec.ExitError
	if errors.As(err, &ended) {
		os.Exit(max(ended.ExitCode(), 1))
	}
	os.Exit(exit(err))
}

func exit(err error) int {
	if err == nil {
		return 0
	}
	fmt.Fprintln(os.Stderr, err)
	return 1
}

// chance is a random time below a bound.
func chance(below time.Duration) time.Duration {
	return time.Duration(rand.Int64N(int64(below))) //nolint:gosec // a moment to kill at is no secret
}

// self is this program in another part, which ends with this one.
func self(role string) *exec.Cmd {
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), roleVariable+"="+role)
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	return cmd
}
