"""Train a small network on handwritten digits with DistributedDataParallel: copy this, and put your model and data in.

ddplaunch --nproc-per-node 4 examples/train_ddp.py --checkpoint digits.pt
torchrun --nproc-per-node 4 examples/train_ddp.py
python examples/train_ddp.py
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset, random_split

import ddplaunch


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small network on handwritten digits with DDP.")
    parser.add_argument("--epochs", type=int, default=12, help="of the whole training [12]")
    parser.add_argument("--batch-size", type=int, default=64, help="of all workers together [64]")
    parser.add_argument("--checkpoint", type=Path, help="resume from this file, and save to it after each epoch")
    args = parser.parse_args()

    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = ddplaunch.device()

    digits = load_digits()  # 1,797 images of 8 x 8 pixels, which come with scikit-learn
    inputs = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    dataset = TensorDataset(inputs, torch.tensor(digits.target))
    train_set, val_set = random_split(dataset, [1437, 360], torch.Generator().manual_seed(0))  # the same on every rank
    sampler: DistributedSampler[object] = DistributedSampler(train_set, drop_last=True)  # each rank has its own part
    train_loader = DataLoader(train_set, args.batch_size // world_size, sampler=sampler, drop_last=True)
    val_loader = DataLoader(Subset(val_set, range(rank, len(val_set), world_size)), batch_size=256)

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=3, padding=1), nn.ReLU(),
        nn.Conv2d(16, 32, kernel_size=3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * 4 * 4, 10),
    ).to(device)  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    first_epoch = 0
    if args.checkpoint and args.checkpoint.exists():
        checkpoint = torch.load(args.checkpoint, map_location="cpu", weights_only=True)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        first_epoch = checkpoint["epoch"]
    ddp_model = DistributedDataParallel(model)

    for epoch in range(first_epoch, args.epochs):
        sampler.set_epoch(epoch)  # another order in each epoch
        model.train()
        for images, labels in train_loader:
            loss = cross_entropy(ddp_model(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()  # averages the gradients of all ranks
            optimizer.step()

        model.eval()
        correct = torch.zeros((), device=device)
        with torch.no_grad():
            for images, labels in val_loader:
                logits = model(images.to(device))
                correct += (logits.argmax(dim=1) == labels.to(device)).sum()
        dist.all_reduce(correct)  # the sum over all ranks

        if rank == 0:
            print(f"epoch {epoch + 1:2}: loss {loss.item():.4f}, accuracy {correct.item() / len(val_set):.2%}")
            if args.checkpoint:
                state = {"epoch": epoch + 1, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
                unfinished = args.checkpoint.with_suffix(".tmp")
                torch.save(state, unfinished)
                unfinished.replace(args.checkpoint)  # a kill at any moment leaves a whole file


if __name__ == "__main__":
    with ddplaunch.init_process_group():  # nccl on GPUs, gloo on CPUs
        main()
