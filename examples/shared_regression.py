"""Learn a straight line with four processes on two shared numbers, with both of torch's ways to share memory.

    ddplaunch examples/shared_regression.py
    ddplaunch --sharing-strategy file_system examples/shared_regression.py --strategies own

The points lie on y = 2 x + 3, with normal noise of variance 0.25. Slope and offset are the parameters of one nn.Linear in
shared memory. Every process has a quarter of the points and changes the parameters without a lock. Nothing can predict
noise, so the best mean squared error is the variance of the noise.
"""

from __future__ import annotations

import argparse
import os
from threading import Barrier

import torch
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.multiprocessing.spawn import start_processes
from torch.nn.functional import mse_loss

SLOPE, OFFSET, VARIANCE = 2.0, 3.0, 0.25
POINTS = 4000
BATCH = 20  # points
RATE = 0.1  # of learning, at first
STRATEGIES = ("file_descriptor", "file_system")


def make_points(seed: int) -> tuple[Tensor, Tensor]:
    """Return x, in [-1, 1], and y, both N x 1."""
    random = torch.Generator().manual_seed(seed)
    x = 2 * torch.rand(POINTS, 1, generator=random) - 1
    return x, SLOPE * x + OFFSET + VARIANCE**0.5 * torch.randn(POINTS, 1, generator=random)


def learn(index: int, processes: int, line: nn.Linear, x: Tensor, y: Tensor, epochs: int, ready: Barrier) -> None:
    """Change the shared line so that it fits this process's part of the points better."""
    torch.set_num_threads(1)  # two numbers are no work for more
    mine_x, mine_y = x[index::processes], y[index::processes]
    random = torch.Generator().manual_seed(index)
    optimizer = torch.optim.SGD(line.parameters(), lr=RATE)
    ready.wait()  # so that all really change the line at the same time
    for epoch in range(epochs):
        for group in optimizer.param_groups:
            group["lr"] = RATE * (1 - epoch / epochs)  # smaller and smaller steps: the noise of a batch averages out
        for batch in torch.randperm(len(mine_x), generator=random).split(BATCH):
            loss = mse_loss(line(mine_x[batch]), mine_y[batch])
            optimizer.zero_grad()  # the gradient is this process's own
            loss.backward()
            optimizer.step()  # the line is everybody's


def descriptors() -> int:
    """Count the open files of this process that are shared memory of torch."""
    links = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
    return sum(os.readlink(link).startswith("/dev/shm/torch_") for link in links if os.path.lexists(link))


def names() -> int:
    """Count the names in /dev/shm that are shared memory which this process has made."""
    return sum(name.startswith(f"torch_{os.getpid()}_") for name in os.listdir("/dev/shm"))


def fit(processes: int, epochs: int) -> None:
    """Learn the line with this many processes, and print how they shared memory and what they learned."""
    torch.manual_seed(0)
    line = nn.Linear(1, 1).share_memory()  # two parameters, so two pieces of shared memory
    x, y = (tensor.share_memory_() for tensor in make_points(seed=1))
    ready = mp.get_context("forkserver").Barrier(processes)
    arguments = (processes, line, x, y, epochs, ready)
    members = start_processes(learn, arguments, processes, join=False, start_method="forkserver")
    print(
        f"{mp.get_sharing_strategy()}: 4 tensors, {descriptors()} open files, {names()} names in /dev/shm", flush=True
    )
    while not members.join():  # it waits for some of them; if one fails, it ends all, and says why
        pass

    x, y = make_points(seed=2)  # points that nobody has learned
    with torch.no_grad():
        error = float(mse_loss(line(x), y))
    slope, offset = line.weight.item(), line.bias.item()
    print(f"  y = {slope:.3f} x + {offset:.3f}, mean squared error {error:.4f}, noise {VARIANCE}", flush=True)


def main() -> None:
    """Learn the line once with each strategy."""
    parser = argparse.ArgumentParser(description="Processes learn one line, whose parameters they share.")
    parser.add_argument("--processes", type=int, default=4, help="that learn together [4]")
    parser.add_argument("--epochs", type=int, default=10, help="over the points of each process [10]")
    parser.add_argument(
        "--strategies",
        choices=[*STRATEGIES, "both", "own"],
        default="both",
        help="how memory is shared; own: as torch, or `ddplaunch --sharing-strategy`, has it [both]",
    )
    args = parser.parse_args()
    # processes are forked from one that has imported torch already, and what the first step of an optimizer imports
    mp.get_context("forkserver").set_forkserver_preload(["torch._dynamo"])
    own = mp.get_sharing_strategy()
    for strategy in {"both": STRATEGIES, "own": (own,)}.get(args.strategies, (args.strategies,)):
        mp.set_sharing_strategy(strategy)
        fit(args.processes, args.epochs)


if __name__ == "__main__":
    main()
