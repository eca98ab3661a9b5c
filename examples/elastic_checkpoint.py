"""Train so that a kill at any moment, and a restart with fewer workers, does not change the result.

    ddplaunch --nproc-per-node 4 --max-restarts 3 examples/elastic_checkpoint.py --checkpoint digits.pt
    torchrun --nproc-per-node 4 --max-restarts 3 examples/elastic_checkpoint.py --checkpoint digits.pt
    python examples/elastic_checkpoint.py --checkpoint digits.pt

The number of a step decides which images the step takes and what is random in it. So the checkpoint holds the weights,
the optimizer and that number, and any number of workers can go on from it.
"""

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import ddplaunch


def batch_of_step(inputs: Tensor, labels: Tensor, step: int, batch_size: int) -> tuple[Tensor, Tensor]:
    """Return the images of a step, for all workers together: the same in every run."""
    epoch, index = divmod(step, len(inputs) // batch_size)
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(epoch))
    chosen = order[index * batch_size : (index + 1) * batch_size]
    noise = torch.randn(batch_size, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
    return inputs[chosen] + 0.1 * noise, labels[chosen]


def save(path: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write the checkpoint. A kill at any moment leaves the old file or the new one."""
    state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    unfinished = path.with_name(path.name + ".tmp")  # in the same folder: os.replace needs the same file system
    with unfinished.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)


def restore(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Read the checkpoint, if there is one, and return the step to begin with."""
    if not path.exists():
        return 0
    state = torch.load(path, map_location="cpu", weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


def main() -> None:
    parser = argparse.ArgumentParser(description="Train so that a kill at any moment does not change the result.")
    parser.add_argument("--checkpoint", type=Path, required=True, help="file to resume from, which all workers see")
    parser.add_argument("--steps", type=int, default=120, help="of the whole training [120]")
    parser.add_argument("--every", type=int, default=10, help="steps from one checkpoint to the next [10]")
    parser.add_argument("--batch-size", type=int, default=64, help="of all workers together [64]")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds to wait in each step, to be killed in [0]")
    args = parser.parse_args()

    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = ddplaunch.device()
    if args.batch_size % world_size:
        raise SystemExit(f"--batch-size {args.batch_size} is not a multiple of {world_size} workers")
    digits = load_digits()
    inputs, targets = torch.tensor(digits.data) / 16, torch.tensor(digits.target)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10)).double().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    first_step = restore(args.checkpoint, model, optimizer)
    ddp_model = DistributedDataParallel(model)
    dist.barrier()  # rank 0 writes only after all ranks have read
    if rank == 0:
        restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        print(f"start {restarts}: {world_size} workers begin after step {first_step} of {args.steps}", flush=True)

    for step in range(first_step, args.steps):
        images, labels = batch_of_step(inputs, targets, step, args.batch_size)
        loss = cross_entropy(ddp_model(images[rank::world_size].to(device)), labels[rank::world_size].to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(args.pause)
        if rank == 0 and ((step + 1) % args.every == 0 or step + 1 == args.steps):
            save(args.checkpoint, step + 1, model, optimizer)
    dist.all_reduce(loss := loss.detach())
    if rank == 0:
        print(f"loss {loss.item() / world_size:.4f} in step {args.steps}")


if __name__ == "__main__":
    with ddplaunch.init_process_group():
        main()
