"""Rank 1 makes a client of the store at MASTER_PORT; rank 0 never imports torch, and waits until the client is connected."""

import os
import sys

from signs import RANK, put, wait

if RANK == 0:
    wait("served")
    put("imported", "torch" in sys.modules)
else:
    from torch.distributed import TCPStore

    TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    put("served")
