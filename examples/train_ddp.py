"""Train a small network on handwritten digits with DistributedDataParallel.

Runs unchanged as one process or as many:

    python examples/train_ddp.py
    ddplaunch --nproc-per-node 4 examples/train_ddp.py --checkpoint digits.pt
    torchrun --nproc-per-node 4 examples/train_ddp.py --checkpoint digits.pt

The data are the 1,797 images of 8 x 8 pixels that scikit-learn ships, so nothing is downloaded. The batch size is
the one of the whole job: with any number of workers every step sees the same images, and the result is the same up
to rounding. With --checkpoint, a run that was interrupted goes on after its last finished epoch.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn  # before the group exists: imported after it, by DDP, it holds the group past its end
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

HELD_BACK = 360  # images that are never trained on, a fifth


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
    print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {backend} on {device}", flush=True)
    return device


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """Return the images to train on and those held back, the same ones in every worker and every run."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16  # N x 1 x 8 x 8, in [0, 1]
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    held_back, training = order[:HELD_BACK], order[HELD_BACK:]
    return TensorDataset(images[training], labels[training]), TensorDataset(images[held_back], labels[held_back])


def make_network() -> nn.Module:
    """Return a network that maps N x 1 x 8 x 8 images to the N x 10 scores of the digits."""
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )


def train_epoch(model: nn.Module, optimizer: torch.optim.Optimizer, batches: DataLoader[tuple[Tensor, ...]]) -> float:
    """Train on every batch once and return the mean loss of all workers."""
    device = next(model.parameters()).device
    total = torch.zeros((), device=device)
    for images, labels in batches:
        scores = model(images.to(device, non_blocking=True))
        loss = cross_entropy(scores, labels.to(device, non_blocking=True))
        optimizer.zero_grad()
        loss.backward()  # DistributedDataParallel averages the gradients of all workers here
        optimizer.step()
        total += loss.detach()
    dist.all_reduce(total)
    return float(total / len(batches) / dist.get_world_size())


@torch.no_grad()
def accuracy(model: nn.Module, data: TensorDataset) -> float:
    """Return the share of images that the network gets right; each worker looks at its own part of them."""
    device = next(model.parameters()).device
    # not a DistributedSampler: it repeats images to make the parts equal, and these would count twice
    images, labels = (tensor[dist.get_rank() :: dist.get_world_size()].to(device) for tensor in data.tensors)
    right = (model(images).argmax(dim=1) == labels).sum()
    dist.all_reduce(right)
    return float(right / len(data))


def save(path: Path, epochs: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write the checkpoint so that at any moment `path` is either the old one or the new one, whole."""
    state = {"epochs": epochs, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    unfinished = path.with_name(path.name + ".tmp")  # beside it: os.replace works only within one file system
    with unfinished.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)


def restore(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Read the checkpoint, in every worker, and return how many epochs it has behind it."""
    state = torch.load(path, map_location="cpu", weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["epochs"])


def check_same_weights(model: nn.Module) -> None:
    """Fail if the weights of this worker are not, bit for bit, those of rank 0."""
    mine = nn.utils.parameters_to_vector(model.parameters()).detach()
    first = mine.clone()
    dist.broadcast(first, src=0)
    if not torch.equal(mine, first):
        raise RuntimeError(f"rank {dist.get_rank()} has other weights than rank 0")


def train(args: argparse.Namespace, device: torch.device) -> float:
    """Train, with a checkpoint after each epoch, and return the accuracy on the images held back."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if args.batch_size % world_size:
        raise SystemExit(f"--batch-size {args.batch_size} cannot be shared equally by {world_size} workers")

    training, held_back = load_data()
    # each worker takes every world_size-th image of one shuffled order; what is left over at the end of an epoch is
    # dropped, so that all workers take equally many steps
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(training, seed=0, drop_last=True)
    batches = DataLoader(
        training,
        batch_size=args.batch_size // world_size,
        sampler=sampler,
        drop_last=True,
        num_workers=args.loaders,  # of each worker; they make batches while it computes
        persistent_workers=args.loaders > 0,  # else every epoch would start them anew
        pin_memory=device.type == "cuda",  # memory that a GPU copies from while the worker goes on
    )

    torch.manual_seed(0)  # equal weights to begin with; nothing else here is random, so no generator is saved
    network = make_network().to(device)
    optimizer = torch.optim.SGD(network.parameters(), lr=args.learning_rate, momentum=0.9)
    done = 0
    if args.checkpoint is not None and args.checkpoint.exists():
        done = restore(args.checkpoint, network, optimizer)
        if rank == 0:
            print(f"resumed after epoch {done} from {args.checkpoint}", flush=True)
    model = DistributedDataParallel(network, device_ids=[device] if device.type == "cuda" else None)

    for epoch in range(done, args.epochs):
        sampler.set_epoch(epoch)  # without it every epoch would have the same order
        loss = train_epoch(model, optimizer, batches)
        right = accuracy(network, held_back)
        if rank == 0:
            print(f"epoch {epoch + 1:2}: loss {loss:.4f}, accuracy {right:.2%}", flush=True)
            if args.checkpoint is not None:
                save(args.checkpoint, epoch + 1, network, optimizer)

    check_same_weights(network)
    right = accuracy(network, held_back)
    if rank == 0:
        print(f"accuracy {right:.2%} on {len(held_back)} held-back images, weights equal on all {world_size} ranks")
    return right


def main() -> None:
    """Join, train, leave."""
    parser = argparse.ArgumentParser(description="Train a small network on handwritten digits with DDP.")
    parser.add_argument("--epochs", type=int, default=12, help="in all, those in the checkpoint included [12]")
    parser.add_argument("--batch-size", type=int, default=64, help="images in a step, all workers together [64]")
    parser.add_argument("--learning-rate", type=float, default=0.05, help="of SGD with momentum 0.9 [0.05]")
    parser.add_argument("--loaders", type=int, default=0, help="processes of each worker that load images [0]")
    parser.add_argument("--checkpoint", type=Path, help="file to save to after each epoch and to resume from")
    parser.add_argument("--target", type=float, default=97.0, help="fail below this final accuracy, in percent [97]")
    args = parser.parse_args()

    device = join()
    reached = 100 * train(args, device)  # a function of its own: the model must be gone before its process group is
    dist.destroy_process_group()
    if reached < args.target:
        raise SystemExit(f"accuracy {reached:.2f}% is below the target of {args.target:g}%")


if __name__ == "__main__":
    main()
