package server

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"slices"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

// maxPageBytes keeps a page below the 4 MiB a gRPC client accepts unless it
// was told otherwise.
const maxPageBytes = 3 << 20

// Pages cuts lists into pages. A token carries the position of the last entry
// given and a code only this process can make, so that a token it did not
// give is recognised, and a list that changes between two pages loses no
// entry that was there all the time.
type Pages struct{ key []byte }

// NewPages returns Pages with a key of its own.
func NewPages() *Pages { return &Pages{key: []byte(rand.Text())} }

// Page returns the entries of all, which is sorted by position, that follow
// token: at most limit, unless it is 0, and never more than a response can
// carry. The second result is the token of the next page, empty at the end.
// A negative limit is INVALID_ARGUMENT, a token that Pages did not give
// ABORTED. position has at most 90 bytes, so that the token keeps CSI's limit
// of 128.
func Page[T proto.Message](p *Pages, all []T, position func(T) string, limit int32, token string) ([]T, string, error) {
	if limit < 0 {
		return nil, "", Invalid("max_entries", "is negative", "set 0 for no limit, or a positive number")
	}
	if token != "" {
		last, ok := p.open(token)
		if !ok {
			return nil, "", status.Error(codes.Aborted, "starting_token: was not given by this process; begin again with an empty one")
		}
		start, found := slices.BinarySearchFunc(all, last, func(e T, last string) int { return strings.Compare(position(e), last) })
		if found {
			start++
		}
		all = all[start:]
	}
	n, size := 0, 0
	for ; n < len(all) && (limit == 0 || n < int(limit)); n++ {
		if size += proto.Size(all[n]) + 8; n > 0 && size > maxPageBytes {
			break
		}
	}
	if n == len(all) {
		return all, "", nil
	}
	return all[:n], p.seal(position(all[n-1])), nil
}

func (p *Pages) seal(position string) string {
	mac := hmac.New(sha256.New, p.key)
	mac.Write([]byte(position))
	return position + "." + hex.EncodeToString(mac.Sum(nil)[:16])
}

func (p *Pages) open(token string) (position string, ok bool) {
	i := strings.LastIndexByte(token, '.')
	if i < 0 {
		return "", false
	}
	return token[:i], hmac.Equal([]byte(p.seal(token[:i])), []byte(token))
}
