"""Reads a data set that it defines itself through a DataLoader worker that is started anew."""

import sys

import torch
from torch.utils.data import DataLoader, Dataset


class Squares(Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, index):
        return torch.tensor(index**2)


def collate(items):
    return torch.stack(items)


if __name__ == "__main__":
    loader = DataLoader(Squares(), batch_size=2, num_workers=1, collate_fn=collate, multiprocessing_context=sys.argv[1])
    print([batch.tolist() for batch in loader], Squares.__module__)
