"""Train a small network on handwritten digits with DDP: copy this, and put your model and data in."""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset, random_split

import ddplaunch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--checkpoint", type=Path, help="resume from this file, and save to it after each epoch")
    args = parser.parse_args()
    rank, world_size, device = dist.get_rank(), dist.get_world_size(), ddplaunch.device()
    torch.manual_seed(0)  # every rank makes the same split, and begins with the same weights
    inputs, targets = map(torch.from_numpy, load_digits(return_X_y=True))  # 1,797 images of 64 pixels, and their digits
    train_set, val_set = random_split(TensorDataset(inputs.float() / 16, targets), [1437, 360])
    sampler: DistributedSampler[object] = DistributedSampler(train_set, drop_last=True)  # each rank has its own part
    train_loader = DataLoader(train_set, batch_size=64 // world_size, sampler=sampler, drop_last=True)
    val_loader = DataLoader(Subset(val_set, range(rank, len(val_set), world_size)), batch_size=64)

    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    first_epoch = 0
    if args.checkpoint and args.checkpoint.exists():
        state = torch.load(args.checkpoint, map_location="cpu", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first_epoch = state["epoch"]
    ddp_model = torch.nn.parallel.DistributedDataParallel(model)
    for epoch in range(first_epoch, args.epochs):
        sampler.set_epoch(epoch)  # another order of the images in each epoch
        model.train()
        for images, labels in train_loader:
            loss = torch.nn.functional.cross_entropy(ddp_model(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()  # averages the gradients of all ranks
            optimizer.step()
        model.eval()
        correct = torch.zeros((), device=device)
        with torch.no_grad():
            for images, labels in val_loader:
                correct += (model(images.to(device)).argmax(dim=1) == labels.to(device)).sum()
        dist.all_reduce(correct)  # the sum over all ranks
        if rank == 0:
            print(f"epoch {epoch + 1:2}: loss {loss.item():.4f}, accuracy {correct.item() / len(val_set):.2%}")
            if args.checkpoint:
                state = {"epoch": epoch + 1, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(state, f"{args.checkpoint}.tmp")
                Path(f"{args.checkpoint}.tmp").replace(args.checkpoint)  # a kill at any moment leaves a whole file


if __name__ == "__main__":
    with ddplaunch.init_process_group():  # nccl on GPUs, gloo on CPUs
        main()
