"""Two ranks in a gloo group: rank 1 ends as the argument says, while rank 0 waits in a collective: `torch_fail.py HOW`."""

import atexit
import os
import signal
import sys

import torch
import torch.distributed as dist
from signs import RANK, WORLD_SIZE


def step():
    total = torch.tensor([10.0**RANK])
    dist.all_reduce(total)
    return total.item()


def raises_and_stays():
    """Close the connections to the others, and then never come to an end: the others die first."""

    def stay():
        while True:
            signal.pause()  # returns when the stacks are captured

    atexit.register(stay)
    try:
        raise ValueError(f"rank {RANK} has seen a NaN")
    finally:
        dist.destroy_process_group()


def is_killed():
    os.kill(os.getpid(), signal.SIGKILL)


def sends_more():
    """Call another collective: a thread of gloo's in rank 0, which has less room, throws and aborts."""
    dist.all_reduce(torch.ones(4000))


def is_done():
    sys.exit()


method = os.environ["DDPLAUNCH_INIT_METHOD"]
place = {} if method == "env://" else {"rank": RANK, "world_size": WORLD_SIZE}
dist.init_process_group("gloo", init_method=method, **place)
atexit.register(dist.destroy_process_group)  # left open, torch 2.13 now and then aborts at the interpreter's end
step()
if RANK == 1:
    globals()[sys.argv[1]]()
step()
