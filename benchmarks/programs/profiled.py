"""Trains with DDP over gloo in phases of STEPS steps, in turns without a profiler, and under torch's; then until it is profiled.

profiled.py FOLDER STEPS ROUNDS

FOLDER/begun appears before the last phase, which goes on until FOLDER/window has two times of the day. FOLDER/steps gets the
median seconds of a step without, under torch's profiler, and between these times.
"""

import json
import os
import sys
import time
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

folder, steps, rounds = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(6)]))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
images = torch.randn(64, 256)
going_on = torch.ones(1)


def step():
    """Take one step, and return when it ended and how long it took."""
    began = time.time()
    optimizer.zero_grad()
    model(images).square().mean().backward()
    optimizer.step()
    return time.time(), time.time() - began


def steps_of_phase():
    """Take the steps of a phase; the first ones are slower."""
    return [step()[1] for _ in range(steps)][5:]


plain, under_torch = [], []
steps_of_phase()
for _ in range(rounds):
    plain += steps_of_phase()
    with profile(activities=[ProfilerActivity.CPU]):
        under_torch += steps_of_phase()
(folder / "begun").touch()
taken = []
while going_on.item():
    taken.append(step())
    going_on.fill_(not (folder / "window").exists())
    dist.broadcast(going_on, 0)
if os.environ["RANK"] == "0":
    low, high = json.loads((folder / "window").read_text())
    inside = [seconds for ended, seconds in taken if low < ended < high]
    (folder / "steps").write_text(json.dumps([median(plain), median(under_torch), median(inside)]))
dist.destroy_process_group()
