"""Trains a small network with DDP on this worker's GPU: `trains.py STEPS [PAUSE]`; prints each loss exactly."""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import ddplaunch

steps, pause = int(sys.argv[1]), float(sys.argv[2]) if sys.argv[2:] else 0.0
signs = os.environ.get("DDP_TEST_DIR")
torch.manual_seed(0)
ddplaunch.init_process_group()
device = ddplaunch.device()
module = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10)).to(device)
model = torch.nn.parallel.DistributedDataParallel(module)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for step in range(steps):
    images, labels = torch.randn(64, 256).to(device), torch.randint(10, (64,)).to(device)
    loss = torch.nn.functional.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step < 20:
        print(f"rank {dist.get_rank()} {dist.get_backend()} {device} step {step}: {loss.item().hex()}", flush=True)
    if step == 5 and signs:
        Path(signs, f"trains-{dist.get_rank()}").touch()
    time.sleep(pause)
dist.destroy_process_group()
