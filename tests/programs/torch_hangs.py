"""Four workers that hang for good: rank 1 in C with the GIL held while rank 0 waits for it, ranks 2 and 3 since they disagree."""

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from signs import RANK, put

dist.init_process_group("gloo", timeout=timedelta(minutes=10))
left, right = dist.new_group([0, 1]), dist.new_group([2, 3], group_desc="pipeline")
tensor = torch.ones(4, 4)
dist.all_reduce(tensor)

if os.fork() == 0:  # as a DataLoader forks, with the threads of torch in the parent only
    put(f"child-{RANK}")
    time.sleep(600)


def step():
    put(f"ready-{RANK}")
    if RANK == 1:
        pow(7, 10**9, 10**300_000 + 1)  # minutes in C
    elif RANK == 3:
        dist.broadcast(tensor, 2, group=right)
    else:
        dist.all_reduce(tensor, group=left if RANK == 0 else right)
    dist.barrier()
    time.sleep(600)


step()
