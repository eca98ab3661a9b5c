"""Two ranks in a gloo group: one of them, or all, end as the arguments say, while who is left waits in a collective.

`torch_fail.py HOW RANK|all`
"""

import atexit
import os
import signal
import sys

import torch
import torch.distributed as dist
from signs import RANK, WORLD_SIZE, all_ready, put

GENERATION = int(os.environ["TORCHELASTIC_RESTART_COUNT"])


def step():
    total = torch.tensor([10.0**RANK])
    dist.all_reduce(total)
    return total.item()


def raises():
    raise ValueError(f"rank {RANK} has seen a NaN")


def raises_and_stays():
    """Close the connections to the others, and then never come to an end: the others die first."""
    atexit.register(signal.pause)
    try:
        raises()
    finally:
        dist.destroy_process_group()


def raises_with_the_others():
    """Die only when the exception of every rank has been recorded, which comes before atexit."""
    atexit.register(all_ready)
    raises()


def raises_at_first():
    if GENERATION == 0:
        raises()


def exits():
    sys.exit(3)


def exits_at_once():
    os._exit(5)


def is_killed():
    os.kill(os.getpid(), signal.SIGKILL)


def is_done():
    sys.exit()


method = os.environ["DDPLAUNCH_INIT_METHOD"]
place = {} if method == "env://" else {"rank": RANK, "world_size": WORLD_SIZE}
dist.init_process_group("gloo", init_method=method, **place)
atexit.register(dist.destroy_process_group)  # left open, torch 2.13 now and then aborts at the interpreter's end
step()
how, who = sys.argv[1:]
if who in (str(RANK), "all"):
    globals()[how]()
put(f"total-{RANK}", f"{step()} in generation {GENERATION}")
