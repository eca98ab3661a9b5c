"""Meets the others over gloo; the last rank raises while they wait for it in a collective, and notes when: raises.py FOLDER."""

import sys
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, last = dist.get_rank(), dist.get_world_size() - 1
dist.barrier()
if rank == last:
    time.sleep(0.2)  # until the others wait
    with open(f"{sys.argv[1]}/raised", "w") as file:
        file.write(repr(time.monotonic()))
    raise ValueError("the last rank fails")
dist.all_reduce(torch.ones(4))
