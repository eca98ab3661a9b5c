"""Compare one training step of nn.DataParallel with the same step of DistributedDataParallel.

    ddplaunch --nproc-per-node 4 examples/from_data_parallel.py
    torchrun --nproc-per-node 4 examples/from_data_parallel.py
    python examples/from_data_parallel.py

The batch cannot be divided equally, which shows how the loss has to change. With fewer than two GPUs, DataParallel only
calls the model.
"""

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import ddplaunch


def make_model(device: torch.device) -> nn.Module:
    """Return a model with the same weights on every rank, in double precision."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 8, kernel_size=3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 6 * 6, 10))
    return model.double().to(device)


def flat_gradient(model: nn.Module) -> Tensor:
    """Return the gradients of all weights in one vector."""
    return torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.grad is not None])


def data_parallel_step(images: Tensor, labels: Tensor, device: torch.device) -> tuple[float, Tensor]:
    """Take the step in one process with all GPUs. Return loss and gradient."""
    model = nn.DataParallel(make_model(device))
    logits = model(images.to(device))  # cut into parts, run in threads, gathered on the first GPU
    loss = cross_entropy(logits, labels.to(device))  # the mean over the whole batch
    loss.backward()
    return loss.item(), flat_gradient(model)


def ddp_step(images: Tensor, labels: Tensor, device: torch.device, weighted: bool) -> tuple[float, Tensor]:
    """Take the step on all ranks, each with its own part of the batch. Return loss and gradient."""
    model = DistributedDataParallel(make_model(device))
    logits = model(images.to(device))
    if weighted:  # the sum over this part, divided by the mean size of a part
        image_count = torch.tensor(len(images), device=device)
        dist.all_reduce(image_count)
        loss = cross_entropy(logits, labels.to(device), reduction="sum") * dist.get_world_size() / image_count
    else:
        loss = cross_entropy(logits, labels.to(device))  # the mean over this part
    loss.backward()  # DDP divides the sum of the gradients by the number of ranks
    dist.all_reduce(loss := loss.detach())
    return loss.item() / dist.get_world_size(), flat_gradient(model)


def main() -> None:
    parser = argparse.ArgumentParser(description="The same step with DataParallel and with DDP.")
    parser.add_argument("--batch-size", type=int, default=13, help="of all workers together [13]")
    args = parser.parse_args()

    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = ddplaunch.device()
    digits = load_digits()
    images = torch.tensor(digits.images[: args.batch_size]).unsqueeze(1) / 16
    labels = torch.tensor(digits.target[: args.batch_size])
    sizes = [len(part) for part in images.tensor_split(world_size)]
    own_images, own_labels = images.tensor_split(world_size)[rank], labels.tensor_split(world_size)[rank]

    unweighted = ddp_step(own_images, own_labels, device, weighted=False)
    weighted = ddp_step(own_images, own_labels, device, weighted=True)
    if rank == 0:
        loss, gradient = data_parallel_step(images, labels, device)
        print(f"{args.batch_size} images, {', '.join(map(str, sizes))} on each rank")
        print(f"{'DataParallel':24} loss {loss:.4f}")
        for name, (ddp_loss, ddp_gradient) in (("DDP, mean of means", unweighted), ("DDP, weighted", weighted)):
            off = (ddp_gradient - gradient).norm() / gradient.norm()
            print(f"{name:24} loss {ddp_loss:.4f}, gradient off by {off:.1%}")


if __name__ == "__main__":
    with ddplaunch.init_process_group():
        main()
