"""Fails on a GPU in the way that its argument names."""

import os
import sys

import torch


def out_of_memory():
    torch.empty(1 << 45, dtype=torch.uint8, device="cuda")


def outside_the_table():
    torch.nn.functional.embedding(torch.tensor([10**6], device="cuda"), torch.ones(10, 4, device="cuda"))
    torch.cuda.synchronize()


def no_such_device():
    torch.cuda.set_device(99)


def fork_after_cuda():
    import multiprocessing

    torch.ones(1, device="cuda")
    with multiprocessing.get_context("fork").Pool(1) as pool:
        pool.apply(uses_cuda)


def uses_cuda():
    return float(torch.ones(1, device="cuda").sum())


def two_ranks_on_one():
    import torch.distributed as dist

    torch.cuda.set_device(os.environ["DDPLAUNCH_DEVICE"])
    dist.init_process_group("nccl")
    dist.all_reduce(torch.ones(1, device="cuda"))
    torch.cuda.synchronize()


def collective_too_late():
    import time
    from datetime import timedelta

    import torch.distributed as dist

    dist.init_process_group("nccl", timeout=timedelta(seconds=3))
    dist.all_reduce(torch.ones(1, device="cuda"))
    torch.cuda.synchronize()
    torch.cuda._sleep(20_000_000_000)  # ten seconds, behind which the next one waits
    dist.all_reduce(torch.ones(1, device="cuda"))
    time.sleep(80)


globals()[sys.argv[1]]()
