"""Limits that workers inherit: ulimits, and those of the control groups for memory, CPU time and processes."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from typing import NamedTuple

from msgspec import Struct

from ddplaunch.plan.devices.node import has_nvidia
from ddplaunch.plan.devices.sysfs import cpu_quota, group_limit, names, number, read
from ddplaunch.system.errors import MORE_OPEN_FILES
from ddplaunch.system.words import count, size
from ddplaunch.tools.doctor import Check, Finding, Subject, Verdict, slow

_UNLIMITED = resource.RLIM_INFINITY  # -1
# a worker of torch with four loaders, which share tensors by open files, needs hundreds; ddplaunch raises the soft limit
_FEW_FILES = 4096
_FEW_PROCESSES = 1024  # threads count too: torch starts one for each core, in each worker
_LITTLE_MEMORY = 2 << 30  # bytes: a worker that has imported torch for CUDA has 0.5 GiB, with a context 1 to 2 GiB
_LITTLE_SPACE = 16 << 30  # bytes of addresses
# of a limit on processes: the part in use, and the number that is left
_CROWDED_SHARE, _FEW_LEFT = 0.9, _FEW_PROCESSES // 4


# --- ulimits


class Limit(NamedTuple):
    """A limit as getrlimit(2) gives it; -1: unlimited."""

    soft: int  # holds now, and the process may raise it to the hard one
    hard: int


class Ulimits(Struct, frozen=True, kw_only=True):
    """Limits of this process, which its workers inherit."""

    files: Limit
    locked: Limit  # bytes
    processes: Limit
    core: Limit  # bytes
    address_space: Limit  # bytes
    has_rdma: bool = False  # this machine has an InfiniBand or RoCE device, which pins memory
    has_nvidia: bool = False  # this machine has NVIDIA's driver
    is_root: bool = False  # for whom no limit of processes holds


def read_ulimits(subject: Subject) -> Ulimits:
    """Return the ulimits of this process: workers inherit the same."""
    return Ulimits(
        files=Limit(*resource.getrlimit(resource.RLIMIT_NOFILE)),
        locked=Limit(*resource.getrlimit(resource.RLIMIT_MEMLOCK)),
        processes=Limit(*resource.getrlimit(resource.RLIMIT_NPROC)),
        core=Limit(*resource.getrlimit(resource.RLIMIT_CORE)),
        address_space=Limit(*resource.getrlimit(resource.RLIMIT_AS)),
        has_rdma=bool(names(subject.root, "/sys/class/infiniband")),
        has_nvidia=has_nvidia(subject.env, subject.root),
        is_root=os.geteuid() == 0,
    )


def judge_ulimits(limits: Ulimits) -> Verdict:
    """Judge the hard limit of open files, since ddplaunch raises the soft one, and the soft limits of all others."""
    facts = (
        f"open files {_amount(limits.files.soft)} of {_amount(limits.files.hard)}, locked memory {_bytes(limits.locked.soft)}, "
        f"processes {_amount(limits.processes.soft)}, core files {_bytes(limits.core.soft)}"
    )
    return Verdict(facts, tuple(_ulimit_findings(limits)))


def _ulimit_findings(limits: Ulimits) -> Iterator[Finding]:
    """Yield a finding for each limit that is too low; of files the hard one counts, since ddplaunch raises the soft one."""
    if _below(limits.files.hard, _FEW_FILES):
        yield slow(
            f"a process may have {count(limits.files.hard, 'open file')} only",
            "ulimit -Hn: data loaders share each tensor as an open file, and then fail with `Too many open files`",
            f"{MORE_OPEN_FILES}\nor `ddplaunch --sharing-strategy file_system train.py`",
        )
    if limits.has_rdma and limits.locked.soft != _UNLIMITED:
        yield slow(
            f"a process may lock {size(limits.locked.soft)} of memory only, and this machine has RDMA devices",
            "ulimit -l: NCCL cannot register its buffers, so that it fails or goes over TCP",
            "`ulimit -l unlimited`\nin Slurm PropagateResourceLimitsExcept=MEMLOCK, in docker `--ulimit memlock=-1`",
        )
    if not limits.is_root and _below(limits.processes.soft, _FEW_PROCESSES):
        yield slow(
            f"you may have {limits.processes.soft} processes and threads only",
            "ulimit -u: workers, data loaders and all their threads count",
            "`ulimit -u 65536`\nif that is refused, limits.conf(5) sets the limit",
        )
    if limits.address_space.soft != _UNLIMITED and (limits.has_nvidia or limits.address_space.soft < _LITTLE_SPACE):
        yield slow(
            f"a process may have {size(limits.address_space.soft)} of address space only",
            "ulimit -v: torch maps large libraries, and CUDA reserves addresses for all memory of all GPUs",
            "`ulimit -v unlimited`",
        )


def _below(limit: int, least: int) -> bool:
    return limit != _UNLIMITED and limit < least


def _amount(limit: int) -> str:
    return "unlimited" if limit == _UNLIMITED else str(limit)


def _bytes(limit: int) -> str:
    return "unlimited" if limit == _UNLIMITED else "none" if limit == 0 else size(limit)


# --- control groups


class Groups(Struct, frozen=True, kw_only=True):
    """What the machine has, and what control groups leave of it; None: no limit."""

    memory: int  # bytes of the machine
    available: int  # bytes that could be used now without swapping
    memory_limit: int | None = None  # bytes
    memory_used: int = 0  # bytes, of the group with that limit
    machine_cpus: int = 1
    cpus: int = 1  # that the affinity of this process leaves
    cpu_quota: float | None = None  # CPUs' worth of time
    pids_limit: int | None = None
    pids_used: int = 0


def read_groups(subject: Subject) -> Groups:
    """Read /proc/meminfo, the affinity of this process, and the limits of its control groups."""
    lines = (line.split() for line in (read(subject.root, "/proc/meminfo") or "").splitlines())
    memory = {words[0].rstrip(":"): number(words[1], 0) << 10 for words in lines if len(words) > 1}  # KiB to bytes
    memory_limit = group_limit(subject.root, "memory")
    pids_limit = group_limit(subject.root, "pids")
    return Groups(
        memory=memory.get("MemTotal", 0),
        available=memory.get("MemAvailable", 0),
        memory_limit=memory_limit.limit if memory_limit else None,
        memory_used=memory_limit.used if memory_limit else 0,
        machine_cpus=os.cpu_count() or 1,
        cpus=len(os.sched_getaffinity(0)),
        cpu_quota=cpu_quota(subject.root),
        pids_limit=pids_limit.limit if pids_limit else None,
        pids_used=pids_limit.used if pids_limit else 0,
    )


def judge_groups(groups: Groups) -> Verdict:
    """Judge the memory, the CPUs and the number of processes that a job may use."""
    facts = f"{size(groups.available)} of {size(groups.memory)} memory available"
    if groups.memory_limit is not None:
        facts += f", limited to {size(groups.memory_limit)}"
    facts += f"; {groups.cpus} of {count(groups.machine_cpus, 'CPU')}"
    if groups.cpu_quota is not None:
        facts += f", limited to {groups.cpu_quota:g}"
    if groups.pids_limit is not None:
        facts += f"; {groups.pids_used} of {groups.pids_limit} processes"
    return Verdict(facts, (*_memory_findings(groups), *_cpu_findings(groups), *_process_findings(groups)))


def _memory_findings(groups: Groups) -> Iterator[Finding]:
    """Yield that little memory is left: by the machine, or by the control group if that leaves less."""
    room = groups.available
    evidence = "MemAvailable of /proc/meminfo"
    if groups.memory_limit is not None and groups.memory_limit - groups.memory_used < room:
        room = groups.memory_limit - groups.memory_used
        evidence = f"the control group uses {size(groups.memory_used)} of the {size(groups.memory_limit)} that it may"
    if room < _LITTLE_MEMORY:
        yield slow(
            f"only {size(max(room, 0))} of memory are left for a job",
            f"{evidence}\nbeyond it the kernel kills workers",
            "ask for more memory (`sbatch --mem`, `docker run --memory`), or end others: `ps aux --sort -rss | head`",
        )


def _cpu_findings(groups: Groups) -> Iterator[Finding]:
    """Yield that a job gets less than one CPU's time, or one CPU of several."""
    if groups.cpu_quota is not None and groups.cpu_quota < 1:
        yield slow(
            f"this process may use {groups.cpu_quota:g} of a CPU only",
            f"cpu.max of its control group\nthe machine has {count(groups.machine_cpus, 'CPU')}",
            "ask for more CPUs: `docker run --cpus 8`, `resources.limits.cpu` of a pod, `srun --cpus-per-task 8`",
        )
    elif groups.cpus == 1 and groups.machine_cpus > 1:
        yield slow(
            f"this process may run on 1 of {groups.machine_cpus} CPUs only",
            "its affinity, as `taskset -p $$` shows it\nworkers and data loaders share that CPU",
            "ask for more CPUs, as by `srun --cpus-per-task 8`, or in your own shell `taskset -pc 0-"
            f"{groups.machine_cpus - 1} $$`",
        )


def _process_findings(groups: Groups) -> Iterator[Finding]:
    """Yield that the control group leaves room for few more processes."""
    if groups.pids_limit is None:
        return
    room = groups.pids_limit - groups.pids_used
    if groups.pids_used > _CROWDED_SHARE * groups.pids_limit or room < _FEW_LEFT:
        yield Finding(
            severity="broken" if room < 2 else "slow",
            title=f"the control group has room for {max(room, 0)} processes and threads only",
            evidence=f"pids.current {groups.pids_used}, pids.max {groups.pids_limit}",
            hint="`docker run --pids-limit 65536`, podPidsLimit of the kubelet, or TasksMax of the slice in systemd",
        )


CHECKS = (
    Check(id="limits", examine=lambda subject: judge_ulimits(read_ulimits(subject))),
    Check(id="cgroup", examine=lambda subject: judge_groups(read_groups(subject))),
)
