"""What `import ddplaunch` offers a script: its device, its process group, and whether to stop. Starts no process."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist

from ddplaunch.worker.notice import Ranks, install_handlers, number, ranks, received, spare_children

COUNTED_KINDS = ("cuda", "xpu")  # kinds of which a machine has several; ROCm's are called cuda too
_FORMS = "env://, tcp://HOST:PORT or file:///PATH"
_is_stopping = False  # should_stop() has returned True
_calls = 0  # of should_stop() that used the group below
# should_stop()'s own group, of gloo, and the default group for which it was made; weak, so that destroy_process_group() ends them
_stop_group: ref[dist.ProcessGroup] | None = None
_stop_group_made_for: ref[dist.ProcessGroup] | None = None


def device() -> torch.device:
    """Return the device that this worker should use.

    That is `DDPLAUNCH_DEVICE`, which ddplaunch sets. Without it, under torchrun or plain `python`, it is the
    accelerator (CUDA, ROCm or Intel) with the number `LOCAL_RANK`; the only one, if torch sees one; or else the CPU.
    Apple's MPS is never chosen by itself, since no backend of torch.distributed carries its tensors.

    Raises:
        ValueError: the variables name a device that torch does not have here.
    """
    return torch.device(choose(os.environ, visible))


def choose(env: Mapping[str, str], count: Callable[[str], int]) -> str:
    """Return the name of the device from the variables; `count` gives how many of a kind torch sees. Pure.

    Raises: ValueError: there is no such device.
    """
    name = env.get("DDPLAUNCH_DEVICE", "")
    if not name:
        kind = next((kind for kind in COUNTED_KINDS if count(kind)), "cpu")
        return kind if kind == "cpu" else _by_local_rank(kind, env, count(kind))
    kind, colon, index = name.partition(":")
    try:
        torch.device(name)
    except RuntimeError:
        raise ValueError(
            f"DDPLAUNCH_DEVICE is {name!r}, which is no device of torch; use cpu, cuda:0 or xpu:0"
        ) from None
    if kind not in COUNTED_KINDS:  # a machine has but one
        return name
    number_seen = count(kind)
    if number_seen == 0 or (colon and int(index) >= number_seen):
        seen = f"only {number_seen} of that kind" if number_seen else "none of that kind"
        raise ValueError(f"DDPLAUNCH_DEVICE is {name!r}, but torch {torch.__version__} sees {seen} here{_hiding(env)}")
    return name if colon else _by_local_rank(kind, env, number_seen)


def visible(kind: str) -> int:
    """Count the devices of a kind that torch can use, without starting CUDA where NVML can tell."""
    return int(torch.cuda.device_count() if kind == "cuda" else torch.xpu.device_count())


def _by_local_rank(kind: str, env: Mapping[str, str], number_seen: int) -> str:
    """Return the device with the number LOCAL_RANK, of so many devices of this kind that torch sees."""
    if number_seen == 1:  # the scheduler hides the others from this worker, or all share this one
        return f"{kind}:0"
    local_rank = number("LOCAL_RANK", env)
    if local_rank >= number_seen:
        raise ValueError(
            f"LOCAL_RANK is {local_rank}, but torch sees only {number_seen} {kind} devices here{_hiding(env)}: "
            f"start at most {number_seen} workers on this node, or set DDPLAUNCH_DEVICE to the one to share"
        )
    return f"{kind}:{local_rank}"


def _hiding(env: Mapping[str, str]) -> str:
    """Name the variables that may hide devices."""
    names = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
    hiding = ", ".join(f"{name}={env[name]}" for name in names if name in env)
    return f" ({hiding})" if hiding else ""


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
_groups_joined = 0  # by this process, through ddplaunch
_latest_group: ref[dist.ProcessGroup] | None = None  # of these; weak, so that destroy_process_group() frees it
_latest_arguments: object = None  # with which it was made


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
    global _latest_group, _latest_arguments
    arguments = (backend, timeout, dict(options))
    if dist.is_initialized():
        is_ours = _latest_group is not None and _latest_group() is dist.group.WORLD
        if is_ours and _latest_arguments == arguments:
            return Membership()
        raise RuntimeError(
            "there is a process group already, and it was made with other arguments: "
            "call torch.distributed.destroy_process_group() first, or join once"
        )
    here, chosen = ranks(os.environ), device()
    if chosen.index is not None and chosen.type in ("cuda", "xpu"):
        getattr(torch, chosen.type).set_device(chosen)
    backend = backend or os.environ.get("DDPLAUNCH_BACKEND") or suitable(chosen.type, dist.is_backend_available)
    if "nccl" in backend and chosen.type == "cuda":
        options.setdefault("device_id", chosen)  # NCCL connects now, and need not guess the device later
    _set_rendezvous(here, timeout, options)
    dist.init_process_group(backend, timeout=timeout, **options)
    assert dist.group.WORLD is not None
    _latest_group, _latest_arguments = ref(dist.group.WORLD), arguments
    spare_children()  # a notice must not kill a data loader
    return Membership()


def suitable(kind: str, has: Callable[[str], bool]) -> str:
    """Return the backend for a kind of device; `has` says whether torch was built with one. Pure."""
    backend = {"cuda": "nccl", "xpu": "xccl"}.get(kind, "gloo")
    return backend if has(backend) else "gloo"


def _set_rendezvous(here: Ranks, timeout: timedelta | None, options: dict[str, Any]) -> None:
    """Set in the options for torch how the workers find each other, unless the program's own options say so already.

    All groups of a process share one store; a prefix keeps the keys of each apart.
    """
    global _store, _groups_joined
    method = options.get("init_method")
    if method == "env://":  # torch reads all from the variables
        return
    if method is not None or options.get("store") is not None:
        options.setdefault("rank", here.rank)
        options.setdefault("world_size", here.world_size)
        return
    if _store is None:
        _store = _new_store(here, timeout)
        atexit.register(_leave_gloo_and_store)
    _groups_joined += 1
    store = dist.PrefixStore(f"ddplaunch/{_groups_joined}", _store)
    options.update(store=store, rank=here.rank, world_size=here.world_size)


def _new_store(here: Ranks, timeout: timedelta | None) -> dist.Store:
    """Return the store by which the workers find each other, from `DDPLAUNCH_INIT_METHOD`."""
    if here.world_size == 1:
        return dist.HashStore()
    method = os.environ.get("DDPLAUNCH_INIT_METHOD") or "env://"
    if not method.startswith(("env://", "tcp://", "file:///")):
        raise ValueError(f"DDPLAUNCH_INIT_METHOD is {method!r}; use {_FORMS}")
    limit = {} if timeout is None else {"timeout": timeout}
    store: dist.Store
    store, _rank, _world_size = next(dist.rendezvous(method, here.rank, here.world_size, **limit))
    # each worker counts itself in the file: more than once, and the file has the keys of others
    if method.startswith("file:") and store.add(f"ddplaunch/rank/{here.rank}", 1) > 1:
        path = method[len("file://") :]
        raise RuntimeError(
            f"{path} has been used by another worker with rank {here.rank}: an earlier run left it behind, or two jobs "
            "use it. Remove it, or name another file"
        )
    return store


def _leave_gloo_and_store() -> None:
    """Leave a group of gloo that the program has not left, and the store: their threads would outlive the interpreter.

    gloo waits for no other worker here. NCCL would; torch itself ends its groups with the process.
    """
    global _store
    if dist.is_initialized() and dist.get_backend() == "gloo":
        dist.destroy_process_group()
    _store = None


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
    global _is_stopping, _calls
    if every < 1:
        raise ValueError(f"every is {every}, but a call can be skipped only between calls that are not")
    install_handlers()
    if _is_stopping:
        return True
    world_size = dist.get_world_size() if dist.is_initialized() else ranks(os.environ).world_size
    if world_size > 1 and not dist.is_initialized():
        raise RuntimeError(
            f"should_stop() asks all {world_size} workers, but this one is in no process group: "
            "call ddplaunch.init_process_group() first, and torch.distributed.destroy_process_group() last"
        )
    if world_size == 1:
        _is_stopping = received()
        return _is_stopping
    group = _group_for_stopping()
    _calls += 1
    if _calls % every == 0:
        noticed = torch.tensor([int(received())], dtype=torch.int32, device="cpu")
        dist.all_reduce(noticed, dist.ReduceOp.MAX, group=group)
        _is_stopping = bool(noticed.item())
    return _is_stopping


def _group_for_stopping() -> dist.ProcessGroup:
    """Return should_stop()'s own group; make another if the program has made another default group since."""
    global _stop_group, _stop_group_made_for, _calls
    group, world = _stop_group() if _stop_group else None, dist.group.WORLD
    if group is None or _stop_group_made_for is None or _stop_group_made_for() is not world:
        group = dist.new_group(backend="gloo")
        assert isinstance(group, dist.ProcessGroup)  # every rank is in it
        assert world is not None  # or new_group() had failed
        _stop_group, _stop_group_made_for, _calls = ref(group), ref(world), 0
    return group
