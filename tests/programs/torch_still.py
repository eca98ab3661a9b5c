"""Rank 0 computes without a word while the other waits in a barrier; then rank 1 does not come to the next collective."""

import threading
import time

import torch
import torch.distributed as dist
from signs import RANK, put


def compute(seconds):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        sum(range(10000))


dist.init_process_group("gloo")
if RANK == 0:
    compute(3)  # longer than it may hang
dist.barrier()
put(f"evaluated-{RANK}")
if RANK == 1:
    time.sleep(600)
threading.Thread(target=compute, args=[600], daemon=True).start()  # as NCCL does, which waits for a GPU with a busy CPU
dist.all_reduce(torch.ones(4))
