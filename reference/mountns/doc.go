// Package mountns is mount namespaces and what is mounted in them: opening and
// making namespaces, running code inside one, reading its mount table by unique
// id, comparing tables, and finding what should not be there.
package mountns
