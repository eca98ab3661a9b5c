"""Train one shared model with several processes and no lock, and measure the cost of too many threads.

    ddplaunch examples/hogwild.py
    ddplaunch examples/hogwild.py --processes 2 4 8 --plot hogwild.png

The weights are in shared memory. Every process reads and writes them without waiting, so an update may be lost, and the
training still works (Hogwild: Niu, Recht, Re, Wright, 2011). Each number of processes M runs twice: with floor(N / M)
threads in each process, and with N threads, torch's default. N is the number of usable CPUs.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from threading import Barrier
from typing import NamedTuple

import torch
import torch.multiprocessing as mp
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.multiprocessing.spawn import start_processes
from torch.nn.functional import cross_entropy

VAL = 360  # images to validate with
BATCH = 64  # images
BAR = 48  # characters of the longest bar


class Work(NamedTuple):
    """What one process of a run does."""

    model: nn.Module  # shared
    images: Tensor  # shared, as are the labels: no process has a copy
    labels: Tensor
    threads: int
    steps: int
    seconds: float  # it stops then, steps or not; may be infinite
    rate: float  # of learning


class Run(NamedTuple):
    """What came of one run."""

    processes: int
    threads: int  # in each
    speed: float  # images a second, all processes together
    finished: bool  # all steps taken before the time was up
    accuracy: float  # on the images held back, in percent


def load_data() -> tuple[Tensor, Tensor]:
    """Return the images, N x 1 x 8 x 8 in [0, 1], and their labels, in one random order."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    return images[order], torch.tensor(digits.target)[order]


def make_model() -> nn.Module:
    """Return a model that maps N x 1 x 8 x 8 images to the N x 10 logits of the digits."""
    return nn.Sequential(
        nn.Conv2d(1, 8, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 16, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * 4 * 4, 10),
    )


def train(index: int, work: Work, start: Barrier, taken: Tensor, seconds: Tensor) -> None:
    """Train the shared network, together with the other processes; note the steps taken and the time they took."""
    torch.set_num_threads(work.threads)
    torch.manual_seed(index)  # another order of images in each process
    # gradients and momentum belong to this process, for they are made here; only the weights are shared
    optimizer = torch.optim.SGD(work.model.parameters(), lr=work.rate, momentum=0.9)
    start.wait()  # whoever is there first must not have the CPUs to itself
    began = time.perf_counter()
    for step in range(work.steps):
        batch = torch.randint(len(work.images), (BATCH,))
        loss = cross_entropy(work.model(work.images[batch]), work.labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()  # in place, and so in every process at once; nobody waits for anybody
        taken[index] = step + 1
        seconds[index] = time.perf_counter() - began
        if seconds[index] > work.seconds:
            break


def run(processes: int, threads: int, args: argparse.Namespace, images: Tensor, labels: Tensor) -> Run:
    """Train a new network with this many processes, and say how fast and how well."""
    torch.manual_seed(0)
    model = make_model().share_memory()  # before any gradient exists: those would be shared too
    # each has its own optimizer, so that M processes take about M steps where one takes one: smaller ones, then
    steps, rate = args.steps // processes, 0.1 / processes
    # where every process takes all CPUs, the steps may take minutes on a machine that has other work too
    limit = args.seconds if threads == torch.get_num_threads() > 1 else math.inf
    work = Work(model, images[VAL:], labels[VAL:], threads, steps, limit, rate)
    taken, seconds = torch.zeros(processes, dtype=torch.int64), torch.zeros(processes)
    start = mp.get_context("forkserver").Barrier(processes)
    # tensors among the arguments are moved to shared memory, and what a process writes to them is seen here
    arguments = (work, start, taken.share_memory_(), seconds.share_memory_())
    start_processes(train, arguments, processes, start_method="forkserver")  # if one fails, it ends all, and says why
    with torch.no_grad():
        right = model(images[:VAL]).argmax(dim=1) == labels[:VAL]
    speed = float(BATCH * taken.sum() / seconds.max())
    return Run(processes, threads, speed, bool((taken == steps).all()), 100 * float(right.float().mean()))


def cell(run: Run) -> str:
    """Give one run for the table."""
    end = "" if run.finished else ", cut off"
    return f"{run.threads:3} {run.speed:9,.0f} ({run.accuracy:.1f}%{end})"


def show(pairs: list[tuple[Run, Run]]) -> None:
    """Draw the speeds as bars."""
    fastest = max(run.speed for pair in pairs for run in pair)
    print("\nimages/s, processes x threads")
    for run in dict.fromkeys(run for pair in pairs for run in pair):
        bar = "#" * max(1, round(BAR * run.speed / fastest))
        print(f"{run.processes:3} x {run.threads:<3}{bar} {run.speed:,.0f}")


def save_plot(path: Path, pairs: list[tuple[Run, Run]]) -> None:
    """Save the ratios as an image."""
    from matplotlib.figure import Figure

    axes = (figure := Figure(figsize=(6, 4), layout="constrained")).subplots()
    processes = [bounded.processes for bounded, _ in pairs]
    axes.plot(processes, [ratio(pair) for pair in pairs], "o-")
    axes.set(xlabel="processes", xticks=processes, ylabel="speed with bounded threads / unbounded", yscale="log")
    figure.savefig(path)


def ratio(pair: tuple[Run, Run]) -> float:
    """Say how many times faster bounded threads are."""
    return pair[0].speed / pair[1].speed


def main() -> None:
    parser = argparse.ArgumentParser(description="Hogwild: processes train one shared model without locks.")
    parser.add_argument(
        "--processes", type=int, nargs="+", default=[1, 2, 4], help="how many, one run for each [1 2 4]"
    )
    parser.add_argument("--steps", type=int, default=800, help="of all processes of a run together [800]")
    parser.add_argument("--seconds", type=float, default=3.0, help="after which unbounded runs are cut off [3]")
    parser.add_argument("--plot", type=Path, help="save the ratios as an image; needs matplotlib")
    args = parser.parse_args()
    if not 1 <= min(args.processes) <= max(args.processes) <= args.steps:
        parser.error("--processes: at least 1, and at most --steps")

    cpus = torch.get_num_threads()  # ddplaunch gives its only worker every CPU that the job may use
    images, labels = (tensor.share_memory_() for tensor in load_data())
    # processes fork from one that has imported these, and start in milliseconds; the first step of an optimizer needs _dynamo
    mp.get_context("forkserver").set_forkserver_preload(["torch._dynamo", "sklearn.datasets"])
    print(f"{cpus} CPUs, {args.steps} steps of {BATCH} images; accuracy on {VAL} other images", flush=True)
    print("processes   threads, images/s (accuracy)      the same, threads unbounded         ratio")
    pairs = []
    for processes in args.processes:
        few, many = max(1, cpus // processes), cpus
        bounded = run(processes, few, args, images, labels)
        unbounded = run(processes, many, args, images, labels) if many != few else bounded
        pairs.append((bounded, unbounded))
        print(f"{processes:9}   {cell(bounded):34}{cell(unbounded):34}{ratio(pairs[-1]):7.1f}", flush=True)
    show(pairs)
    if args.plot:
        save_plot(args.plot, pairs)


if __name__ == "__main__":
    main()
