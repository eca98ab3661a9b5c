"""Train on handwritten digits in Slurm: save when the time is up, go back into the queue, and resume in the same step.

    cd examples/slurm && sbatch job.sh

To try it without Slurm, start it, end it with SIGUSR1, and start it again:

    ddplaunch --nproc-per-node 4 examples/slurm/train.py --checkpoint digits.pt
    kill -USR1 PID-OF-DDPLAUNCH

However often it is interrupted, the weights at the end are those of an undisturbed run with as many workers.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset, TensorDataset, random_split

import ddplaunch


def save(path: Path, epoch: int, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write the checkpoint from rank 0. Every rank calls this, because each has random numbers of its own."""
    random_states: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(random_states, random_module().get_rng_state())
    if dist.get_rank() == 0:
        state = {
            "epoch": epoch,
            "step": step,
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "random_states": random_states,
        }
        unfinished = path.with_name(path.name + ".tmp")  # in the same folder: os.replace needs the same file system
        with unfinished.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)  # a kill at any moment leaves the old file or the new one


def restore(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[int, int]:
    """Read the checkpoint on every rank, and return the epoch and the step to begin with."""
    state = torch.load(path, map_location="cpu", weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    if len(state["random_states"]) == dist.get_world_size():
        random_module().set_rng_state(state["random_states"][dist.get_rank()])
    return state["epoch"], state["step"]


def random_module():  # type: ignore[no-untyped-def]  # a module
    """Return the module whose random numbers dropout uses on this device."""
    return torch.cuda if ddplaunch.device().type == "cuda" else torch


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on handwritten digits; save and leave on a signal.")
    parser.add_argument("--checkpoint", type=Path, required=True, help="file to save to and to resume from")
    parser.add_argument("--epochs", type=int, default=12, help="of the whole training [12]")
    parser.add_argument("--batch-size", type=int, default=64, help="of all workers together [64]")
    args = parser.parse_args()

    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = ddplaunch.device()

    digits = load_digits()  # 1,797 images of 8 x 8 pixels, which come with scikit-learn
    inputs = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    dataset = TensorDataset(inputs, torch.tensor(digits.target))
    train_set, val_set = random_split(dataset, [1437, 360], torch.Generator().manual_seed(0))
    val_loader = DataLoader(Subset(val_set, range(rank, len(val_set), world_size)), batch_size=256)

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=3, padding=1), nn.ReLU(),
        nn.Conv2d(16, 32, kernel_size=3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.2), nn.Linear(32 * 4 * 4, 10),
    ).to(device)  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    torch.manual_seed(1 + rank)  # each rank drops other features
    first_epoch = first_step = 0
    if args.checkpoint.exists():
        first_epoch, first_step = restore(args.checkpoint, model, optimizer)
        if rank == 0:
            print(f"resumes before step {first_step + 1} of epoch {first_epoch + 1}, from {args.checkpoint}")
    ddp_model = DistributedDataParallel(model)

    for epoch in range(first_epoch, args.epochs):
        # the order follows from the epoch alone, so a new start finds the images of any step
        order = torch.randperm(len(train_set), generator=torch.Generator().manual_seed(epoch)).tolist()
        starts = range(first_step * args.batch_size, len(order) - args.batch_size + 1, args.batch_size)
        batches = [order[start : start + args.batch_size][rank::world_size] for start in starts]
        # a generator of its own: the loader would take a number from the one in the checkpoint
        train_loader = DataLoader(train_set, batch_sampler=batches, generator=torch.Generator())
        model.train()
        for step, (images, labels) in enumerate(train_loader, start=first_step):
            if ddplaunch.should_stop():  # True on all ranks in the same step
                save(args.checkpoint, epoch, step, model, optimizer)
                if rank == 0:
                    print(f"saved before step {step + 1} of epoch {epoch + 1}, to {args.checkpoint}")
                return
            loss = cross_entropy(ddp_model(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        first_step = 0
        save(args.checkpoint, epoch + 1, 0, model, optimizer)  # for an end without a warning

        model.eval()
        correct = torch.zeros((), device=device)
        with torch.no_grad():
            for images, labels in val_loader:
                logits = model(images.to(device))
                correct += (logits.argmax(dim=1) == labels.to(device)).sum()
        dist.all_reduce(correct)
        if rank == 0:
            print(f"epoch {epoch + 1:2}: accuracy {correct.item() / len(val_set):.2%}")


if __name__ == "__main__":
    with ddplaunch.init_process_group():
        main()
