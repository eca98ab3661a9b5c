"""Trains a small convolutional network with DDP over gloo, in bursts with the threads that it was given, one, and one per core.

trains.py FILE ROUNDS

The file gets a list of rounds: how many samples a second all workers took together in each of these three ways, which take turns.
"""

import json
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SAMPLES = 64  # of each step, shared by the workers
SECONDS = 0.5  # of a burst

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


def samples_per_second(threads):
    """All workers together, in one burst."""
    torch.set_num_threads(threads)
    steps, began = -1, 0.0
    going_on.fill_(1)
    while going_on.item():
        if steps == 0:  # what comes first is slower
            began = time.monotonic()
        optimizer.zero_grad()
        model(images).square().mean().backward()
        optimizer.step()
        steps += 1
        going_on.fill_(steps <= 0 or time.monotonic() - began < SECONDS)
        dist.broadcast(going_on, 0)
    return steps * SAMPLES / (time.monotonic() - began)


ways = [torch.get_num_threads(), 1, os.cpu_count()]
for threads in ways:
    samples_per_second(threads)
rounds = [[samples_per_second(threads) for threads in ways] for _ in range(int(sys.argv[2]))]
if os.environ["RANK"] == "0":
    with open(sys.argv[1], "w") as file:
        json.dump(rounds, file)
dist.destroy_process_group()
