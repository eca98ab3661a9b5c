"""Two ranks read from data loaders with processes of their own, which never run dry; then rank 1 fails."""

import torch
from signs import RANK, all_ready, put
from torch.utils.data import DataLoader, IterableDataset


class Endless(IterableDataset):
    def __iter__(self):
        while True:
            yield torch.zeros(1000)


batches = iter(DataLoader(Endless(), batch_size=8, num_workers=2))
next(batches)
put(f"loading-{RANK}")
all_ready()
if RANK == 1:
    raise ValueError("boom among data loaders")
for _ in batches:
    pass
