"""Trains a small convolutional network with DDP over gloo, and writes how many samples a second all workers took together.

trains.py FILE
"""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SAMPLES = 64  # of each step, shared by the workers
SECONDS = 3.0

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(
    nn.Sequential(
        nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(64 * 14 * 14, 10)
    )
)  # fmt: skip
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
images = torch.randn(SAMPLES // dist.get_world_size(), 3, 32, 32)
going_on = torch.ones(1)
steps, began = -3, 0.0
while going_on.item():
    if steps == 0:  # what comes first is slower
        began = time.monotonic()
    optimizer.zero_grad()
    model(images).square().mean().backward()
    optimizer.step()
    steps += 1
    going_on.fill_(steps <= 0 or time.monotonic() - began < SECONDS)
    dist.broadcast(going_on, 0)
if os.environ["RANK"] == "0":
    with open(sys.argv[1], "w") as file:
        file.write(repr(steps * SAMPLES / (time.monotonic() - began)))
dist.destroy_process_group()
