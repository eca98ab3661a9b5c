"""What runs inside a worker. Stands apart: it imports nothing of the launcher, and runs on any CPython from 3.8 on."""
