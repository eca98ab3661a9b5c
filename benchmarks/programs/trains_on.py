"""Trains for so many seconds with DDP over gloo, tells how far it is and prints a line now and then; notes when each step ended.

trains_on.py FILE SECONDS
"""

import json
import os
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ddplaunch

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(4))))
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
ends = torch.zeros(1)
steps, began, ends_of_steps = 0, time.monotonic(), []
while not ends.item():
    optimizer.zero_grad()
    loss = model(torch.randn(64, 128)).square().mean()
    loss.backward()
    optimizer.step()
    steps += 1
    ends_of_steps.append(time.monotonic())
    ddplaunch.progress(steps, 1_000_000, loss=loss)
    if steps % 100 == 0:
        print("step", steps, flush=True)
        ends.fill_(time.monotonic() - began > float(sys.argv[2]))
        dist.all_reduce(ends, op=dist.ReduceOp.MAX)  # all end with the same step
if os.environ["RANK"] == "0":
    with open(sys.argv[1], "w") as file:
        json.dump(ends_of_steps, file)
dist.destroy_process_group()
