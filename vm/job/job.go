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

// Dirs in the guest.
const (
	// Payload holds what the host has laid ready, read-only.
	Payload = "/payload"
	// Results is where steps leave what the host is to get, by the
	// variable ResultsVariable.
	Results         = "/results"
	ResultsVariable = "CSI_PREPARE_RESULTS"
	// ResultsDevice is written as a tar archive of Results at the end.
	ResultsDeviceUML  = "/dev/ubda"
	ResultsDeviceQEMU = "/dev/vda"
)

// Job is the work of one guest.
type Job struct {
	// Modules of the kernel are files of the initramfs, loaded in order.
	Modules []string
	// HostRoot says that the guest's root is that of the host, below a
	// layer of its own: by hostfs, which User-Mode Linux alone has. Else it
	// is the initramfs.
	HostRoot bool
	// Payload is the directory of the host behind job.Payload, with HostRoot.
	Payload string
	// Device gets the results.
	Device string
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
