"""Train a model whose halves are on two devices, with DistributedDataParallel around both.

    ddplaunch --gpus-per-worker 2 examples/model_parallel.py
    torchrun --nproc-per-node 2 examples/model_parallel.py        # on 4 GPUs
    ddplaunch --nproc-per-node 2 examples/model_parallel.py       # without GPUs: both halves on the CPU
    python examples/model_parallel.py

A model that is too large for one GPU can be cut in two. Each worker then has two GPUs.
"""

import argparse
import os
from collections.abc import Mapping

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import ddplaunch

Devices = tuple[torch.device, torch.device]


def two_devices(env: Mapping[str, str], gpus: int) -> Devices:
    """Return the two devices of a worker that sees this many GPUs.

    Raises:
        SystemExit: there are GPUs, but not two for this worker alone.
    """
    device = env.get("DDPLAUNCH_DEVICE")
    if gpus == 0 or device == "cpu":
        return torch.device("cpu"), torch.device("cpu")
    if device is not None:  # ddplaunch shows a worker its own GPUs only
        if (device, gpus) != ("cuda:0", 2):
            raise SystemExit(f"this worker has {device} of {gpus} GPUs: ddplaunch --gpus-per-worker 2 gives it two")
        return torch.device("cuda:0"), torch.device("cuda:1")
    first = 2 * int(env.get("LOCAL_RANK", "0"))  # torchrun shows all GPUs to all workers
    if gpus < first + 2:
        raise SystemExit(f"this worker needs GPUs {first} and {first + 1}, but there are only {gpus}")
    return torch.device("cuda", first), torch.device("cuda", first + 1)


class Halves(nn.Module):
    """A model of two halves, each on its device."""

    def __init__(self, devices: Devices) -> None:
        super().__init__()
        self.devices = devices
        self.lower = nn.Sequential(nn.Linear(64, 128), nn.Tanh()).double().to(devices[0])
        self.upper = nn.Sequential(nn.Linear(128, 64), nn.Tanh(), nn.Linear(64, 10)).double().to(devices[1])

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits, N x 10 on the second device, of N x 64 images."""
        hidden = self.lower(images.to(self.devices[0]))
        logits: Tensor = self.upper(hidden.to(self.devices[1]))  # backward() carries the gradient back
        return logits


def train(devices: Devices, epochs: int, batch_size: int) -> None:
    """Train on the digits. All ranks together see the same batches, however many there are."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    print(f"rank {rank} of {world_size}: lower half on {devices[0]}, upper half on {devices[1]}", flush=True)
    digits = load_digits()
    inputs, targets = torch.tensor(digits.data) / 16, torch.tensor(digits.target)

    torch.manual_seed(0)
    model = Halves(devices)
    ddp_model = DistributedDataParallel(model)  # no device_ids: they mean that the whole model is on one device
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(epochs):
        for first in range(0, len(inputs) - batch_size + 1, batch_size):  # without the smaller batch at the end
            own = slice(first + rank, first + batch_size, world_size)
            logits = ddp_model(inputs[own])
            loss = cross_entropy(logits, targets[own].to(logits.device))  # the labels go where the logits are
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        dist.all_reduce(loss := loss.detach())
        if rank == 0:
            print(f"epoch {epoch + 1:2}: loss {loss.item() / world_size:.6f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a model whose halves are on two devices.")
    parser.add_argument("--epochs", type=int, default=10, help="[10]")
    parser.add_argument("--batch-size", type=int, default=64, help="of all workers together [64]")
    args = parser.parse_args()

    devices = two_devices(os.environ, torch.cuda.device_count())
    device_id = devices[0] if devices[0].type == "cuda" else None  # under torchrun not the GPU number LOCAL_RANK
    with ddplaunch.init_process_group(device_id=device_id):
        train(devices, args.epochs, args.batch_size)


if __name__ == "__main__":
    main()
