"""Large batches by gradient accumulation, and a large checkpoint that only one worker reads.

    ddplaunch --nproc-per-node 4 examples/memory_and_accumulation.py
    torchrun --nproc-per-node 4 examples/memory_and_accumulation.py
    python examples/memory_and_accumulation.py

First it trains with whole batches, in pieces, and in pieces with `no_sync`, and counts how often gradients travel. Then
it loads a checkpoint on every rank, and on one that sends it to the others, and measures the memory of each.
"""

import argparse
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import ddplaunch

WIDTH = 3072  # a layer has 36 MiB: malloc returns so large a block to the system when it is freed
MEBIBYTE = 2**20


def train(train_loader: DataLoader[tuple[Tensor, ...]], pieces: int, sync_each: bool) -> tuple[int, float]:
    """Train one epoch with each batch in pieces. Return how often gradients travelled, and the last loss."""
    device = ddplaunch.device()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10)).double().to(device)
    ddp_model = DistributedDataParallel(model)
    exchanges = 0

    def count(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        nonlocal exchanges
        exchanges += 1
        return allreduce_hook(group, bucket)  # as DDP does without a hook

    ddp_model.register_comm_hook(ddp_model.process_group, count)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for images, labels in train_loader:
        optimizer.zero_grad()
        batch_loss = torch.zeros((), dtype=torch.float64, device=device)
        for piece, (some_images, some_labels) in enumerate(
            zip(images.chunk(pieces), labels.chunk(pieces), strict=True), start=1
        ):
            is_last = piece == pieces
            with nullcontext() if is_last or sync_each else ddp_model.no_sync():  # around forward(), too
                logits = ddp_model(some_images.to(device))
                loss = cross_entropy(logits, some_labels.to(device)) / pieces
                loss.backward()  # adds to the gradients of the pieces before
            batch_loss += loss.detach()
        optimizer.step()
    dist.all_reduce(batch_loss)
    return exchanges, batch_loss.item() / dist.get_world_size()


def load_on_every_rank(path: Path, model: nn.Module) -> None:
    """Read the checkpoint. For a moment, each rank holds the model and the file."""
    model.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))


def load_on_one_rank(path: Path, model: nn.Module) -> None:
    """Read the checkpoint on rank 0, which sends it tensor by tensor. The others receive it in place."""
    if dist.get_rank() == 0:
        load_on_every_rank(path, model)
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, src=0)


def memory(field: str) -> int:
    """Return the memory of this process in bytes, as Linux counts it: VmRSS now, VmHWM at most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def peak_memory(load: Callable[[Path, nn.Module], None], path: Path, model: nn.Module) -> list[float]:
    """Load the checkpoint and return how many MiB each rank needed for it at most."""
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    before = memory("VmRSS")
    load(path, model)
    peaks = [0.0] * dist.get_world_size()
    dist.all_gather_object(peaks, (memory("VmHWM") - before) / MEBIBYTE)
    return peaks


def main() -> None:
    parser = argparse.ArgumentParser(description="Gradient accumulation, and a checkpoint that one worker reads.")
    parser.add_argument("--batch-size", type=int, default=64, help="of all workers together [64]")
    parser.add_argument("--pieces", type=int, default=4, help="of each batch [4]")
    parser.add_argument("--layers", type=int, default=3, help="of the large model, 36 MiB each [3]")
    parser.add_argument("--folder", type=Path, help="for the checkpoint; all workers must see it [a temporary one]")
    args = parser.parse_args()

    rank, world_size = dist.get_rank(), dist.get_world_size()
    if args.batch_size % (world_size * args.pieces):
        raise SystemExit(f"--batch-size {args.batch_size} is not a multiple of {world_size} x {args.pieces} pieces")

    digits = load_digits()
    train_set = TensorDataset(torch.tensor(digits.data) / 16, torch.tensor(digits.target))
    sampler: DistributedSampler[object] = DistributedSampler(train_set, drop_last=True)
    train_loader = DataLoader(train_set, args.batch_size // world_size, sampler=sampler, drop_last=True)
    for name, pieces, sync_each in (
        ("whole batches", 1, True),
        (f"{args.pieces} pieces", args.pieces, True),
        (f"{args.pieces} pieces, no_sync", args.pieces, False),
    ):
        exchanges, loss = train(train_loader, pieces, sync_each)
        if rank == 0:
            print(f"{name:24} {exchanges:4} exchanges of gradients, loss {loss:.6f}", flush=True)

    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(args.layers)]).to(ddplaunch.device())
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        paths = [Path(folder, "large.pt")]
        dist.broadcast_object_list(paths, src=0)  # all use the folder of rank 0
        if rank == 0:
            torch.save(model.state_dict(), paths[0])
            print(f"a checkpoint of {args.layers * WIDTH * WIDTH * 4 / MEBIBYTE:.0f} MiB: MiB that each rank needs")
        for name, load in (("every rank loads", load_on_every_rank), ("one loads, broadcasts", load_on_one_rank)):
            peaks = peak_memory(load, paths[0], model)
            if rank == 0:
                print(f"{name:24} {' '.join(f'{peak:4.0f}' for peak in peaks)}", flush=True)
        dist.barrier()  # rank 0 removes the folder when all have read


if __name__ == "__main__":
    with ddplaunch.init_process_group():
        main()
