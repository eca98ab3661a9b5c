"""TELL: what a job did, for people and for programs. Readers of the same facts, one file each."""
