"""A worker that uses all that ddplaunch offers a script, and puts up as facts-RANK what came of it; started by whatever."""

import json
import os
import signal
import sys
import time

import ddplaunch

IMPORTED = [name for name in ("torch", "ddplaunch.worker") if name in sys.modules]
for name, alone in (("RANK", "0"), ("WORLD_SIZE", "1")):
    os.environ.setdefault(name, alone)
from signs import RANK, WORLD_SIZE, put  # it needs them

if WORLD_SIZE == 1:
    del os.environ["RANK"], os.environ["WORLD_SIZE"]

import torch.distributed as dist


def refused(function, *args):
    try:
        function(*args)
    except (RuntimeError, ValueError) as error:
        return str(error)
    return None


def total():
    ones = ddplaunch.device()
    import torch

    summed = torch.tensor([10.0**RANK], device=ones)
    dist.all_reduce(summed)
    return summed.item()


facts = {"imported": IMPORTED, "without_group": refused(ddplaunch.should_stop)}
with ddplaunch.init_process_group():
    world = dist.group.WORLD
    ddplaunch.init_process_group()
    facts["same_again"] = dist.group.WORLD is world
    del world
    facts["other_again"] = refused(ddplaunch.init_process_group, "gloo")
    facts["place"] = [dist.get_rank(), dist.get_world_size(), dist.get_backend(), str(ddplaunch.device())]
    facts["totals"] = [total()]
facts["left"] = not dist.is_initialized()
for _ in range(0 if "--once" in sys.argv else 3):  # quick ones meet the others' new group, never their old one
    with ddplaunch.init_process_group():
        ddplaunch.should_stop()
        facts["totals"].append(total())

ddplaunch.init_process_group()
calls = 1
while not ddplaunch.should_stop():
    calls += 1
    time.sleep(0.001 * RANK)
    if RANK == WORLD_SIZE - 1 and calls == 7:
        os.kill(os.getpid(), signal.SIGUSR1)  # nobody else gets one
facts["stopped_at"] = calls
if "--destroy" in sys.argv:
    dist.destroy_process_group()
facts["still"] = ddplaunch.should_stop()
put(f"facts-{RANK}", json.dumps(facts))
