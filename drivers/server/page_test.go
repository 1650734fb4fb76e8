package server

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

func texts(n int) []*wrapperspb.StringValue {
	var all []*wrapperspb.StringValue
	for i := range n {
		all = append(all, wrapperspb.String(fmt.Sprintf("%032x.%032x", i, i)))
	}
	return all
}

func TestPagesGiveEveryEntryOnce(t *testing.T) {
	p := NewPages()
	for _, n := range []int{0, 1, 2, 9, 10, 11} {
		for _, limit := range []int32{0, 1, 3, 10, 100} {
			all := texts(n)
			var got []*wrapperspb.StringValue
			token := ""
			for {
				page, next, err := Page(p, all, (*wrapperspb.StringValue).GetValue, limit, token)
				if err != nil {
					t.Fatal(err)
				}
				if limit > 0 && len(page) > int(limit) {
					t.Fatalf("%d entries, limit %d", len(page), limit)
				}
				if len(next) > 128 {
					t.Errorf("token of %d bytes", len(next))
				}
				got = append(got, page...)
				if token = next; token == "" {
					break
				}
			}
			if !slices.Equal(got, all) {
				t.Errorf("n %d limit %d: got %d entries", n, limit, len(got))
			}
		}
	}
}

func TestPageKeepsToTheMessageSize(t *testing.T) {
	all := []*wrapperspb.StringValue{
		wrapperspb.String("a" + strings.Repeat("x", 2<<20)),
		wrapperspb.String("b" + strings.Repeat("x", 2<<20)),
	}
	position := func(s *wrapperspb.StringValue) string { return s.GetValue()[:1] }
	page, next, err := Page(NewPages(), all, position, 0, "")
	if len(page) != 1 || next == "" || err != nil {
		t.Errorf("got %d entries, token %q, %v", len(page), next, err)
	}
}

func TestPageGoesOnAfterAnEntryThatIsGone(t *testing.T) {
	p, all := NewPages(), texts(4)
	_, token, err := Page(p, all, (*wrapperspb.StringValue).GetValue, 2, "")
	if err != nil {
		t.Fatal(err)
	}
	rest := []*wrapperspb.StringValue{all[0], all[2], all[3]} // all[1] was the last one given
	page, next, err := Page(p, rest, (*wrapperspb.StringValue).GetValue, 0, token)
	if err != nil || next != "" || !slices.Equal(page, all[2:]) {
		t.Errorf("got %v, %q, %v", page, next, err)
	}
}

func TestPageRefuses(t *testing.T) {
	p, all := NewPages(), texts(4)
	_, token, _ := Page(p, all, (*wrapperspb.StringValue).GetValue, 2, "")
	for _, tt := range []struct {
		name  string
		limit int32
		token string
		want  codes.Code
	}{
		{"negative limit", -1, "", codes.InvalidArgument},
		{"text", 0, "nonsense", codes.Aborted},
		{"a position without its code", 0, token[:strings.LastIndexByte(token, '.')], codes.Aborted},
		{"changed", 0, "0" + token, codes.Aborted},
		{"of another process", 0, NewPages().seal("x"), codes.Aborted},
		{"dots", 0, "..", codes.Aborted},
	} {
		if _, _, err := Page(p, all, (*wrapperspb.StringValue).GetValue, tt.limit, tt.token); status.Code(err) != tt.want {
			t.Errorf("%s: got %v, want %v", tt.name, err, tt.want)
		}
	}
}
