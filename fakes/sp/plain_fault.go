package sp

import (
	"context"

	"google.golang.org/grpc"

	"github.com/csi-prepare/csi-prepare/fakes/mutant"
	"github.com/csi-prepare/csi-prepare/spec/requirement"
)

// plainFault makes a Plain wrong in one way.
type plainFault func(*Plain)

// csiSeat makes the entry of the tables of mutants of a Plain.
func csiSeat(name string, c mutant.Category, breaks requirement.ID, story string, f plainFault) Mutant {
	return Mutant{
		Mutant: mutant.Mutant{Name: name, Actor: requirement.SP, Category: c, Breaks: breaks, Story: story},
		plain:  f,
	}
}

// replaced replaces one method, known by the type of its request; next is the
// right one.
func replaced[Req, Resp any](f func(ctx context.Context, p *Plain, r *Req, next func() (*Resp, error)) (*Resp, error)) plainFault {
	return func(p *Plain) {
		p.faults = append(p.faults, func(ctx context.Context, request any, _ *grpc.UnaryServerInfo, h grpc.UnaryHandler) (any, error) {
			r, ok := request.(*Req)
			if !ok {
				return h(ctx, request)
			}
			resp, err := f(ctx, p, r, func() (*Resp, error) {
				answer, err := h(ctx, request)
				if err != nil {
					return nil, err
				}
				return answer.(*Resp), nil
			})
			if err != nil {
				return nil, err
			}
			return resp, nil
		})
	}
}

// altered changes an answer that is OK.
func altered[Req, Resp any](change func(*Plain, *Req, *Resp)) plainFault {
	return replaced(func(_ context.Context, p *Plain, r *Req, next func() (*Resp, error)) (*Resp, error) {
		answer, err := next()
		if err == nil {
			change(p, r, answer)
		}
		return answer, err
	})
}

// forgiving answers OK, with nothing, to what is refused if it is about.
func forgiving[Req, Resp any](about func(*Plain, *Req) bool) plainFault {
	return replaced(func(_ context.Context, p *Plain, r *Req, next func() (*Resp, error)) (*Resp, error) {
		if about(p, r) {
			return new(Resp), nil
		}
		return next()
	})
}

// repeats answers every call but the first for a key another way.
func repeats[Req, Resp any](key func(*Req) string, again func(p *Plain, r *Req, next func() (*Resp, error)) (*Resp, error)) plainFault {
	var seen memory[string, bool]
	return replaced(func(_ context.Context, p *Plain, r *Req, next func() (*Resp, error)) (*Resp, error) {
		if was, _ := seen.swap(key(r), true); was {
			return again(p, r, next)
		}
		return next()
	})
}

// with sets up a Plain before its fault.
func with(set func(*Config), f plainFault) plainFault {
	return func(p *Plain) {
		set(&p.config)
		f(p)
	}
}

func attaching(c *Config)  { c.Attach = true }
func stagingToo(c *Config) { c.Staging = true }
