"""Train so that it does not matter when, and how often, the job is killed: the same weights come out.

    python examples/elastic_checkpoint.py --checkpoint undisturbed.pt
    ddplaunch --nproc-per-node 4 --max-restarts 3 examples/elastic_checkpoint.py --checkpoint a.pt --same-as undisturbed.pt
    torchrun --nproc-per-node 4 --max-restarts 3 examples/elastic_checkpoint.py --checkpoint b.pt --same-as undisturbed.pt

With --simulate and --chaos, ddplaunch makes several nodes of one machine and kills something in them.

Everything that decides a step follows from its number: which images it takes and what is random in it. So a checkpoint
is the weights, the optimizer and that number, and the job may go on from it with as many workers as are left. With
--same-as the script fails if its weights are not those of another run's checkpoint.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.nn  # before the group exists: imported after it, by DDP, it holds the group past its end
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

HELD_BACK = 360  # images that are never trained on, a fifth
ROUNDING = 1e-9  # of a weight, in double precision: workers of another number add in another order


class Data(NamedTuple):
    """Images, N x 64 in [0, 1], and what they are."""

    images: Tensor
    labels: Tensor


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


def batch_of_step(data: Data, step: int, size: int) -> Data:
    """Return the images of a step, of all workers together, the same whenever and by whomever it is taken."""
    steps_in_epoch = len(data.images) // size
    epoch, place = divmod(step, steps_in_epoch)
    order = torch.randperm(len(data.images), generator=torch.Generator().manual_seed(epoch))
    chosen = order[place * size : (place + 1) * size]
    # noise against learning by heart: its seed is the step, so that no generator has to be saved, of however many ranks
    noise = torch.randn(size, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
    return Data(data.images[chosen] + 0.1 * noise, data.labels[chosen])


def save(path: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write the checkpoint so that at any moment `path` is either the old one or the new one, whole."""
    state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    unfinished = path.with_name(path.name + ".tmp")  # beside it: os.replace works only within one file system
    with unfinished.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)


def restore(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Read the checkpoint, if there is one, and return how many steps it has behind it."""
    if not path.exists():
        return 0
    state = torch.load(path, map_location="cpu", weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


def train(args: argparse.Namespace, device: torch.device) -> nn.Module:
    """Train from the checkpoint on, or from the beginning, and return the network."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if args.batch_size % world_size:
        raise SystemExit(f"--batch-size {args.batch_size} cannot be shared equally by {world_size} workers")
    digits = load_digits()
    data = Data(torch.tensor(digits.data[HELD_BACK:]) / 16, torch.tensor(digits.target[HELD_BACK:]))
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10)).double().to(device)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    first = restore(args.checkpoint, network, optimizer)
    model = DistributedDataParallel(network, device_ids=[device] if device.type == "cuda" else None)
    dist.barrier()  # nobody writes before all have read
    if rank == 0:
        start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        print(f"start {start}: {world_size} workers begin after step {first} of {args.steps}", flush=True)

    for step in range(first, args.steps):
        images, labels = (tensor[rank::world_size].to(device) for tensor in batch_of_step(data, step, args.batch_size))
        optimizer.zero_grad()
        cross_entropy(model(images), labels).backward()
        optimizer.step()
        time.sleep(args.pause)
        if rank == 0 and ((step + 1) % args.every == 0 or step + 1 == args.steps):
            save(args.checkpoint, step + 1, network, optimizer)
    return network


def check(args: argparse.Namespace, network: nn.Module) -> None:
    """Fail if the network has not learned, or has other weights than that of --same-as."""
    digits = load_digits()
    device = next(network.parameters()).device
    with torch.no_grad():
        scores = network((torch.tensor(digits.data[:HELD_BACK]) / 16).to(device)).cpu()
    reached = 100 * float((scores.argmax(dim=1) == torch.tensor(digits.target[:HELD_BACK])).double().mean())
    if dist.get_rank() == 0:
        print(f"accuracy {reached:.2f}% on {HELD_BACK} held-back images", flush=True)
    if reached < args.target:
        raise SystemExit(f"accuracy {reached:.2f}% is below the target of {args.target:g}%")
    if args.same_as is not None:
        other = torch.load(args.same_as, map_location="cpu", weights_only=True)["model"]
        off = max(float((other[name] - mine.cpu()).abs().max()) for name, mine in network.state_dict().items())
        if not off < ROUNDING:
            raise RuntimeError(f"rank {dist.get_rank()}: a weight is off by {off:.0e} from that in {args.same_as}")
        if dist.get_rank() == 0:
            print(f"weights off by {off:.0e} from those in {args.same_as}", flush=True)


def main() -> None:
    """Join, train, check, leave."""
    parser = argparse.ArgumentParser(description="Train so that it does not matter when the job is killed.")
    parser.add_argument("--checkpoint", type=Path, required=True, help="file to go on from; all workers must see it")
    parser.add_argument("--same-as", type=Path, help="checkpoint of another run that must end with the same weights")
    parser.add_argument("--steps", type=int, default=120, help="in all, those in the checkpoint included [120]")
    parser.add_argument("--every", type=int, default=10, help="steps from one checkpoint to the next [10]")
    parser.add_argument("--batch-size", type=int, default=64, help="images in a step, all workers together [64]")
    parser.add_argument(
        "--pause", type=float, default=0.0, help="seconds that a step takes longer, to be killed in [0]"
    )
    parser.add_argument("--target", type=float, default=85.0, help="fail below this accuracy, in percent [85]")
    args = parser.parse_args()

    device = join()
    check(args, train(args, device))  # nothing of the model is left when its process group ends
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
