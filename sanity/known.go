package sanity

import "github.com/csi-prepare/csi-prepare/spec/requirement"

// knownAs names a public report of what happened to users when a requirement,
// or its nearest relative in CSI or in a container runtime, did not hold.
var knownAs = map[requirement.ID]string{
	requirement.PrepareReadonly:         "a read-only volume that is writable: kubernetes/kubernetes#61008, kubernetes-csi/csi-driver-smb#987",
	requirement.PrepareReaderOnly:       "an access mode taken for a hint: kubernetes/kubernetes#70505",
	requirement.PrepareNothingLeft:      "left behind by an error path: GoogleCloudPlatform/gcs-fuse-csi-driver#1576",
	requirement.UnprepareFinished:       "OK while the first call is still at work: kubernetes-sigs/vsphere-csi-driver#2811",
	requirement.UnpreparePathEmptied:    "the directory part never done: kubernetes-csi/csi-driver-host-path#139",
	requirement.UnprepareDataKept:       "the data deleted with the consumer: kubernetes/kubernetes#72257",
	requirement.IdempotencySame:         "a repeat fails and the consumer is stuck: enix/san-iscsi-csi#91",
	requirement.IdempotencyIncompatible: "other options accepted and ignored: kubernetes/cloud-provider-openstack#1799",
	requirement.IdempotencySingleWriter: "a second writer let in: kubernetes-csi/csi-test#420, #602",
	requirement.ConcurrencySamePair:     "two calls at once for one volume: ceph/ceph-csi#29",
	requirement.ConcurrencyOthersFree:   "a lock keyed too widely: kubernetes-csi/csi-driver-nfs#200",
	requirement.ConcurrencyCancelled:    "a lock never released: ceph/ceph-csi#2149",
	requirement.SecuritySecretsSP:       "secrets in errors and logs: rook/rook#2123, hetznercloud/csi-driver#754",
	requirement.AttributesBeforeVisible: "a read-only bind that is writable: moby/moby#3590, rkt/rkt#3304",
	requirement.AttributesRecursive:     "read-only at the top, writable below: moby/moby#44978",
	requirement.PerformAllOrNothing:     "part of what was performed left: containerd/containerd#14032",
	requirement.PerformOnce:             "mounts stacked by repeats, up to tens of thousands: spiffe/spiffe-csi#331",
	requirement.PerformTargetInRoot:     "a symlink in the container leads out of it: CVE-2021-30465",
	requirement.BindResolveBeneath:      "a symlink in the volume leads to the host: CVE-2021-25741",
	requirement.BindMountFSType:         "a plain directory handed out in place of a mount: IBM/ibm-spectrum-scale-csi#1070",
	requirement.UndoBusyReported:        "a lazy unmount reports success while files are open: kubernetes/kubernetes#53049",
	requirement.UndoRechecked:           "mounted again, unmounted once: kubernetes/kubernetes#72347",
	requirement.UndoNoRecursiveRemove:   "a recursive delete through a mount: containerd/containerd#1785",
	requirement.AuditTableRestored:      "temporary mounts that pile up: containerd/containerd#12139",
}

// KnownAs returns what is known to have happened to users when a requirement
// did not hold, with the public report, or "".
func KnownAs(id requirement.ID) string { return knownAs[id] }
