// Package csiprepare is the root of csi-prepare: an amended Container Storage
// Interface in which a plugin returns mount specs and the orchestrator
// performs them. It holds no code; SPEC.md is the contract, and the
// directories below are described in docs/design.md.
package csiprepare
