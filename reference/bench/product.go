package main

import (
	"context"
	"os"
	"path/filepath"

	"github.com/csi-prepare/csi-prepare/reference/mountns"
	"github.com/csi-prepare/csi-prepare/reference/mountspec"
	"github.com/csi-prepare/csi-prepare/reference/perform"
)

// performer makes the variants of the product. Their cost includes what the
// name of this project stands for: every rule checked, the target resolved in
// root, the result compared with the table, undo by unique id.
type performer struct {
	ctx     context.Context
	grant   string            // the directory behind the grant "pool"
	keeping *perform.Executor // as a CO keeps one: sources and a trash
	parents []*os.File
}

func newPerformer(g *Ground) (*performer, error) {
	trash := g.Dir("trash")
	if err := os.Chmod(trash, 0o700); err != nil {
		return nil, err
	}
	keeping, err := perform.NewExecutor(perform.Keep{Sources: true, Trash: trash})
	if err != nil {
		return nil, err
	}
	return &performer{ctx: context.Background(), grant: g.source, keeping: keeping}, nil
}

func (p *performer) Close() error {
	for _, f := range p.parents {
		f.Close()
	}
	return p.keeping.Close()
}

// options are those of a CO that offers a granted directory and tmpfs.
func (p *performer) options(readonly bool) perform.Options {
	return perform.Options{
		Grants: map[string]string{"pool": p.grant},
		Request: mountspec.Request{
			Readonly: readonly,
			Performer: mountspec.Performer{
				Kinds:   []mountspec.KindName{mountspec.KindBind, mountspec.KindFilesystem},
				FSTypes: []string{"tmpfs"},
				Grants:  []string{"pool"},
			},
		},
	}
}

// binds are read-only binds of the granted "data", one a target.
func (p *performer) binds(name string, ns *mountns.Namespace, root *os.File, at string, targets ...string) Variant {
	specs := make([]mountspec.Spec, len(targets))
	for i, t := range targets {
		specs[i] = mountspec.Spec{
			Target:     t,
			Kind:       &mountspec.Bind{Source: mountspec.PathRef{Base: mountspec.BaseGranted, Grant: "pool", Relative: "data"}},
			Attributes: mountspec.Attributes{Readonly: true},
		}
	}
	return p.variant(name, perform.Target{Namespace: ns, Root: root, Path: at}, specs, p.options(true))
}

// bindAtParent is a bind whose target is one component below a descriptor
// that the caller has resolved already.
func (p *performer) bindAtParent(name, at string) Variant {
	parent, err := os.Open(filepath.Dir(at))
	if err != nil {
		return Variant{Name: name, Missing: err.Error()}
	}
	p.parents = append(p.parents, parent)
	return p.binds(name, nil, parent, "/"+filepath.Base(at), "")
}

// plainBind is a bind of a directory given as prepare_path, writable as the
// source, by e.
func (p *performer) plainBind(name string, e *perform.Executor, source, at string) Variant {
	o := p.options(false)
	o.Prepare = source
	specs := []mountspec.Spec{{Kind: &mountspec.Bind{Source: mountspec.PathRef{Base: mountspec.BasePrepare}}}}
	return variantOf(name, p.ctx, e, perform.Target{Path: at}, specs, o)
}

func (p *performer) tmpfs(at string) Variant {
	specs := []mountspec.Spec{{
		Kind: &mountspec.Filesystem{Type: "tmpfs", Parameters: []mountspec.Parameter{{Key: "size", Text: "1m"}}},
	}}
	return p.variant(product, perform.Target{Path: at}, specs, p.options(false))
}

func (p *performer) variant(name string, t perform.Target, specs []mountspec.Spec, o perform.Options) Variant {
	return variantOf(name, p.ctx, p.keeping, t, specs, o)
}

func variantOf(name string, ctx context.Context, e *perform.Executor, t perform.Target, specs []mountspec.Spec, o perform.Options) Variant {
	var made *perform.Performed
	return Variant{
		Name: name,
		Perform: func() (err error) {
			made, err = e.Perform(ctx, t, specs, o)
			return err
		},
		Undo: func() error { return e.Undo(ctx, t.Namespace, made.Receipts) },
	}
}
