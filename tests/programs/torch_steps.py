"""A training over gloo: rank 0 of each generation writes a line at each step, until the sign `finish` is up."""

import os
import time

import torch
import torch.distributed as dist
from signs import FOLDER, RANK, put

GENERATION = os.environ["TORCHELASTIC_RESTART_COUNT"]

dist.init_process_group("gloo")
put(f"place-{GENERATION}-{RANK}", f"{os.uname().nodename} {dist.get_world_size()}")
finish = torch.zeros(1)
while not finish:
    finish[0] = os.path.exists(os.path.join(FOLDER, "finish"))
    dist.all_reduce(finish)
    if RANK == 0:
        with open(os.path.join(FOLDER, "steps"), "a") as file:
            file.write(f"{GENERATION} {os.uname().nodename}\n")
    time.sleep(0.05)
dist.destroy_process_group()
