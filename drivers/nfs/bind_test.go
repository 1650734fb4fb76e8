package nfs_test

import (
	"github.com/csi-prepare/csi-prepare/reference/mountspec"
)

func bindSpecs() []mountspec.Spec {
	return []mountspec.Spec{{Kind: &mountspec.Bind{Source: mountspec.PathRef{Base: mountspec.BaseGranted, Grant: "data", Relative: "data"}}}}
}

func bindRequest() mountspec.Request {
	return mountspec.Request{Performer: mountspec.Performer{
		Kinds: []mountspec.KindName{mountspec.KindBind}, Grants: []string{"data"},
	}}
}
