"""Train on handwritten digits in Slurm: save when the time is up, go back into the queue, go on as if nothing had been.

    cd examples/slurm && sbatch job.sh

It needs no Slurm. Here it is stopped by hand, and started again:

    ddplaunch --nproc-per-node 4 examples/slurm/train.py --checkpoint digits.pt
    kill -USR1 PID-OF-DDPLAUNCH

The data are the 1,797 images of 8 x 8 pixels that scikit-learn ships, so nothing is downloaded. However often it is
interrupted, and in whichever step, the weights at the end are those of a run that never was: with as many workers as
before, what is random in each of them goes on where it was.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn  # before the group exists: imported after it, by DDP, it holds the group past its end
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import ddplaunch

HELD_BACK = 360  # images that are never trained on, a fifth


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
        nn.Dropout(0.2),  # random numbers, other ones in each worker: they are part of the checkpoint
        nn.Linear(32 * 4 * 4, 10),
    )


class Training:
    """All that a checkpoint has to hold: where the training is, the weights, the optimizer, the random numbers."""

    def __init__(self, device: torch.device, learning_rate: float) -> None:
        torch.manual_seed(0)  # equal weights to begin with
        self.network = make_network().to(device)
        self.optimizer = torch.optim.SGD(self.network.parameters(), lr=learning_rate, momentum=0.9)
        self.epoch = 0
        self.step = 0  # of this epoch, the next one
        torch.manual_seed(1 + dist.get_rank())

    def save(self, path: Path) -> None:
        """Write the checkpoint, in rank 0; every worker has to call it. At any moment the file is the old one or the new one."""
        random = [torch.empty(0)] * dist.get_world_size()
        dist.all_gather_object(random, random_state(next(self.network.parameters()).device))
        if dist.get_rank() == 0:
            state = {
                "epoch": self.epoch,
                "step": self.step,
                "network": self.network.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "random": random,
            }
            unfinished = path.with_name(path.name + ".tmp")  # beside it: os.replace works only within one file system
            with unfinished.open("wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(unfinished, path)

    def restore(self, path: Path) -> None:
        """Go on where the checkpoint was written; every worker reads it."""
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        self.epoch, self.step = state["epoch"], state["step"]
        self.network.load_state_dict(state["network"])
        self.optimizer.load_state_dict(state["optimizer"])
        if len(state["random"]) == dist.get_world_size():  # else no two runs could be alike
            set_random_state(next(self.network.parameters()).device, state["random"][dist.get_rank()])


def random_state(device: torch.device) -> Tensor:
    """Return the state of the generator that dropout takes its numbers from in this worker."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def set_random_state(device: torch.device, state: Tensor) -> None:
    """Make that generator go on from a state."""
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


def steps_of(data: TensorDataset, epoch: int, first: int, batch_size: int) -> Iterator[list[Tensor]]:
    """Give this worker's images and labels for each step of an epoch, from the step `first` on.

    The batch is that of all workers together. Each takes its part of it, and all take equally many steps.
    """
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(epoch))
    whole = [step for step in order.split(batch_size) if len(step) == batch_size]
    mine = [step[dist.get_rank() :: dist.get_world_size()].tolist() for step in whole[first:]]
    own = torch.Generator()  # or the loader would take a number from the generator that is in the checkpoint
    yield from DataLoader(data, batch_sampler=mine, generator=own)


@torch.no_grad()
def accuracy(network: nn.Module, data: TensorDataset) -> float:
    """Return the share of images that the network gets right; each worker looks at its own part of them."""
    device = next(network.parameters()).device
    images, labels = (tensor[dist.get_rank() :: dist.get_world_size()].to(device) for tensor in data.tensors)
    network.eval()
    right = (network(images).argmax(dim=1) == labels).sum()
    network.train()
    dist.all_reduce(right)
    return float(right / len(data))


def check_same_weights(network: nn.Module) -> None:
    """Fail if the weights of this worker are not, bit for bit, those of rank 0."""
    mine = nn.utils.parameters_to_vector(network.parameters()).detach()
    first = mine.clone()
    dist.broadcast(first, src=0)
    if not torch.equal(mine, first):
        raise RuntimeError(f"rank {dist.get_rank()} has other weights than rank 0")


def say(text: str) -> None:
    """Print in rank 0."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def train(args: argparse.Namespace) -> float | None:
    """Train, and return the accuracy on the images held back; None if it was interrupted, and saved."""
    if args.batch_size % dist.get_world_size():
        raise SystemExit(f"--batch-size {args.batch_size} cannot be shared equally by {dist.get_world_size()} workers")
    device = ddplaunch.device()
    training_data, held_back = load_data()
    training = Training(device, args.learning_rate)
    if args.checkpoint.exists():
        training.restore(args.checkpoint)
        say(f"goes on before step {training.step + 1} of epoch {training.epoch + 1}, from {args.checkpoint}")
    model = DistributedDataParallel(training.network, device_ids=[device] if device.type == "cuda" else None)

    while training.epoch < args.epochs:
        for images, labels in steps_of(training_data, training.epoch, training.step, args.batch_size):
            if ddplaunch.should_stop():  # in all workers, or in none
                training.save(args.checkpoint)
                say(f"saved before step {training.step + 1} of epoch {training.epoch + 1}, to {args.checkpoint}")
                return None
            loss = cross_entropy(model(images.to(device)), labels.to(device))
            training.optimizer.zero_grad()
            loss.backward()  # DistributedDataParallel averages the gradients of all workers here
            training.optimizer.step()
            training.step += 1
        training.epoch, training.step = training.epoch + 1, 0
        training.save(args.checkpoint)  # for an end that nobody announces
        say(f"epoch {training.epoch:2}: accuracy {accuracy(training.network, held_back):.2%}")

    check_same_weights(training.network)
    return accuracy(training.network, held_back)


def main() -> None:
    """Join, train, leave."""
    parser = argparse.ArgumentParser(description="Train on handwritten digits; save and leave when told to.")
    parser.add_argument("--checkpoint", type=Path, required=True, help="file to save to and to go on from")
    parser.add_argument("--epochs", type=int, default=12, help="in all, those in the checkpoint included [12]")
    parser.add_argument("--batch-size", type=int, default=64, help="images in a step, all workers together [64]")
    parser.add_argument("--learning-rate", type=float, default=0.05, help="of SGD with momentum 0.9 [0.05]")
    parser.add_argument("--target", type=float, default=97.0, help="fail below this final accuracy, in percent [97]")
    args = parser.parse_args()

    with ddplaunch.init_process_group():
        reached = train(args)
        if reached is not None:
            say(f"accuracy {reached:.2%}, weights equal on all {dist.get_world_size()} ranks")
    if reached is not None and 100 * reached < args.target:
        raise SystemExit(f"accuracy {100 * reached:.2f}% is below the target of {args.target:g}%")


if __name__ == "__main__":
    main()
