package server

import (
	"errors"

	"github.com/spf13/cobra"
)

// UsageError is an error of the command line.
type UsageError struct{ Err error }

// Error returns the reason.
func (e UsageError) Error() string { return e.Err.Error() }

// Unwrap returns the reason.
func (e UsageError) Unwrap() error { return e.Err }

// ExitCode is the exit code of a command for its error: 0 for none, 2 for an
// error of the command line, else 1.
func ExitCode(err error) int {
	var usage UsageError
	switch {
	case err == nil:
		return 0
	case errors.As(err, &usage):
		return 2
	}
	return 1
}

// NoArgs is cobra.NoArgs with a UsageError.
func NoArgs(cmd *cobra.Command, args []string) error {
	if err := cobra.NoArgs(cmd, args); err != nil {
		return UsageError{Err: err}
	}
	return nil
}
