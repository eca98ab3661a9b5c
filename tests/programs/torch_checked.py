"""Trains a little, and does what its first argument names; for `ddplaunch check`."""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
LAST = WORLD_SIZE - 1


def train(model, batches=10, after=lambda: None):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(batches):
        optimizer.zero_grad()
        model(torch.ones(2, 16)).sum().backward()
        optimizer.step()
        after()


def ddp():
    return DistributedDataParallel(torch.nn.Linear(16, 16))


def fsdp():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (WORLD_SIZE // 8, 8), mesh_dim_names=("dp", "tp"))
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16))
    for layer in model:
        fully_shard(layer, mesh=mesh["dp"])
    train(fully_shard(model, mesh=mesh["dp"]))


def branch():
    def more():
        if RANK == LAST:
            dist.broadcast(torch.ones(8), 0)
        else:
            dist.all_reduce(torch.ones(8))

    train(ddp(), after=more)


def uneven():
    train(ddp(), batches=1 if RANK == LAST else 10)


def groups():
    pairs = [[0, LAST], [1, 2]]
    for ranks in reversed(pairs) if RANK == LAST else pairs:
        dist.new_group(ranks, backend="gloo")


def pairs():
    if RANK == 0:
        dist.send(torch.ones(4), LAST)
        dist.isend(torch.ones(5), LAST).wait()
    elif RANK == LAST:
        dist.recv(torch.empty(4), 0)


def objects():
    found = [{"lr": 0.5}] if RANK == 0 else [None]
    dist.broadcast_object_list(found, src=0)
    everyone = [None] * WORLD_SIZE
    dist.all_gather_object(everyone, found[0]["lr"])
    mine = [None]
    dist.scatter_object_list(mine, list(range(WORLD_SIZE)) if RANK == 0 else None, src=0)
    print(everyone[0], mine[0])
    assert mine[0] == RANK
    dist.broadcast_object_list(found, src=1)


def saves():
    model = ddp()
    train(model, batches=1)
    if RANK == 0:
        torch.save(model.state_dict(), "checkpoint.pt")
    dist.barrier()
    train(model)


def raises():
    raise ValueError("no such\x1b[31m data")


def asserts():
    assert WORLD_SIZE == 64, f"made for 64 ranks, not {WORLD_SIZE}"


def hangs():
    dist.all_reduce(torch.ones(1))
    while RANK:
        time.sleep(0.1)


def forks():
    if os.fork() == 0:
        dist.all_reduce(torch.ones(3))
        time.sleep(600)
        os._exit(0)
    train(ddp())


def leaves():
    dist.all_reduce(torch.ones(2))
    os._exit(5 if RANK else 0)


def floods():
    for _ in range(2000):
        print("x" * 1000)
    train(ddp())


def wants_gpu():
    torch.cuda.set_device(0)


dist.init_process_group(os.environ.get("BACKEND", "nccl"))
globals()[sys.argv[1]]()
