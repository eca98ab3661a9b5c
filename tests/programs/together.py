"""Workers of jobs that run at once: `together.py THIS OTHER...`. When all workers of all are there, each job's meet at their
MASTER_PORT as in meets.py."""

import sys

from signs import RANK, WORLD_SIZE, put, wait

put(f"up-{sys.argv[1]}-{RANK}")
for job in sys.argv[1:]:
    for rank in range(WORLD_SIZE):
        wait(f"up-{job}-{rank}")

import meets  # noqa: F401 - it is what they do then
