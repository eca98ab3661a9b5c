"""Joins the process group that the variables describe, and leaves it at the end. Decides nothing about devices."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist

from ddplaunch.worker.api.device import device
from ddplaunch.worker.api.notice import spare_children
from ddplaunch.worker.api.ranks import Ranks, ranks

_FORMS = "env://, tcp://HOST:PORT or file:///PATH"


class Membership:
    """What `init_process_group()` returns: leaves the process group at the end of a `with` block that ended well.

    After an exception the group is left as it is: with NCCL, leaving it can mean waiting for workers that wait for this
    one, and the job would learn of the failure only when they give up.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and dist.is_initialized():
            dist.destroy_process_group()


_store: dist.Store | None = None  # kept for the next group: a fast worker must not connect to a store that is closing
_joined = 0  # how many groups this process has joined through ddplaunch
_latest: ref[dist.ProcessGroup] | None = None  # the last of them; weak, so that destroy_process_group() frees it
_arguments: object = None  # with which it was made


def init_process_group(backend: str | None = None, timeout: timedelta | None = None, **options: Any) -> Membership:
    """Join the other workers in torch's default process group, and make this worker's device the current one.

    The backend is that of `DDPLAUNCH_BACKEND`, else the one that suits `device()`: NCCL, XCCL or gloo. The workers find
    each other by `DDPLAUNCH_INIT_METHOD`, else by `MASTER_ADDR` and `MASTER_PORT`; a single worker, as under plain `python`,
    needs no rendezvous and no port. `timeout` and all further options go to `torch.distributed.init_process_group`.

    Called again with the same arguments it changes nothing. The group is left at the end of the program, or of a `with` block:

        with ddplaunch.init_process_group():
            train()

    Raises:
        ValueError: a variable has an invalid value.
        RuntimeError: there is another process group already, or an earlier run has left the file of `file://`. Besides,
            what torch raises.
    """
    global _latest, _arguments
    arguments = (backend, timeout, dict(options))
    if dist.is_initialized():
        if _latest is not None and _latest() is dist.group.WORLD and _arguments == arguments:
            return Membership()
        raise RuntimeError(
            "there is a process group already, and it was made with other arguments: "
            "call torch.distributed.destroy_process_group() first, or join once"
        )
    here, chosen = ranks(os.environ), device()
    if chosen.index is not None and chosen.type in ("cuda", "xpu"):
        getattr(torch, chosen.type).set_device(chosen)
    backend = backend or os.environ.get("DDPLAUNCH_BACKEND") or suitable(chosen.type, _has)
    if "nccl" in backend and chosen.type == "cuda":
        options.setdefault("device_id", chosen)  # NCCL connects now, and need not guess the device later
    _set_rendezvous(here, timeout, options)
    dist.init_process_group(backend, timeout=timeout, **options)
    assert dist.group.WORLD is not None
    _latest, _arguments = ref(dist.group.WORLD), arguments
    spare_children()
    return Membership()


def suitable(kind: str, has: Callable[[str], bool]) -> str:
    """Return the backend for a kind of device; `has` says whether torch was built with one. Pure."""
    backend = {"cuda": "nccl", "xpu": "xccl"}.get(kind, "gloo")
    return backend if has(backend) else "gloo"


def _has(backend: str) -> bool:
    return dist.is_backend_available(backend)


def _set_rendezvous(here: Ranks, timeout: timedelta | None, options: dict[str, Any]) -> None:
    """Set in the options how the workers find each other, unless the options say so already."""
    global _store, _joined
    method = options.get("init_method")
    if method == "env://":
        return
    if method is not None or options.get("store") is not None:
        options.setdefault("rank", here.rank)
        options.setdefault("world_size", here.world_size)
        return
    if _store is None:
        _store = _new_store(here, timeout)
        atexit.register(_leave)
    _joined += 1
    options.update(store=dist.PrefixStore(f"ddplaunch/{_joined}", _store), rank=here.rank, world_size=here.world_size)


def _new_store(here: Ranks, timeout: timedelta | None) -> dist.Store:
    """Return the store by which the workers find each other, from `DDPLAUNCH_INIT_METHOD`."""
    if here.world_size == 1:
        return dist.HashStore()
    method = os.environ.get("DDPLAUNCH_INIT_METHOD") or "env://"
    if not method.startswith(("env://", "tcp://", "file:///")):
        raise ValueError(f"DDPLAUNCH_INIT_METHOD is {method!r}; use {_FORMS}")
    limit = {} if timeout is None else {"timeout": timeout}
    store: dist.Store = next(dist.rendezvous(method, here.rank, here.world_size, **limit))[0]
    if method.startswith("file:") and store.add(f"ddplaunch/rank/{here.rank}", 1) > 1:
        path = method[len("file://") :]
        raise RuntimeError(
            f"{path} has been used by another worker with rank {here.rank}: an earlier run left it behind, or two jobs "
            "use it. Remove it, or name another file"
        )
    return store


def _leave() -> None:
    """Leave a group of gloo that the program has not left, and the store: their threads would outlive the interpreter.

    gloo waits for no other worker here. NCCL would; torch itself ends its groups with the process.
    """
    global _store
    if dist.is_initialized() and dist.get_backend() == "gloo":
        dist.destroy_process_group()
    _store = None
