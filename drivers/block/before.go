package block

// before is called before each act that outlives the process: on a record, a
// file, a device or a filesystem. Only tests set it.
var before = func(act string) {}
