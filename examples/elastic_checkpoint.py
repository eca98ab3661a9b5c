"""Train so that a kill at any moment, and a restart with fewer workers, does not change the result.

    ddplaunch --nproc-per-node 4 --max-restarts 3 examples/elastic_checkpoint.py --checkpoints digits
    torchrun --nproc-per-node 4 --max-restarts 3 examples/elastic_checkpoint.py --checkpoints digits
    python examples/elastic_checkpoint.py --checkpoints digits

The number of a step decides which images the step takes and what is random in it. So a checkpoint is the weights, the
optimizer and that number, and any number of workers can go on from it. Its name has the number and the term, which grows
with each start of the workers: a lost node that writes late replaces nothing of the job that has gone on without it.
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


def term_and_step(path: Path) -> tuple[int, int]:
    """Return the numbers in the name of a checkpoint: (1795858200001, 40) of "checkpoint-1795858200001-40.pt"."""
    _, term, step = path.stem.split("-")
    return int(term), int(step)


def checkpoints(folder: Path, suffix: str = ".pt") -> list[Path]:
    """Return the checkpoints in a folder, the one of the greatest term and step last."""
    return sorted(folder.glob(f"checkpoint-*-*{suffix}"), key=term_and_step)


def save(folder: Path, term: int, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write a checkpoint, then remove smaller ones, never greater ones. A kill at any moment leaves a whole one."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"checkpoint-{term}-{step}.pt"
    unfinished = path.with_suffix(".tmp")
    with unfinished.open("wb") as file:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        file.flush()
        os.fsync(file.fileno())
    unfinished.rename(path)  # replaces nothing: no other worker saves in this term
    smaller = [each for each in checkpoints(folder) if term_and_step(each) < (term, step)]
    left = [each for each in checkpoints(folder, ".tmp") if term_and_step(each) < (term, step)]  # by kills
    for each in [*smaller[:-1], *left]:  # the last one may be read by a start that has just chosen it
        each.unlink(missing_ok=True)


def restore(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[int, int]:
    """Read the greatest checkpoint, if there is one; return the term to save in and the step to begin with.

    Rank 0 chooses for all, since a lost node may write another one at any moment.
    """
    term = int(os.environ.get("DDPLAUNCH_TERM", "0"))  # 0: ddplaunch has not started this worker
    chosen: list[Path | None] = [None]
    if dist.get_rank() == 0 and (found := checkpoints(folder)):
        chosen = [found[-1]]
    dist.broadcast_object_list(chosen)
    if (path := chosen[0]) is None:
        return term, 0
    last_term, step = term_and_step(path)
    if 0 < term < last_term:
        raise SystemExit(f"the job has gone on without term {term}, or a clock was wrong: there is {path}")
    state = torch.load(path, map_location="cpu", weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return term or last_term, step


def main() -> None:
    parser = argparse.ArgumentParser(description="Train so that a kill at any moment does not change the result.")
    parser.add_argument("--checkpoints", type=Path, required=True, help="folder of their own, which all workers see")
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
    term, first_step = restore(args.checkpoints, model, optimizer)
    ddp_model = DistributedDataParallel(model)
    dist.barrier()  # rank 0 removes nothing before all ranks have read
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
            save(args.checkpoints, term, step + 1, model, optimizer)
    if first_step < args.steps:
        dist.all_reduce(loss := loss.detach())
        if rank == 0:
            print(f"loss {loss.item() / world_size:.4f} in step {args.steps}")
    elif rank == 0:
        print(f"all {args.steps} steps are done already")


if __name__ == "__main__":
    with ddplaunch.init_process_group():
        main()
