"""Train a network whose halves lie on two devices, with DistributedDataParallel around both.

    ddplaunch --gpus-per-worker 2 examples/model_parallel.py
    torchrun --nproc-per-node 2 examples/model_parallel.py        # on 4 GPUs
    ddplaunch --nproc-per-node 2 examples/model_parallel.py       # without GPUs: both halves on the CPU
    python examples/model_parallel.py

A model that is too large for one GPU can be cut in two. A worker then owns two GPUs, and several such workers share the
images among them. Each also trains the uncut network on all images, and fails if that ends with other weights.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping

import torch
import torch.distributed as dist
import torch.distributed.nn  # before the group exists: imported after it, by DDP, it holds the group past its end
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

Devices = tuple[torch.device, torch.device]

HELD_BACK = 360  # images that are never trained on, a fifth
ROUNDING = 1e-9  # of a weight, in double precision after hundreds of steps


def own_devices(env: Mapping[str, str], gpus: int) -> Devices:
    """Return the two devices of a worker that sees this many GPUs.

    Raises:
        SystemExit: there are GPUs, but not two for this worker alone.
    """
    device = env.get("DDPLAUNCH_DEVICE")
    if gpus == 0 or device == "cpu":
        return torch.device("cpu"), torch.device("cpu")
    if device is not None:
        if (device, gpus) != ("cuda:0", 2):  # what a worker sees that owns two
            raise SystemExit(
                f"{device} of {gpus} GPUs are not two of this worker's own: ddplaunch --gpus-per-worker 2 ..."
            )
        return torch.device("cuda:0"), torch.device("cuda:1")
    first = 2 * int(env.get("LOCAL_RANK", "0"))  # torchrun shows all GPUs to all workers, so each has to count
    if gpus < first + 2:
        raise SystemExit(f"this worker needs GPUs {first} and {first + 1}, but there are only {gpus}")
    return torch.device("cuda", first), torch.device("cuda", first + 1)


def join() -> Devices:
    """Join the other workers of the job and return the devices of this one."""
    devices = own_devices(os.environ, torch.cuda.device_count())
    backend = os.environ.get("DDPLAUNCH_BACKEND", "nccl" if devices[0].type == "cuda" else "gloo")
    if devices[0].type == "cuda":
        torch.cuda.set_device(devices[0])  # nccl would otherwise begin on GPU 0 in every worker
    if "RANK" in os.environ:
        dist.init_process_group(backend)  # reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    print(f"rank {rank} of {world_size}: {backend}, lower half on {devices[0]}, upper half on {devices[1]}", flush=True)
    return devices


class Halves(nn.Module):
    """A network of two halves, each on its device; what the lower one gives is carried to the upper one."""

    def __init__(self, devices: Devices) -> None:
        super().__init__()
        torch.manual_seed(0)  # equal weights in every worker and on any devices: they are made on the CPU
        self.devices = devices
        self.lower = nn.Sequential(nn.Linear(64, 128), nn.Tanh()).double().to(devices[0])
        self.upper = nn.Sequential(nn.Linear(128, 64), nn.Tanh(), nn.Linear(64, 10)).double().to(devices[1])

    def forward(self, images: Tensor) -> Tensor:
        """Return the scores, N x 10 on the second device, of N x 64 images."""
        between = self.lower(images.to(self.devices[0]))
        scores: Tensor = self.upper(between.to(self.devices[1]))  # backward() carries the gradient the way back
        return scores


def train(model: nn.Module, images: Tensor, labels: Tensor, part: slice, args: argparse.Namespace) -> None:
    """Train on the same part of every batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=args.learning_rate, momentum=0.9)
    for _ in range(args.epochs):
        # batches of unequal size would have to be weighted, so the incomplete one at the end is left out
        for start in range(0, len(images) - args.batch_size + 1, args.batch_size):
            batch = slice(start, start + args.batch_size)
            scores = model(images[batch][part])
            loss = cross_entropy(scores, labels[batch][part].to(scores.device))  # where the scores are
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def weights(model: nn.Module) -> Tensor:
    """Return all weights, one behind the other, on the CPU."""
    return torch.cat([weight.detach().flatten().cpu() for weight in model.parameters()])


def compare(args: argparse.Namespace, devices: Devices) -> float:
    """Train in both ways, and return the accuracy, in percent, on the images held back.

    Raises:
        RuntimeError: the weights differ.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if args.batch_size % world_size:
        raise SystemExit(f"--batch-size {args.batch_size} cannot be shared equally by {world_size} workers")
    digits = load_digits()
    images, labels = torch.tensor(digits.data) / 16, torch.tensor(digits.target)
    training = images[HELD_BACK:], labels[HELD_BACK:]

    halves = Halves(devices)
    # no device_ids: they would say that the whole model lies on one device
    train(DistributedDataParallel(halves), *training, slice(rank, None, world_size), args)
    alone = Halves((devices[0], devices[0]))
    train(alone, *training, slice(None), args)

    off = float((weights(halves) - weights(alone)).abs().max())
    if not off < ROUNDING:
        raise RuntimeError(f"rank {rank}: a weight is off by {off:.0e} from that of one process with the uncut network")
    with torch.no_grad():
        right = (halves(images[:HELD_BACK]).argmax(dim=1).cpu() == labels[:HELD_BACK]).double().mean()
    reached = 100 * float(right)
    if rank == 0:
        print(f"weights off by {off:.0e} from those of one process with the uncut network")
        print(f"accuracy {reached:.2f}% on {HELD_BACK} held-back images")
    return reached


def main() -> None:
    """Join, train, leave."""
    parser = argparse.ArgumentParser(description="Train a network whose halves lie on two devices.")
    parser.add_argument("--epochs", type=int, default=10, help="[10]")
    parser.add_argument("--batch-size", type=int, default=64, help="images in a step, all workers together [64]")
    parser.add_argument("--learning-rate", type=float, default=0.05, help="of SGD with momentum 0.9 [0.05]")
    parser.add_argument("--target", type=float, default=90.0, help="fail below this accuracy, in percent [90]")
    args = parser.parse_args()

    devices = join()
    reached = compare(args, devices)  # a function of its own: the model must be gone before its process group is
    dist.destroy_process_group()
    if reached < args.target:
        raise SystemExit(f"accuracy {reached:.2f}% is below the target of {args.target:g}%")


if __name__ == "__main__":
    main()
