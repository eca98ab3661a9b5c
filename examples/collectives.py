"""Show what each collective of torch.distributed does, with numbers small enough to follow.

    ddplaunch --nproc-per-node 4 examples/collectives.py
    torchrun --nproc-per-node 4 examples/collectives.py
    python examples/collectives.py

Each rank begins with a row of 10 * rank + column: 23 is column 3 of rank 2. Rank 0 prints every row before and after.
"""

import argparse
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

import ddplaunch


def broadcast(row: Tensor) -> Tensor:
    """Every rank gets the row of rank 0."""
    dist.broadcast(row, src=0)
    return row


def reduce(row: Tensor) -> Tensor:
    """Rank 0 gets the sum of all rows. The tensors of the other ranks are undefined afterwards."""
    dist.reduce(row, dst=0)
    return row


def all_reduce(row: Tensor) -> Tensor:
    """Every rank gets the sum of all rows, as DDP does with gradients."""
    dist.all_reduce(row)
    return row


def gather(row: Tensor) -> Tensor:
    """Rank 0 gets all rows. The other ranks pass no list, but they must call, too."""
    if dist.get_rank() != 0:
        dist.gather(row, dst=0)
        return row[:0]
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
    dist.gather(row, rows, dst=0)
    return torch.cat(rows)


def all_gather(row: Tensor) -> Tensor:
    """Every rank gets all rows."""
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, row)
    return torch.cat(rows)


def scatter(row: Tensor) -> Tensor:
    """Each rank gets one column of the row of rank 0."""
    column = row.new_empty(1)
    dist.scatter(column, list(row.split(1)) if dist.get_rank() == 0 else None, src=0)
    return column


def reduce_scatter(row: Tensor) -> Tensor:
    """Each rank gets one column of the sum of all rows."""
    column = row.new_empty(1)
    dist.reduce_scatter(column, list(row.split(1)))
    return column


def all_to_all(row: Tensor) -> Tensor:
    """Rank r sends its column c to rank c: rows become columns."""
    columns = [row.new_empty(1) for _ in range(dist.get_world_size())]
    dist.all_to_all(columns, list(row.split(1)))
    return torch.cat(columns)


COLLECTIVES: list[Callable[[Tensor], Tensor]] = [
    broadcast, reduce, all_reduce, gather, all_gather, scatter, reduce_scatter, all_to_all,
]  # fmt: skip


def numbers(tensor: Tensor) -> str:
    return " ".join(f"{number:02}" for number in tensor.tolist()) or "-"


def main() -> None:
    argparse.ArgumentParser(description="Show what each collective of torch.distributed does.").parse_args()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for collective in COLLECTIVES:
        row = torch.tensor([10 * rank + column for column in range(world_size)], device=ddplaunch.device())
        before = numbers(row)
        try:
            after = numbers(collective(row))
        except RuntimeError as error:
            if "does not support" not in str(error):
                raise
            after = "not in this backend"  # on all ranks, so no rank waits for another
        lines = [""] * world_size
        dist.all_gather_object(lines, f"{before} -> {after}")
        if rank == 0:
            for other, line in enumerate(lines):
                print(f"{collective.__name__ if other == 0 else '':15}rank {other}  {line}")


if __name__ == "__main__":
    with ddplaunch.init_process_group():
        main()
