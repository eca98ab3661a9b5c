"""A worker that says how far it is by `ddplaunch.progress()`, rank 1 by a bar; fails at step 5 of its first generation."""

import os
import sys

from signs import RANK, all_ready, wait

import ddplaunch

first = 1 if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" else 4
if RANK == 1:
    print("\r 42%|####      | 42/100 [00:04<00:05]", end="", file=sys.stderr, flush=True)
else:
    for step in range(first, 6):
        ddplaunch.progress(step, 1000, loss=1 / step)
all_ready()
if first == 1:
    wait("seen")
    sys.exit(3)
