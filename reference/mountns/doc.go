// Package mountns is mount namespaces and what is mounted in them: opening and
// making namespaces, running code inside one, reading its mount table by unique
// id, comparing tables, and finding what should not be there.
//
// # Namespaces
//
// A [Namespace] is an open file, never a process number or a path kept for
// later. [Namespace.Do] runs a function on a thread that has hopped in and hops
// out again; threads are pooled, are never the leader of the process, and
// between visits are in the namespace the process began in. Reading needs no
// hop: listmount(2) and statmount(2) take the id of any namespace.
//
// # Tables
//
// A [Table] is read by unique mount id: a 64-bit number that the kernel never
// gives twice between two boots. On a kernel before 6.8 it is read from
// mountinfo, and ids are small numbers that are given again at once;
// [Table.Unique] tells, and [Diff] says what identity then means.
//
// # Audit
//
// There are four ways to see that something was mounted or left behind. They
// differ in price and in what escapes them:
//
//	                      price            escapes it
//	[Namespace.Since]     microseconds     a mount made (cloned, fsmount) before
//	                                       the mark and attached after, if as many
//	                                       others went; changes of mounts that stay
//	[Monitor]             an event each    changes of mounts that stay
//	[DiffIDs]             35 ns a mount    changes of mounts that stay
//	[Diff] of two tables  5 us a mount     nothing that is in the table
//
// All four look at mounts that are attached. A mount that was unmounted lazily
// while something used it has left every table and lives on; [Holders] finds
// who keeps it. A detached mount, made but never attached, is in no table
// either and shows itself only as somebody's descriptor, which Holders finds
// too. A copy of a mount in another namespace keeps its filesystem in use, and
// only the audit of the whole machine sees it: [TakeSnapshot] for the exact
// difference, [MarkMachine] for the cheap one, [All] for the namespaces.
//
// A sum of the four is exact: Since in normal operation, and the full
// comparison as the referee when Since says that something is unexplained, and
// at the end.
package mountns
