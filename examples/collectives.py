"""Show what each collective of torch.distributed does, and check every result on every rank.

    ddplaunch --nproc-per-node 4 examples/collectives.py
    torchrun --nproc-per-node 4 examples/collectives.py
    python examples/collectives.py

Each rank begins with one row of numbers, 10 * rank + column, so that every number says where it comes from. After each
collective a rank compares what it holds with what a pencil gives, and fails if they differ. Rank 0 prints both.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

Row = list[int]


class Outcome(NamedTuple):
    """What a rank held before and after a collective, and what it should hold; None: nothing is promised."""

    before: Tensor | None
    after: Tensor | None
    expected: Row | None


def join() -> tuple[torch.device, dist.Store]:
    """Join the other workers of the job; return the device of this one and the store at which they met."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    # ddplaunch says which device and backend are right here; the rest is for torchrun and plain python
    fallback = f"cuda:{local_rank}" if torch.cuda.is_available() else "cpu"
    device = torch.device(os.environ.get("DDPLAUNCH_DEVICE", fallback))
    backend = os.environ.get("DDPLAUNCH_BACKEND", "nccl" if torch.cuda.is_available() else "gloo")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store: dist.Store
    if "RANK" in os.environ:
        dist.init_process_group(backend)  # reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT
        store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    else:
        store = dist.HashStore()  # in memory: nobody else has to find it
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    return device, store


def row(rank: int) -> Row:
    """Return the numbers that a rank begins with."""
    return [10 * rank + column for column in range(dist.get_world_size())]


def mine(device: torch.device) -> Tensor:
    """Return the row of this rank as a tensor."""
    return torch.tensor(row(dist.get_rank()), device=device)


def everybody() -> range:
    """Return all ranks; each holds one column for each of them."""
    return range(dist.get_world_size())


def sums() -> Row:
    """Return the sum of all rows."""
    return [sum(row(rank)[column] for rank in everybody()) for column in everybody()]


def broadcast(device: torch.device) -> Outcome:
    """Every rank gets the row of rank 0."""
    cells = mine(device)
    dist.broadcast(cells, src=0)
    return Outcome(mine(device), cells, row(0))


def reduce(device: torch.device) -> Outcome:
    """Rank 0 gets the sum of all rows; what the tensors of the others hold afterwards is not defined."""
    cells = mine(device)
    dist.reduce(cells, dst=0, op=dist.ReduceOp.SUM)
    return Outcome(mine(device), cells, sums() if dist.get_rank() == 0 else None)


def all_reduce(device: torch.device) -> Outcome:
    """Every rank gets the sum of all rows. This is what DDP does with gradients."""
    cells = mine(device)
    dist.all_reduce(cells, op=dist.ReduceOp.SUM)
    return Outcome(mine(device), cells, sums())


def gather(device: torch.device) -> Outcome:
    """Rank 0 gets the rows of all, one behind the other."""
    cells = mine(device)
    if dist.get_rank() != 0:
        dist.gather(cells, dst=0)  # the others have no list: they get nothing
        return Outcome(cells, None, [])
    rows = [torch.empty_like(cells) for _ in everybody()]
    dist.gather(cells, rows, dst=0)
    return Outcome(cells, torch.cat(rows), [number for rank in everybody() for number in row(rank)])


def all_gather(device: torch.device) -> Outcome:
    """Every rank gets the rows of all."""
    cells = mine(device)
    rows = [torch.empty_like(cells) for _ in everybody()]
    dist.all_gather(rows, cells)
    return Outcome(cells, torch.cat(rows), [number for rank in everybody() for number in row(rank)])


def scatter(device: torch.device) -> Outcome:
    """Rank 0 deals out its row: one column to each rank, itself included."""
    column = torch.empty(1, dtype=torch.int64, device=device)
    cells = mine(device) if dist.get_rank() == 0 else None
    dist.scatter(column, None if cells is None else list(cells.split(1)), src=0)
    return Outcome(cells, column, [row(0)[dist.get_rank()]])


def reduce_scatter(device: torch.device) -> Outcome:
    """Each rank gets one column of the sum of all rows: an all_reduce of which everybody keeps a part."""
    column = torch.empty(1, dtype=torch.int64, device=device)
    dist.reduce_scatter(column, list(mine(device).split(1)), op=dist.ReduceOp.SUM)
    return Outcome(mine(device), column, [sums()[dist.get_rank()]])


def all_to_all(device: torch.device) -> Outcome:
    """Rank r sends its column c to rank c: rows become columns."""
    columns = [torch.empty(1, dtype=torch.int64, device=device) for _ in everybody()]
    dist.all_to_all(columns, list(mine(device).split(1)))
    return Outcome(mine(device), torch.cat(columns), [row(rank)[dist.get_rank()] for rank in everybody()])


COLLECTIVES: list[Callable[[torch.device], Outcome]] = [
    broadcast, reduce, all_reduce, gather, all_gather, scatter, reduce_scatter, all_to_all,
]  # fmt: skip


def check(name: str, outcome: Outcome) -> None:
    """Fail if this rank does not hold what it should."""
    got = [] if outcome.after is None else outcome.after.tolist()
    if outcome.expected is not None and got != outcome.expected:
        raise RuntimeError(f"{name}: rank {dist.get_rank()} has {got}, and should have {outcome.expected}")


def show(name: str, outcome: Outcome) -> None:
    """Print on rank 0 what every rank held before and after."""

    def text(numbers: Tensor | None) -> str:
        return "-" if numbers is None else " ".join(f"{number:02}" for number in numbers.tolist())

    line = f"{text(outcome.before)} -> {text(outcome.after)}{'' if outcome.expected is not None else '  (undefined)'}"
    lines: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(lines, line)  # an all_gather of pickled objects
    if dist.get_rank() == 0:
        for rank, its in enumerate(lines):
            print(f"{name if rank == 0 else '':15}rank {rank}  {its}")


def check_barrier(store: dist.Store, late: float) -> None:
    """Fail if the barrier lets this rank go on before all have come; the last rank comes `late` seconds late."""
    if dist.get_rank() == dist.get_world_size() - 1:
        time.sleep(late)
    store.add("arrived", 1)
    dist.barrier()
    arrived = store.add("arrived", 0)
    if arrived != dist.get_world_size():
        raise RuntimeError(f"barrier: rank {dist.get_rank()} went on when {arrived} had come")
    dist.barrier()  # rank 0 holds the store: it may not leave before all have looked


def main() -> None:
    """Do, check and show one collective after the other."""
    parser = argparse.ArgumentParser(description="Show and check the collectives of torch.distributed.")
    parser.add_argument("--late", type=float, default=0.3, help="seconds that others wait at the barrier [0.3]")
    args = parser.parse_args()

    device, store = join()
    left_out = []
    for collective in COLLECTIVES:
        name = collective.__name__
        try:
            outcome = collective(device)
        except RuntimeError as error:
            if "does not support" not in str(error):
                raise
            left_out.append(name)  # all ranks come here alike, none waits for another
            continue
        check(name, outcome)
        show(name, outcome)
    check_barrier(store, args.late)
    if dist.get_rank() == 0:
        if left_out:
            print(f"{dist.get_backend()} has no {', '.join(left_out)}")
        done = len(COLLECTIVES) + 1 - len(left_out)
        print(f"{done} collectives over {dist.get_backend()}: the right result on all {dist.get_world_size()} ranks")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
