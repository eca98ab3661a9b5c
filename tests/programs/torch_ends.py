"""DDP models that end before and after their process groups, over and over, while gloo still has objects of Python to release."""

import os

import torch
import torch.distributed as dist
from signs import put
from torch.nn.parallel import DistributedDataParallel


def trained(group=None):
    model = DistributedDataParallel(torch.nn.Linear(2, 2), process_group=group)
    model(torch.ones(1, 2)).sum().backward()
    if hasattr(torch._C, "_remove_obj_from_tls"):  # a backward pass of torch 2.13 does this, for all collectives in it
        torch._C._stash_obj_in_tls("context", object())
        for _ in range(500):
            dist.all_reduce(torch.ones(1000), group=group, async_op=True)
        torch._C._remove_obj_from_tls("context")
    return model


def join():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def model_first():
    join()
    trained()
    dist.destroy_process_group()


def group_first():
    join()
    model = trained()
    dist.destroy_process_group()
    del model


def reducer_last():
    join()
    model = trained()
    logger, reducer = model.logger, model.reducer
    dist.destroy_process_group()
    del model, reducer
    del logger  # which has the reducer


def subgroups_first():
    join()
    groups = [dist.new_group([0]), dist.new_group([0])]
    models = [trained(group) for group in groups]
    for group in groups:
        dist.destroy_process_group(group)
    dist.destroy_process_group()
    groups.clear()
    models.clear()


def all_ways():
    for way in (model_first, group_first, reducer_last, subgroups_first):
        print(way.__name__, flush=True)
        way()
    return len(os.listdir("/proc/self/task"))


put(f"threads-{len({all_ways() for _ in range(5)})}")
