"""Has all workers answer alike whether to stop. Refuses to guess: it asks, or fails as the other workers are gone."""

from __future__ import annotations

import os
from weakref import ref

import torch
import torch.distributed as dist

from ddplaunch.worker.api.notice import heard, listen
from ddplaunch.worker.api.place import place

_stopping = False
_calls = 0
# Weak, so that destroy_process_group() ends them: gloo's, of our own, and the default group that it was made beside.
_group: ref[dist.ProcessGroup] | None = None
_beside: ref[dist.ProcessGroup] | None = None


def should_stop(*, every: int = 1) -> bool:
    """Return whether to save and leave: True at the same call in every worker, once any of them has had a notice.

    A notice is SIGTERM, SIGUSR1 or a signal in `DDPLAUNCH_NOTICE_SIGNALS`. The first call installs their handlers, and
    those that the program has installed are still called. Until then a signal does what it always does: ends the worker.
    After True the answer stays True.

    It is a collective: every worker calls it equally often, say once a step. With `every=10` only each tenth call asks
    the others; those between return False. The workers talk over gloo on the CPU, so no GPU is waited for.

    Raises:
        RuntimeError: another worker is gone; or there is no process group, though there are other workers; or the first
            call is not made in the main thread.
        ValueError: `every` is less than 1, or a variable holds what cannot be.
    """
    global _stopping, _calls
    if every < 1:
        raise ValueError(f"every is {every}, but a call can be skipped only between calls that are not")
    listen()
    if _stopping:
        return True
    if _world_size() == 1:
        _stopping = heard()
        return _stopping
    group = _join()
    _calls += 1
    if _calls % every == 0:
        told = torch.tensor([int(heard())], dtype=torch.int32, device="cpu")
        dist.all_reduce(told, dist.ReduceOp.MAX, group=group)
        _stopping = bool(told.item())
    return _stopping


def _world_size() -> int:
    if dist.is_initialized():
        return dist.get_world_size()
    world_size = place(os.environ).world_size
    if world_size > 1:
        raise RuntimeError(
            f"should_stop() asks all {world_size} workers, but this one is in no process group: "
            "call ddplaunch.init_process_group() first, and torch.distributed.destroy_process_group() last"
        )
    return world_size


def _join() -> dist.ProcessGroup:
    """Give the group of our own, made anew if the default group is another one than before."""
    global _group, _beside, _calls
    group, world = _group() if _group else None, dist.group.WORLD
    if group is None or _beside is None or _beside() is not world:
        group = dist.new_group(backend="gloo")
        assert isinstance(group, dist.ProcessGroup)  # every rank is in it
        assert world is not None  # or new_group() had failed
        _group, _beside, _calls = ref(group), ref(world), 0
    return group
