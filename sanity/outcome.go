package sanity

import (
	"errors"
	"fmt"

	"github.com/csi-prepare/csi-prepare/sanity/report"
	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

// ending is why the body of a spec ended early. It travels as an error out
// of the thread the body runs on.
type ending struct {
	outcome report.Outcome
	message string
	// Of a failed spec:
	breaks   requirement.ID
	evidence *report.Evidence
}

func (e *ending) Error() string { return string(e.outcome) + ": " + e.message }

// end unwinds the body of a spec.
func end(e *ending) { panic(e) }

// caught runs f and returns how it ended early, nil if it did not. Any other
// panic is a fault of the suite; it goes on.
func caught(f func()) (e *ending) {
	defer func() {
		switch p := recover().(type) {
		case nil:
		case *ending:
			e = p
		default:
			panic(p)
		}
	}()
	f()
	return nil
}

// result is how one spec came out, as it goes from the spec to the report.
type result struct {
	Outcome  report.Outcome   `json:"outcome"`
	Message  string           `json:"message,omitempty"`
	Breaks   requirement.ID   `json:"breaks,omitempty"`
	Evidence *report.Evidence `json:"evidence,omitempty"`
	// Body is the time spent in the spec itself and in taking away what it
	// made, in seconds; the rest of its time is the suite's overhead.
	Body float64 `json:"body"`
}

func resultOf(err error) result {
	var e *ending
	switch {
	case err == nil:
		return result{Outcome: report.Passed}
	case errors.As(err, &e):
		return result{Outcome: e.outcome, Message: e.message, Breaks: e.breaks, Evidence: e.evidence}
	default:
		return result{Outcome: report.CouldNotRun, Message: err.Error()}
	}
}

func couldNotRun(format string, args ...any) *ending {
	return &ending{outcome: report.CouldNotRun, message: fmt.Sprintf(format, args...)}
}

func unsupported(why string) *ending {
	return &ending{outcome: report.Unsupported, message: why}
}
