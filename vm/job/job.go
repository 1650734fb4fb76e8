// Package job is what the host of a guest and the init in it agree on: what is
// to be run there, and what came of it.
package job

// File is where the initramfs has the job.
const File = "/job.json"

// StatusPrefix begins the last line that a guest prints, followed by 0 if
// every step passed, else by 1. A guest that ends without this line has
// crashed.
const StatusPrefix = "csi-prepare-guest-status: "

// OutcomesFile is the member of the guest's results that holds the Outcomes.
const OutcomesFile = "outcomes.json"

// KernelLog is the member that holds what the guest's kernel has said.
const KernelLog = "kernel.log"

// What the guest has where.
const (
	// Payload holds what the host has laid ready, read-only.
	Payload = "/payload"
	// Results is where steps leave what the host is to get. A file in a
	// directory of it gets the directory's name, with its own extension.
	Results = "/results"
	// Device gets Results as a tar archive at the end.
	Device = "/dev/ubda"
)

// Job is the work of one guest.
type Job struct {
	// Modules of the kernel are files of the initramfs, loaded in order.
	Modules []string
	// Payload is the directory of the host whose files are in job.Payload.
	Payload string
	// Steps are run one after another, whatever became of earlier ones.
	Steps []Step
}

// Step is one program that is run to its end.
type Step struct {
	Name string
	Argv []string
	Env  []string `json:",omitempty"`
	// Background starts the program and goes on with the next step when it
	// has written a line. It is killed at the end.
	Background bool `json:",omitempty"`
	// Seconds until it is killed.
	Seconds int
}

// Results of a step, as in reports.
const (
	Passed      = "passed"
	Failed      = "failed"
	CouldNotRun = "could-not-run"
)

// ExitCouldNotRun is the exit code of a step that found nothing it could run.
const ExitCouldNotRun = 3

// Outcome of a step. What it wrote is in Results, as NAME.log.
type Outcome struct {
	Name    string  `json:"name"`
	Outcome string  `json:"outcome"`
	Seconds float64 `json:"seconds"`
	Message string  `json:"message,omitempty"`
}
