"""Has all workers agree whether to stop. Refuses to guess: it asks the other workers, or fails if one is gone."""

from __future__ import annotations

import os
from weakref import ref

import torch
import torch.distributed as dist

from ddplaunch.worker.api.notice import install_handlers, received
from ddplaunch.worker.api.ranks import ranks

_stopping = False
_calls = 0
# our own group, of gloo, and the default group beside which it was made; weak, so that destroy_process_group() ends them
_group: ref[dist.ProcessGroup] | None = None
_beside: ref[dist.ProcessGroup] | None = None


def should_stop(*, every: int = 1) -> bool:
    """Return whether to save and leave: True at the same call in every worker, once any of them has received a notice.

    A notice is SIGTERM, SIGUSR1 or a signal in `DDPLAUNCH_NOTICE_SIGNALS`. The first call installs their handlers, and
    those that the program has installed are still called. Until then a signal has its default action: it ends the worker.
    After True the result stays True.

    It is a collective: every worker calls it equally often, say once a step. With `every=10` only each tenth call asks
    the others; those between return False. The collective runs in gloo on the CPU and waits for no GPU.

    Raises:
        RuntimeError: another worker is gone; or there is no process group, though there are other workers; or the first
            call is not made in the main thread.
        ValueError: `every` is less than 1, or a variable has an invalid value.
    """
    global _stopping, _calls
    if every < 1:
        raise ValueError(f"every is {every}, but a call can be skipped only between calls that are not")
    install_handlers()
    if _stopping:
        return True
    if _world_size() == 1:
        _stopping = received()
        return _stopping
    group = _join()
    _calls += 1
    if _calls % every == 0:
        noticed = torch.tensor([int(received())], dtype=torch.int32, device="cpu")
        dist.all_reduce(noticed, dist.ReduceOp.MAX, group=group)
        _stopping = bool(noticed.item())
    return _stopping


def _world_size() -> int:
    """Return the number of workers to ask.

    Raises: RuntimeError: this worker is in no process group, though there are others.
    """
    if dist.is_initialized():
        return dist.get_world_size()
    world_size = ranks(os.environ).world_size
    if world_size > 1:
        raise RuntimeError(
            f"should_stop() asks all {world_size} workers, but this one is in no process group: "
            "call ddplaunch.init_process_group() first, and torch.distributed.destroy_process_group() last"
        )
    return world_size


def _join() -> dist.ProcessGroup:
    """Return our own group; make another if the default group has changed."""
    global _group, _beside, _calls
    group, world = _group() if _group else None, dist.group.WORLD
    if group is None or _beside is None or _beside() is not world:
        group = dist.new_group(backend="gloo")
        assert isinstance(group, dist.ProcessGroup)  # every rank is in it
        assert world is not None  # or new_group() had failed
        _group, _beside, _calls = ref(group), ref(world), 0
    return group
