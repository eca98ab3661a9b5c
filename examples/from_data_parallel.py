"""From nn.DataParallel to DistributedDataParallel: the same step in both, and what has to change for it.

    ddplaunch --nproc-per-node 4 examples/from_data_parallel.py
    torchrun --nproc-per-node 4 examples/from_data_parallel.py
    python examples/from_data_parallel.py

One batch of handwritten digits goes through the same network in both ways, in double precision, so that whatever differs
by more than rounding shows. The batch cannot be shared equally, and the script fails if the outputs, the gradients or
the checkpoints of the two differ. DataParallel needs two GPUs to do anything: with fewer it only calls the module.
"""

from __future__ import annotations

import argparse
import io
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.nn  # before the group exists: imported after it, by DDP, it holds the group past its end
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present
from torch.nn.parallel import DistributedDataParallel

ROUNDING = 1e-10  # of outputs and gradients of about 1, in double precision


class Step(NamedTuple):
    """What came out of a batch."""

    outputs: Tensor  # N x 10, on the CPU
    loss: float
    gradient: Tensor  # of all weights, one behind the other, on the CPU


def join() -> torch.device:
    """Join the other workers of the job and return the device of this one."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    # ddplaunch says which device and backend are right here; the rest is for torchrun and plain python
    fallback = f"cuda:{local_rank}" if torch.cuda.is_available() else "cpu"
    device = torch.device(os.environ.get("DDPLAUNCH_DEVICE", fallback))
    backend = os.environ.get("DDPLAUNCH_BACKEND", "nccl" if torch.cuda.is_available() else "gloo")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        dist.init_process_group(backend)  # reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return device


def load_batch(size: int) -> tuple[Tensor, Tensor]:
    """Return the first digits, N x 1 x 8 x 8 in [0, 1], and what they are."""
    digits = load_digits()
    return torch.tensor(digits.images[:size]).unsqueeze(1) / 16, torch.tensor(digits.target[:size])


def make_network() -> nn.Module:
    """Return the same network in every worker: the seed is the same, and DDP takes the weights of rank 0 anyway."""
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 8, kernel_size=3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 6 * 6, 10)
    return nn.Sequential(*layers).double()


def gradient(model: nn.Module) -> Tensor:
    """Return the gradient of all weights on the CPU, and forget it."""
    flat = torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.grad is not None]).cpu()
    model.zero_grad()
    return flat


def peak(device: torch.device) -> str:
    """Return the most that this process has held on a GPU since the last call, in MiB; "" on a CPU."""
    if device.type != "cuda":
        return ""
    most = torch.cuda.max_memory_allocated(device) / 2**20
    torch.cuda.reset_peak_memory_stats(device)
    return f"{most:.2f}"


def step_of_data_parallel(images: Tensor, labels: Tensor, device: torch.device) -> Step:
    """Take the step in one process, with all GPUs that it sees."""
    device = torch.device(device.type, 0) if device.type == "cuda" else device  # the network has to be on the first
    model = nn.DataParallel(make_network().to(device))  # without GPUs, or with one, it calls the module and no more
    outputs = model(images.to(device))  # cut into equal parts, run in threads, gathered on the first GPU
    loss = cross_entropy(outputs, labels.to(device))  # of the whole batch, on the first GPU
    loss.backward()
    return Step(outputs.detach().cpu(), loss.item(), gradient(model))


def share(batch: Tensor) -> Tensor:
    """Return the part of this worker, cut as DataParallel cuts: the last parts are smaller, or empty."""
    parts = batch.chunk(dist.get_world_size())
    return parts[dist.get_rank()] if dist.get_rank() < len(parts) else batch[:0]


def step_of_ddp(model: nn.Module, images: Tensor, labels: Tensor, weighted: bool) -> Step:
    """Take the step in all workers, each with its share."""
    outputs = model(images)
    # DDP divides the sum of the gradients by the number of workers, as if each had the same number of images
    if weighted:
        images_of_all = torch.tensor(len(images), device=images.device)
        dist.all_reduce(images_of_all)
        loss = cross_entropy(outputs, labels, reduction="sum") * dist.get_world_size() / images_of_all
    else:
        loss = cross_entropy(outputs, labels)
    loss.backward()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, outputs.detach().cpu())  # tensors of unequal lengths: all_gather wants equal ones
    return Step(torch.cat(parts), mean.item() / dist.get_world_size(), gradient(model))


def furthest(one: Tensor, other: Tensor) -> float:
    """Return the largest difference."""
    return float((one - other).abs().max())


def compare(whole: Step, plain: Step, weighted: Step, sizes: Sequence[int]) -> None:
    """Print both steps of DDP beside that of DataParallel, and fail if they are not what they should be."""
    print(f"shares {' '.join(map(str, sizes))}, outputs differ by {furthest(whole.outputs, plain.outputs):.0e}")
    print(f"{'DataParallel':24} loss {whole.loss:.4f}")
    for name, step in (("DDP, mean of means", plain), ("DDP, weighted", weighted)):
        off = float((step.gradient - whole.gradient).norm() / whole.gradient.norm())
        print(f"{name:24} loss {step.loss:.4f}, gradient off by {off:.1%}")
    if not furthest(whole.outputs, weighted.outputs) < ROUNDING:
        raise RuntimeError("the outputs of DDP are not those of DataParallel")
    if not furthest(whole.gradient, weighted.gradient) < ROUNDING:
        raise RuntimeError("the weighted gradient of DDP is not that of DataParallel")
    if len(set(sizes)) > 1 and furthest(whole.gradient, plain.gradient) < ROUNDING:
        raise RuntimeError("the shares are unequal, and yet the mean of the means is right")


def check_checkpoints(model: DistributedDataParallel) -> None:
    """Carry weights from DataParallel to DDP and back, through files, and fail if they do not arrive."""

    def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        loaded: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
        return loaded

    old, bare = nn.DataParallel(make_network()), make_network()
    for weight in old.parameters():
        nn.init.normal_(weight)
    from_old = through_a_file(old.state_dict())
    print(
        f"names in a checkpoint: {next(iter(from_old))} from a wrapper, {next(iter(bare.state_dict()))} from its .module"
    )

    model.load_state_dict(from_old)  # wrapper to wrapper: DDP puts the same `module.` in front
    consume_prefix_in_state_dict_if_present(from_old, "module.")  # in place
    bare.load_state_dict(from_old)  # wrapper to network: for inference, or before it is wrapped
    from_new = through_a_file(model.module.state_dict())  # what to save from now on: it fits a network in any wrapper
    again = nn.DataParallel(make_network())
    again.module.load_state_dict(from_new)
    prefixed = {f"module.{name}": tensor for name, tensor in from_new.items()}  # for a script that you cannot change
    again.load_state_dict(prefixed)
    for name, tensor in old.module.state_dict().items():
        for there in (model.module, bare, again.module):
            if not torch.equal(there.state_dict()[name].cpu(), tensor.cpu()):
                raise RuntimeError(f"{name} was lost on its way between DataParallel and DDP")


def run_data_parallel(batch: tuple[Tensor, Tensor], device: torch.device) -> Step:
    """Take the step with DataParallel and print what it held on each GPU."""
    gpus = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    step = step_of_data_parallel(*batch, device)
    if len(gpus) > 1:
        print(f"DataParallel on {len(gpus)} GPUs: at most {' '.join(peak(gpu) for gpu in gpus)} MiB on each")
    else:
        print("DataParallel: fewer than two GPUs, so it calls the module and no more")
    return step


def run(size: int, device: torch.device) -> None:
    """Take the step in both ways and compare."""
    batch = load_batch(size)
    # before the first collective, so that no GPU is busy with waiting for rank 0
    whole = run_data_parallel(batch, device) if dist.get_rank() == 0 else None

    images, labels = (share(tensor).to(device) for tensor in batch)
    model = DistributedDataParallel(make_network().to(device), device_ids=[device] if device.type == "cuda" else None)
    peak(device)
    weighted = step_of_ddp(model, images, labels, weighted=True)
    facts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(facts, (len(images), peak(device)))
    plain = step_of_ddp(model, images, labels, weighted=False)
    if whole is not None:
        sizes, peaks = zip(*facts, strict=True)
        if device.type == "cuda":
            print(f"DDP: at most {' '.join(peaks)} MiB in each worker, on its own GPU")
        compare(whole, plain, weighted, sizes)
        check_checkpoints(model)
        print(f"DataParallel and DDP on {len(sizes)} workers: same outputs, same gradient, same checkpoints")


def main() -> None:
    """Join, compare, leave."""
    parser = argparse.ArgumentParser(description="The same step with DataParallel and with DDP.")
    parser.add_argument("--batch-size", type=int, default=13, help="images, all workers together [13]")
    args = parser.parse_args()
    if not 1 <= args.batch_size <= 1797:
        raise SystemExit(f"--batch-size {args.batch_size}: there are 1797 images")

    device = join()
    run(args.batch_size, device)  # a function of its own: the model must be gone before its process group is
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
