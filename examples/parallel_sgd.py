"""Train on data that stay where they are: every worker trains weights of its own, and rank 0 averages them.

    ddplaunch --nproc-per-node 4 examples/parallel_sgd.py

A round: every worker starts from the common weights, trains alone on its own part of the images, and waits for the
others at a barrier; the server, rank 0, gathers their weights, averages them and sends the average back (parallel SGD:
Zinkevich and others, 2010; federated averaging: McMahan and others, 2017). At the end rank 0 goes through the same
rounds in its one process, and fails unless that gives the same weights, bit for bit. All of it is done on the CPU.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector, vector_to_parameters

HELD_BACK = 360  # images that are never trained on, a fifth
BATCH = 16  # images

Images = tuple[Tensor, Tensor]  # N x 1 x 8 x 8 in [0, 1], and the N digits they show


def load_data(workers: int) -> tuple[list[Images], Images]:
    """Return the part of each worker, and the images that are held back."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    held_back, training = order[:HELD_BACK], order[HELD_BACK:]
    parts = [training[worker::workers] for worker in range(workers)]
    return [(images[part], labels[part]) for part in parts], (images[held_back], labels[held_back])


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


def train_alone(network: nn.Module, weights: Tensor, part: Images, epochs: int, seed: int) -> Tensor:
    """Train on one part, starting from `weights`, and return the weights that come of it. Speaks to nobody."""
    # a copy: the parameters become views of the vector that they are set from, and `weights` must stay as it is
    vector_to_parameters(weights.clone(), network.parameters())
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)  # a new one: momentum is not averaged
    random = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for batch in torch.randperm(len(part[0]), generator=random).split(BATCH):
            loss = cross_entropy(network(part[0][batch]), part[1][batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return parameters_to_vector(network.parameters()).detach()


def average(weights: Sequence[Tensor], parts: Sequence[Images]) -> Tensor:
    """Average the weights of the workers, each for as much as it has images."""
    sizes = [len(images) for images, _ in parts]
    return torch.stack([one * (size / sum(sizes)) for one, size in zip(weights, sizes, strict=True)]).sum(dim=0)


def seed_of(round_: int, worker: int) -> int:
    """Give each worker another order of images in each round, the same ones in every run."""
    return 1000 * round_ + worker


@torch.no_grad()
def accuracy(network: nn.Module, weights: Tensor, held_back: Images) -> float:
    """Return how many of the images these weights get right, in percent."""
    vector_to_parameters(weights.clone(), network.parameters())
    right = network(held_back[0]).argmax(dim=1) == held_back[1]
    return 100 * float(right.float().mean())


def train_together(args: argparse.Namespace, network: nn.Module, parts: Sequence[Images], held_back: Images) -> Tensor:
    """Go through the rounds with all workers, each on its own part; every worker returns the last average."""
    rank, workers = dist.get_rank(), dist.get_world_size()
    weights = parameters_to_vector(network.parameters()).detach()
    for round_ in range(args.rounds):
        mine = train_alone(network, weights, parts[rank], args.epochs, seed_of(round_, rank))
        arrived = time.perf_counter()
        dist.barrier()  # gather would wait too: this tells the waiting from the averaging
        waited = time.perf_counter() - arrived
        if rank == 0:
            all_of_them = [torch.empty_like(mine) for _ in range(workers)]
            dist.gather(mine, all_of_them, dst=0)
            weights = average(all_of_them, parts)
            scores = ", ".join(f"{accuracy(network, one, held_back):.2f}%" for one in all_of_them)
            merged = accuracy(network, weights, held_back)
            print(f"round {round_ + 1}: alone {scores}; averaged {merged:.2f}% (waited {waited:.2f} s)", flush=True)
        else:
            dist.gather(mine, dst=0)
        dist.broadcast(weights, src=0)
    return weights


def train_in_one_process(
    args: argparse.Namespace, network: nn.Module, start: Tensor, parts: Sequence[Images]
) -> Tensor:
    """Do what the workers do, one after the other, and return the last average."""
    weights = start
    for round_ in range(args.rounds):
        trained = [
            train_alone(network, weights, part, args.epochs, seed_of(round_, worker))
            for worker, part in enumerate(parts)
        ]
        weights = average(trained, parts)
    return weights


def main() -> None:
    """Train, check, and fail if the network has learned too little."""
    parser = argparse.ArgumentParser(description="Every worker trains alone on its part; rank 0 averages the weights.")
    parser.add_argument("--rounds", type=int, default=3, help="of training alone and averaging [3]")
    parser.add_argument("--epochs", type=int, default=8, help="of a round, over the worker's own images [8]")
    parser.add_argument("--target", type=float, default=97.0, help="fail below this accuracy, in percent [97]")
    args = parser.parse_args()

    dist.init_process_group("gloo")  # for tensors on the CPU
    rank, workers = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # the same weights to begin with
    network = make_network()
    start = parameters_to_vector(network.parameters()).detach()
    parts, held_back = load_data(workers)
    if rank == 0:
        sizes = ", ".join(str(len(images)) for images, _ in parts)
        print(f"{workers} workers with {sizes} images of their own", flush=True)

    weights = train_together(args, network, parts, held_back)
    dist.destroy_process_group()
    if rank:
        return
    reached = accuracy(network, weights, held_back)
    alone = train_in_one_process(args, network, start, parts)
    if not torch.equal(weights, alone):
        worst = float((weights - alone).abs().max())
        raise SystemExit(f"one process gives other weights than {workers} workers: up to {worst:.1e} apart")
    print(f"accuracy {reached:.2f}% on {HELD_BACK} held-back images; one process gives the same weights, bit for bit")
    if reached < args.target:
        raise SystemExit(f"accuracy {reached:.2f}% is below the target of {args.target:g}%")


if __name__ == "__main__":
    main()
