"""Each step is two collectives, to which rank 2 comes 30 ms late, until rank 0 has been told that it is enough.

torch_late.py [STATUS]: what it ends with.
"""

import os
import sys
import time

import torch
import torch.distributed as dist
from signs import FOLDER, RANK

dist.init_process_group("gloo")
gradients, enough = torch.ones(8), torch.zeros(1)
while not enough.item():
    time.sleep(0.05 if RANK == 2 else 0.02)
    dist.all_reduce(gradients)
    if os.path.exists(os.path.join(FOLDER, "enough")):
        enough += 1
    dist.broadcast(enough, 0)
sys.exit(int(*sys.argv[1:]))
