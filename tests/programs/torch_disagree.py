"""Two workers that stand still for good: each waits for the other, in another collective, and would end after its step."""

import signal

import torch
import torch.distributed as dist
from signs import RANK, put

signal.signal(signal.SIGTERM, lambda *_: None)  # as a trainer notes that it is to save
dist.init_process_group("gloo")
tensor = torch.ones(4, 4)
dist.all_reduce(tensor)
put(f"ready-{RANK}")
if RANK == 0:
    dist.all_reduce(tensor)
else:
    dist.broadcast(tensor, 0)
dist.barrier()
