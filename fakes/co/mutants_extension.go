package co

import (
	"github.com/csi-prepare/csi-prepare/fakes/mutant"
	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

// AllowPrograms makes the Plain perform the worked extension with programs of
// these names. By default there are none.
func (p *Plain) AllowPrograms(programs map[string]string) { p.programs = programs }

// allowing is a fault of a Plain whose operator allows the shell.
func allowing(change func(*Plain)) fault {
	return plain(func(p *Plain) {
		p.AllowPrograms(map[string]string{"sh": "/bin/sh"})
		change(p)
	})
}

// Extensions that are performed as they should not be.
var extensionMutants = []Mutant{
	seat("runs-a-program-bare", mutant.Escape, requirement.ExtensionSandboxed,
		"the program of an extension runs as root, in the namespaces and the environment of the CO: the plugin has the node",
		allowing(func(p *Plain) { p.run = bare })),
	seat("overlooks-a-field-inside", mutant.Validation, requirement.ExtensionUnknownField,
		"a field of a later version inside an extension is dropped in silence: a restriction that it brings is not in force",
		allowing(func(p *Plain) { p.strictExtension = false })),
	owing("offers-extensions-unasked", mutant.Escape, requirement.ExtensionOperatorAllows,
		"every plugin is offered the extension: it may name programs, and no operator has said so",
		func(o *Orchestrator) { o.extensions = []string{CommandMountURL} }),
}
