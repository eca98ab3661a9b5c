"""Workers with data loaders, at different speeds, that agree when to save and leave: `saves_together.py [fail]`.

With `fail` rank 1 raises in the middle.
"""

import sys
import time

from signs import RANK, put
from torch.utils.data import DataLoader

import ddplaunch

with ddplaunch.init_process_group():
    for step, _ in enumerate(DataLoader(range(100_000), num_workers=1)):
        if ddplaunch.should_stop(every=2):
            put(f"saved-{RANK}", step)
            break
        time.sleep(0.005 * RANK)
        if step == 3:
            put(f"ready-{RANK}")
            if RANK == 1 and sys.argv[1:] == ["fail"]:
                raise ValueError("rank 1 has seen a NaN")
