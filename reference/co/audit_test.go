package co

import (
	"os"
	"slices"
	"testing"

	"golang.org/x/sys/unix"
)

func TestAudit(t *testing.T) {
	for _, test := range []struct {
		name  string
		spoil func(*rig, *Record)
		mend  func(*rig, *Record)
		want  []FindingKind
	}{
		{name: "nothing wrong"},
		{
			name:  "a bystander's mount on ours",
			spoil: func(r *rig, record *Record) { r.must(unix.Mount("x", record.Target, "tmpfs", 0, "")) },
			mend:  func(r *rig, record *Record) { r.must(unix.Unmount(record.Target, 0)) },
			want:  []FindingKind{CoveredMount},
		},
		{
			name:  "our mount taken away",
			spoil: func(r *rig, record *Record) { r.must(unix.Unmount(record.Target, 0)) },
			want:  []FindingKind{MissingMount},
		},
		{
			name:  "a directory of no preparation",
			spoil: func(r *rig, _ *Record) { r.mkdir("co/prepare/stray") },
			mend:  func(r *rig, _ *Record) { r.must(os.Remove(r.path("co/prepare/stray"))) },
			want:  []FindingKind{LeftDirectory},
		},
		{
			name: "a mount of no preparation",
			spoil: func(r *rig, _ *Record) {
				r.must(unix.Mount("x", r.mkdir("co/staging/stray"), "tmpfs", 0, ""))
			},
			mend: func(r *rig, _ *Record) {
				r.must(unix.Unmount(r.path("co/staging/stray"), 0))
				r.must(os.Remove(r.path("co/staging/stray")))
			},
			want: []FindingKind{LeftMount},
		},
		{
			name: "a record that cannot be read, and a stranger's file",
			spoil: func(r *rig, record *Record) {
				r.must(os.Truncate(r.co.ledger.file(record.Key().position()), 5))
				r.must(os.WriteFile(r.path("co/ledger/notes"), nil, 0o600))
			},
			mend: func(r *rig, record *Record) {
				r.must(r.co.ledger.put(record))
				r.must(os.Remove(r.path("co/ledger/notes")))
			},
			want: []FindingKind{DamagedRecord, ForeignOfLedger},
		},
		{
			name:  "a directory that others may enter",
			spoil: func(r *rig, _ *Record) { r.must(os.Chmod(r.path("co"), 0o755)) },
			mend:  func(r *rig, _ *Record) { r.must(os.Chmod(r.path("co"), 0o700)) },
			want:  []FindingKind{LooseDirectory},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			r := newRig(t)
			record := r.up(r.use(r.volume("v")))
			if test.spoil != nil {
				test.spoil(r, record)
			}
			found, err := Audit(r.ctx, r.path("co"))
			r.must(err)
			var got []FindingKind
			for _, f := range found {
				got = append(got, f.What)
			}
			if !slices.Equal(got, test.want) {
				t.Errorf("found %+v, want %v", found, test.want)
			}
			if test.mend != nil {
				test.mend(r, record)
			}
			r.down(record.Key())
			r.nothingLeft()
		})
	}
}
