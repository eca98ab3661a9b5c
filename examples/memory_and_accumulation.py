"""Large batches by accumulation, and large checkpoints without a copy in every worker.

    ddplaunch --nproc-per-node 4 examples/memory_and_accumulation.py
    torchrun --nproc-per-node 4 examples/memory_and_accumulation.py
    python examples/memory_and_accumulation.py

First it trains on handwritten digits three times: on whole batches, on pieces whose gradients are added up, and the same
with `no_sync`. All must end with the same weights, and it counts how often gradients travel. Then it loads a checkpoint
in every worker, and in one that passes it on, and compares how much memory each worker needs. Linux tells how much.
"""

import argparse
import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn  # before the group exists: imported after it, by DDP, it holds the group past its end
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

ROUNDING = 1e-10  # of a weight, in double precision
SIDE = (
    3072  # a layer has SIDE x SIDE weights, 36 MiB: malloc gives so large a block back to the system when it is freed
)
MEBIBYTE = 2**20


def join() -> torch.device:
    """Join the other workers of the job and return the device of this one."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    # ddplaunch says which device and backend are right here; the rest is for torchrun and plain python
    fallback = f"cuda:{local_rank}" if torch.cuda.is_available() else "cpu"
    device = torch.device(os.environ.get("DDPLAUNCH_DEVICE", fallback))
    backend = os.environ.get("DDPLAUNCH_BACKEND", "nccl" if torch.cuda.is_available() else "gloo")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        dist.init_process_group(backend)  # reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return device


def say(text: str) -> None:
    """Print on rank 0."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def load_data(args: argparse.Namespace, device: torch.device) -> DataLoader[tuple[Tensor, ...]]:
    """Return the digits in batches, of which each worker gets its share."""
    digits = load_digits()
    data = TensorDataset(torch.tensor(digits.data) / 16, torch.tensor(digits.target))
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(data, seed=0, drop_last=True)
    return DataLoader(
        data,
        batch_size=args.batch_size // dist.get_world_size(),
        sampler=sampler,
        drop_last=True,
        num_workers=args.loaders,  # processes of each worker that make batches while it computes
        pin_memory=device.type == "cuda",  # memory that a GPU copies from by itself: see non_blocking below
    )


def train(
    batches: DataLoader[tuple[Tensor, ...]], pieces: int, sync_each: bool, device: torch.device
) -> tuple[Tensor, int]:
    """Train on every batch once, each in so many pieces; return the weights and how often gradients travelled."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10)).double().to(device)
    model = DistributedDataParallel(network, device_ids=[device] if device.type == "cuda" else None)
    travelled = 0

    def counted(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        nonlocal travelled
        travelled += 1
        return allreduce_hook(group, bucket)  # what DDP does without a hook

    model.register_comm_hook(model.process_group, counted)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    for images, labels in batches:
        optimizer.zero_grad()
        parts = zip(images.chunk(pieces), labels.chunk(pieces), strict=True)
        for number, (some, their_labels) in enumerate(parts, start=1):
            last = number == pieces
            with nullcontext() if last or sync_each else model.no_sync():  # around forward() too: it decides there
                scores = model(some.to(device, non_blocking=True))
                loss = cross_entropy(scores, their_labels.to(device, non_blocking=True))
                (loss / pieces).backward()  # adds to the gradients that are there
        optimizer.step()
    return torch.cat([weight.detach().flatten().cpu() for weight in network.parameters()]), travelled


def compare_accumulation(args: argparse.Namespace, device: torch.device) -> None:
    """Train in all three ways and fail if the weights, or the number of exchanges, are not what they should be."""
    batches = load_data(args, device)
    say(f"{len(batches)} steps of {args.batch_size} images")
    whole, steps = train(batches, 1, True, device)
    say(f"  {'whole batches':24} {steps:4} exchanges of gradients")
    for name, sync_each, expected in (("", True, args.pieces * steps), (", no_sync", False, steps)):
        weights, travelled = train(batches, args.pieces, sync_each, device)
        off = float((weights - whole).abs().max())
        say(f"  {f'{args.pieces} pieces{name}':24} {travelled:4} exchanges of gradients, weights off by {off:.0e}")
        if not off < ROUNDING:
            raise RuntimeError(f"{args.pieces} pieces{name}: a weight is off by {off:.0e} from that of whole batches")
        if travelled != expected:
            raise RuntimeError(f"{args.pieces} pieces{name}: {travelled} exchanges, and should be {expected}")


def every_rank_loads(path: Path, model: nn.Module) -> None:
    """Read the checkpoint in each worker: for a moment each has the model and what it has read."""
    # without map_location all workers would put it on the device that it was saved from
    model.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))


def one_rank_loads(path: Path, model: nn.Module) -> None:
    """Read the checkpoint in rank 0, which sends it tensor by tensor; the others receive it in place."""
    if dist.get_rank() == 0:
        every_rank_loads(path, model)
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, src=0)


def memory(field: str) -> int:
    """Return what Linux says of the memory of this process, in bytes: VmRSS is now, VmHWM the peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def peak_of_each(load: Callable[[Path, nn.Module], None], path: Path, model: nn.Module) -> list[float]:
    """Load in this way and return what each rank held at most, in MiB, above what it had before."""
    with torch.no_grad():
        for weight in model.parameters():
            weight.fill_(torch.nan)
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is measured from here on
    before = memory("VmRSS")
    load(path, model)
    mine = (memory("VmHWM") - before) / MEBIBYTE
    peaks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(peaks, mine)
    for weight in model.parameters():
        first = weight.detach().clone()
        dist.broadcast(first, src=0)
        if weight.isnan().any() or not torch.equal(weight, first):
            raise RuntimeError(f"rank {dist.get_rank()} has other weights than rank 0")
    return peaks


def check_peaks(size: float, every: Sequence[float], one: Sequence[float]) -> None:
    """Fail if a rank that reads holds no copy of the checkpoint, or one that receives it does."""
    if min(*every, one[0]) < size / 2:
        raise RuntimeError("a rank that loads has held less than half of the checkpoint: the measurement is wrong")
    if max(one[1:], default=0) > size / 2:
        raise RuntimeError("a rank that does not load has held more than half of the checkpoint")


def compare_loading(args: argparse.Namespace, device: torch.device, path: Path) -> None:
    """Load in both ways and fail if the workers need as much memory as each other where only one loads."""
    model = nn.Sequential(*[nn.Linear(SIDE, SIDE, bias=False) for _ in range(args.layers)]).to(device)
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), path)
    size = args.layers * SIDE * SIDE * 4 / MEBIBYTE
    say(f"a checkpoint of {size:.0f} MiB: what each rank holds at most while it loads, in MiB above the model")
    every = peak_of_each(every_rank_loads, path, model)
    say(f"  {'every rank loads':24} {' '.join(f'{peak:4.0f}' for peak in every)}")
    one = peak_of_each(one_rank_loads, path, model)
    say(f"  {'one loads, broadcasts':24} {' '.join(f'{peak:4.0f}' for peak in one)}")
    check_peaks(size, every, one)


def main() -> None:
    """Join, accumulate, load, leave."""
    parser = argparse.ArgumentParser(description="Gradient accumulation, and checkpoints that one worker loads.")
    parser.add_argument("--batch-size", type=int, default=64, help="images in a step, all workers together [64]")
    parser.add_argument("--pieces", type=int, default=4, help="that a worker cuts its share of a batch into [4]")
    parser.add_argument("--loaders", type=int, default=1, help="processes of each worker that load images [1]")
    parser.add_argument("--layers", type=int, default=3, help="of the large model, 36 MiB each [3]")
    parser.add_argument("--folder", type=Path, help="for the checkpoint; all workers must see it [a temporary one]")
    args = parser.parse_args()

    device = join()
    if args.batch_size % (dist.get_world_size() * args.pieces):
        raise SystemExit(
            f"--batch-size {args.batch_size} cannot be cut into {args.pieces} equal pieces for each worker"
        )
    compare_accumulation(args, device)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:  # that of rank 0 is used
        path = [str(Path(folder, "large.pt"))]
        dist.broadcast_object_list(path, src=0)
        compare_loading(args, device, Path(path[0]))
        dist.barrier()
    say(f"same weights in all ways on {dist.get_world_size()} ranks")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
