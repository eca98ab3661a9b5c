"""Uses the store at MASTER_PORT as a client before it joins the group; of several ranks, rank 0 has no torch until then.

Rank 0 waits at the named pipe "served" until rank 1 has used the store.
"""

import os
import sys
from datetime import timedelta

rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
if rank == 0 and world_size > 1:
    open("served").close()
    print("with torch" if "torch" in sys.modules else "without torch")
else:
    from torch.distributed import TCPStore

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=90))
    store.set("key", "stored")
    print(store.get("key").decode())
    if world_size > 1:
        open("served", "w").close()

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print(f"joined {int(total)}")
dist.destroy_process_group()
