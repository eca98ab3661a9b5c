"""Rank 0 computes without a word while the other waits in a barrier; then rank 1 does not come to the next collective.

`torch_still.py deaf`: SIGTERM ends neither of them, and rank 1 ends once rank 0 has. `torch_still.py saves`: so it does, in the
handler of SIGTERM.
"""

import os
import signal
import sys
import threading
import time

import torch
import torch.distributed as dist
from signs import FOLDER, RANK, put


def compute(seconds):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        sum(range(10000))


dist.init_process_group("gloo")
if RANK == 0:
    compute(3)  # longer than it may hang
dist.barrier()
put(f"evaluated-{RANK}")


def save(*_):
    while not os.path.exists(os.path.join(FOLDER, "rank-0-has-ended")):
        time.sleep(0.1)
    sys.exit()


if sys.argv[1:]:
    signal.signal(signal.SIGTERM, save if sys.argv[1] == "saves" else signal.SIG_IGN)
if RANK == 1:
    time.sleep(600)
threading.Thread(target=compute, args=[600], daemon=True).start()  # as NCCL does, which waits for a GPU with a busy CPU
dist.all_reduce(torch.ones(4))
