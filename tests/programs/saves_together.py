"""Workers at different speeds that agree when to save and leave: `saves_together.py [fail] [loaders]`.

With `fail` rank 1 raises in the middle; with `loaders` each has a process that loads its data.
"""

import sys
import time

from signs import RANK, put
from torch.utils.data import DataLoader

import ddplaunch

with ddplaunch.init_process_group():
    for step, _ in enumerate(DataLoader(range(100_000), num_workers=int("loaders" in sys.argv))):
        if ddplaunch.should_stop(every=2):
            put(f"saved-{RANK}", step)
            break
        time.sleep(0.005 * RANK)
        if step == 3:
            put(f"ready-{RANK}")
            if RANK == 1 and "fail" in sys.argv:
                raise ValueError("rank 1 has seen a NaN")
