"""Waits on the GPU: an all_reduce over NCCL that is queued behind a kernel of a minute, and the main thread behind both."""

import os
from pathlib import Path

import torch
import torch.distributed as dist

dist.init_process_group("nccl")
one = torch.ones(4, device="cuda")
dist.all_reduce(one)
torch.cuda.synchronize()
torch.cuda._sleep(120_000_000_000)
dist.all_reduce(one)
Path(os.environ["DDP_TEST_DIR"], "waits").touch()
torch.cuda.synchronize()
