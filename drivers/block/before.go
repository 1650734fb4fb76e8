package block

import "github.com/csi-prepare/csi-prepare/drivers/server"

// before is called before each act that outlives the process: on a record, a
// file, a device or a filesystem. Only tests set it, to end the process there.
var before = func(act string) {}

// records are server.Records that announce what they are about to do.
type records[T any] struct{ *server.Records[T] }

func (r records[T]) Put(k server.Key, v T) error {
	before("record")
	return r.Records.Put(k, v)
}

func (r records[T]) Delete(k server.Key) error {
	before("forget")
	return r.Records.Delete(k)
}
