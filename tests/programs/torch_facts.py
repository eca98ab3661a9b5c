"""A worker that puts up as facts-RANK what torch makes of the place it was given: `torch_facts.py [INIT_METHOD]...`.

It meets the others by each of these methods, then by DDPLAUNCH_INIT_METHOD.
"""

import json
import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing
from signs import RANK, WORLD_SIZE, put, wait
from torch.utils.data import DataLoader


def meet(number, method):
    place = {} if method == "env://" else {"rank": RANK, "world_size": WORLD_SIZE}
    dist.init_process_group(os.environ["DDPLAUNCH_BACKEND"], init_method=method, **place)
    total = torch.tensor([10.0**RANK])
    dist.all_reduce(total)
    facts = {"method": method, "rank": dist.get_rank(), "backend": dist.get_backend(), "total": total.item()}
    dist.destroy_process_group()
    # the store ends with rank 0's group: who came back sooner would meet the old one once more
    put(f"met-{number}") if RANK == 0 else wait(f"met-{number}")
    return facts


def fill(_index, shared):
    shared.fill_(7.0)


def spawned():
    """Have a fresh process write into memory that it shares with this one."""
    shared = torch.zeros(1).share_memory_()
    torch.multiprocessing.spawn(fill, args=(shared,), nprocs=1)
    return shared.item()


if __name__ == "__main__":
    methods = [*sys.argv[1:], os.environ["DDPLAUNCH_INIT_METHOD"]]
    facts = {
        "torchelastic": dist.is_torchelastic_launched(),
        "threads": torch.get_num_threads(),
        "meetings": [meet(number, method) for number, method in enumerate(methods)],
        "loaded": sum(batch.sum().item() for batch in DataLoader(torch.arange(100), batch_size=10, num_workers=2)),
        "spawned": spawned() if RANK == 0 else None,  # it imports torch again
    }
    put(f"facts-{RANK}", json.dumps(facts))
