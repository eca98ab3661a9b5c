"""Trains for ten steps with DDP over gloo, as the least that a real job does; notes when the first and the tenth were done.

steps.py FOLDER
"""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(10, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
times = []
for _ in range(10):
    optimizer.zero_grad()
    model(torch.randn(4, 10)).sum().backward()
    optimizer.step()
    times.append(time.monotonic())
with open(f"{sys.argv[1]}/{os.environ['RANK']}", "w") as file:
    file.write(f"{times[0]!r} {times[-1]!r}")
dist.destroy_process_group()
