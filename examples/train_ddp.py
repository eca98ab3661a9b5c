"""Train a small network on handwritten digits with DDP: copy this, and put your model and data in."""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset, random_split

import ddplaunch


def newest(folder: Path) -> tuple[int, int]:
    """Return the term and the epoch of the newest checkpoint as rank 0 finds it, to all ranks; (0, 0) if there is none."""
    names = [path.stem.split("-") for path in folder.glob("checkpoint-*-*.pt")] if dist.get_rank() == 0 else []
    found = [max(((int(term), int(epoch)) for _, term, epoch in names), default=(0, 0))]
    dist.broadcast_object_list(found)
    return found[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--checkpoints", type=Path, help="folder to resume from, and to save to after each epoch")
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
    term = int(os.environ.get("DDPLAUNCH_TERM", "0"))  # grows with each start; 0: ddplaunch has not started this worker
    last_term, first_epoch = newest(args.checkpoints) if args.checkpoints else (0, 0)
    if 0 < term < last_term:
        raise SystemExit(f"the job has gone on without term {term}, or a clock was wrong: there is term {last_term}")
    term = term or last_term
    if first_epoch:
        path = args.checkpoints / f"checkpoint-{last_term}-{first_epoch}.pt"
        state = torch.load(path, map_location="cpu", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
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
            if args.checkpoints:
                args.checkpoints.mkdir(parents=True, exist_ok=True)
                path = args.checkpoints / f"checkpoint-{term}-{epoch + 1}.pt"
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path.with_suffix(".tmp"))
                path.with_suffix(".tmp").rename(path)  # a kill at any moment leaves a whole file
                oldest = path.with_stem(f"checkpoint-{term}-{epoch - 1}")  # the last two of each term stay
                oldest.unlink(missing_ok=True)


if __name__ == "__main__":
    with ddplaunch.init_process_group():  # nccl on GPUs, gloo on CPUs
        main()
