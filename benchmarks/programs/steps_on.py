"""Takes a step every 10 ms with all ranks; rank 0 notes when, and in which generation. Ends once FILE.enough is there.

Each rank notes its process in FILE.RANK.

steps_on.py FILE
"""

import os
import sys
import time

import torch
import torch.distributed as dist

with open(f"{sys.argv[1]}.{os.environ['RANK']}", "w") as file:
    print(os.getpid(), file=file)
dist.init_process_group("gloo")
ends = torch.zeros(1)
with open(sys.argv[1], "a", buffering=1) as file:
    while not ends.item():
        ends.fill_(os.path.exists(f"{sys.argv[1]}.enough"))
        dist.all_reduce(ends, op=dist.ReduceOp.MAX)
        if dist.get_rank() == 0:
            print(time.monotonic(), os.environ["TORCHELASTIC_RESTART_COUNT"], file=file)
        time.sleep(0.01)
dist.destroy_process_group()
