package sp

import (
	"cmp"
	"encoding/base64"
	"iter"
	"slices"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// mark makes a token recognizable: one that does not decode to it was not
// given by page.
const mark = "after:"

// page returns the keys of one page in order, and the token of the next page
// or "". A token names the last key given rather than a position, so that
// pages stay whole while entries come and go.
func page(keys iter.Seq[string], limit int32, token string) ([]string, string, error) {
	if limit < 0 {
		return nil, "", invalid("max_entries", "is negative")
	}
	sorted := slices.Sorted(keys)
	if token != "" {
		text, err := base64.RawURLEncoding.DecodeString(token)
		last, ours := strings.CutPrefix(string(text), mark)
		if err != nil || !ours {
			return nil, "", status.Error(codes.Aborted, "starting_token: was not given by this plugin; list from the start")
		}
		first, found := slices.BinarySearchFunc(sorted, last, cmp.Compare[string])
		if found {
			first++
		}
		sorted = sorted[first:]
	}
	if limit == 0 || int(limit) >= len(sorted) {
		return sorted, "", nil
	}
	sorted = sorted[:limit]
	return sorted, base64.RawURLEncoding.EncodeToString([]byte(mark + sorted[limit-1])), nil
}
