"""Let every worker train alone on its own part of the data, and average the weights from time to time.

    ddplaunch --nproc-per-node 4 examples/parallel_sgd.py

Gradients stay in the workers. Only the weights travel, once in a round (Zinkevich, Weimer, Li, Smola, 2010).
"""

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import ddplaunch


def load_data(world_size: int) -> tuple[list[tuple[Tensor, Tensor]], tuple[Tensor, Tensor]]:
    """Return the images and labels of each rank, and those to validate with."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    val, train = order[:360], order[360:]
    parts = [train[rank::world_size] for rank in range(world_size)]
    return [(images[part], labels[part]) for part in parts], (images[val], labels[val])


def make_model() -> nn.Module:
    """Return the same model on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=3, padding=1), nn.ReLU(),
        nn.Conv2d(16, 32, kernel_size=3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * 4 * 4, 10),
    )  # fmt: skip


def train_alone(model: nn.Module, weights: Tensor, part: tuple[Tensor, Tensor], epochs: int, seed: int) -> Tensor:
    """Train from these weights on one part of the data, and return the new weights."""
    # a copy: vector_to_parameters makes the parameters views of the vector, and training would change it
    vector_to_parameters(weights.clone(), model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(seed)
    images, labels = part
    for _ in range(epochs):
        for batch in torch.randperm(len(images), generator=generator).split(16):
            loss = cross_entropy(model(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return parameters_to_vector(model.parameters()).detach()


def average(weights: list[Tensor], sizes: list[int]) -> Tensor:
    """Average the weights of all ranks. A rank counts for as much as it has images."""
    return torch.stack([own * (size / sum(sizes)) for own, size in zip(weights, sizes, strict=True)]).sum(dim=0)


@torch.no_grad()
def accuracy(model: nn.Module, weights: Tensor, val_set: tuple[Tensor, Tensor]) -> float:
    """Return the share of validation images that these weights get right."""
    vector_to_parameters(weights.clone(), model.parameters())
    images, labels = val_set
    return float((model(images).argmax(dim=1) == labels).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description="Every worker trains alone on its part; rank 0 averages the weights.")
    parser.add_argument("--rounds", type=int, default=3, help="of training alone and averaging [3]")
    parser.add_argument("--epochs", type=int, default=8, help="in each round [8]")
    args = parser.parse_args()

    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = make_model()
    weights = parameters_to_vector(model.parameters()).detach()
    parts, val_set = load_data(world_size)
    sizes = [len(images) for images, _ in parts]
    for round_ in range(args.rounds):
        own = train_alone(model, weights, parts[rank], args.epochs, seed=1000 * round_ + rank)
        if rank == 0:
            gathered = [torch.empty_like(own) for _ in range(world_size)]
            dist.gather(own, gathered, dst=0)
            weights = average(gathered, sizes)
            alone = ", ".join(f"{accuracy(model, one, val_set):.2%}" for one in gathered)
            print(f"round {round_ + 1}: alone {alone}; averaged {accuracy(model, weights, val_set):.2%}", flush=True)
        else:
            dist.gather(own, dst=0)
        dist.broadcast(weights, src=0)


if __name__ == "__main__":
    with ddplaunch.init_process_group("gloo"):  # the tensors are on the CPU
        main()
