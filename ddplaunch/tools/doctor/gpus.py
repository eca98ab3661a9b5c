"""The GPUs that a job would get here: driver and torch, errors, brakes, links, and the processes that use them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from msgspec import Struct

from ddplaunch.plan.devices import Hardware
from ddplaunch.plan.devices.gpu_health import Health, Machine, Pair
from ddplaunch.plan.devices.gpu_health import read as read_nvml
from ddplaunch.plan.devices.interpreter import TorchBuild, find_torch
from ddplaunch.plan.devices.node import has_nvidia, probe
from ddplaunch.plan.devices.nvidia import NvmlError, NvmlMissingError
from ddplaunch.plan.devices.sysfs import read_cpulist
from ddplaunch.system.errors import LaunchError
from ddplaunch.system.process.tree import content, look
from ddplaunch.system.redaction import Redactor
from ddplaunch.system.words import compress, count, duration, size, some
from ddplaunch.tools.doctor import Check, Finding, Severity, Subject, Verdict, broken, note, slow

_SHARE_TAKEN_BY_OTHERS = 0.1  # of the memory of a GPU: torch takes what is left, and the largest batch no longer fits
_MOST_SHOWN = 8  # processes that are shown
_LONGEST = 80  # characters of a command that are shown


class UsingProcess(Struct, frozen=True, kw_only=True):
    """A process that uses a GPU, and whose it is."""

    is_ours: bool  # of this user
    uid: int
    command: str
    seconds: float  # for which it runs
    is_orphan: bool  # only init is its parent: nobody waits for it


class Refusal(Struct, frozen=True):
    """Why a job would not start here, in the words of the job: as a GPU that was named is lost."""

    error: str
    hint: str


class Gpus(Struct, frozen=True, kw_only=True):
    """What drivers, torch and /proc say of the accelerators."""

    hardware: Hardware  # what a job would use
    machine: Machine | None = None  # what NVML says of all GPUs
    problem: str = ""  # why NVML does not answer, though a driver is there
    job_refusal: Refusal | None = None  # a job would be refused here; None: it would start
    build: TorchBuild | None = None  # the torch of the workers
    processes: Mapping[int, UsingProcess] = {}  # that use a GPU, by pid, as far as /proc shows them
    far_from_cpus: tuple[int, ...] = ()  # indices of GPUs near none of the CPUs that this process may use


def read(subject: Subject) -> Gpus:
    """Ask the drivers, in the child that makes this check: a driver may hang it for ever."""
    try:
        # first: it asks NVML in a child, which the driver refuses where its parent has it open
        hardware = probe(subject.env, root=subject.root)
    except LaunchError as error:
        return Gpus(hardware=Hardware(), job_refusal=Refusal(error.message, error.hint or ""))
    machine, problem = None, ""
    if has_nvidia(subject.env, subject.root):
        try:
            machine = read_nvml()
        except NvmlMissingError:
            pass
        except NvmlError as error:
            problem = str(error)
    gpus = machine.gpus if machine is not None else ()
    near_cpus = {gpu.index: read_cpulist(subject.root, f"/sys/bus/pci/devices/{gpu.pci}/local_cpulist") for gpu in gpus}
    return Gpus(
        hardware=hardware,
        machine=machine,
        problem=problem,
        build=find_torch(subject.python),
        processes={
            holder.pid: process
            for gpu in gpus
            for holder in gpu.holders
            if (process := _using_process(holder.pid)) is not None
        },
        far_from_cpus=tuple(index for index, cpus in near_cpus.items() if cpus and not set(cpus) & set(hardware.cpus)),
    )


def _using_process(pid: int) -> UsingProcess | None:
    """Return the owner, command and age of a process that uses a GPU; None if the process has ended."""
    process = look(pid)
    if process is None:
        return None
    try:
        uid = os.stat(f"/proc/{pid}").st_uid
        words = content(f"/proc/{pid}/cmdline").decode(errors="replace").rstrip("\0").split("\0")
    except OSError:
        return None
    # `started` are ticks since the boot
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - process.started / os.sysconf("SC_CLK_TCK")
    return UsingProcess(
        is_ours=uid == os.geteuid(),
        uid=uid,
        command=(" ".join(Redactor().argv(words)) or process.name)[:_LONGEST],
        seconds=age,
        is_orphan=process.parent == 1,
    )


def judge(gpus: Gpus) -> Verdict:
    """Judge the accelerators that a job would use; a GPU that the job would not get is no finding."""
    if gpus.job_refusal is not None:
        return Verdict(gpus.job_refusal.error, (broken(gpus.job_refusal.error, hint=gpus.job_refusal.hint),))
    if gpus.problem:
        finding = broken(
            f"the NVIDIA driver does not work: {gpus.problem}",
            "NVML, on which nvidia-smi and ddplaunch rely\nCUDA most likely fails as well",
            _driver_hint(gpus.problem),
        )
        return Verdict(gpus.problem, (finding,))
    devices, machine = gpus.hardware.devices, gpus.machine
    if machine is None:  # there is no NVIDIA driver; of other devices no more is known than their names
        named = some(sorted({device.name or device.kind for device in devices}))
        why_none = gpus.hardware.device_source
        facts = f"{count(len(devices), 'device')}: {named}" if devices else why_none
        return Verdict(facts, (*_job_findings(gpus), *_no_device_findings(gpus.hardware)))
    shown = [gpu for gpu in machine.gpus if _is_visible(gpu, gpus.hardware)]
    indices = {gpu.index for gpu in shown}
    pairs = [pair for pair in machine.pairs if indices.issuperset((pair.first, pair.second))]
    health_findings = (finding for gpu in shown for finding in _health_findings(gpu))
    findings = (
        *_job_findings(gpus),
        *health_findings,
        *_use_findings(shown, gpus.processes),
        *_pair_findings(pairs),
        *_distance_findings(shown, gpus),
    )
    names = some(sorted({gpu.name for gpu in shown if gpu.name}))
    major, minor = machine.cuda
    driver = f"driver {machine.driver or 'not known'}, CUDA {major}.{minor}"
    return Verdict(f"{count(len(shown), 'GPU')}: {names}, {driver}", findings)


def _job_findings(gpus: Gpus) -> Iterator[Finding]:
    """Judge torch, and the variable that chooses among the GPUs."""
    yield from _torch_findings(gpus)
    # a note about one GPU says why a job leaves it out, which `_health_findings` says with a remedy
    yield from (note(text) for text in gpus.hardware.notes if not text.startswith("GPU "))


def _no_device_findings(hardware: Hardware) -> Iterator[Finding]:
    """Yield that a variable grants devices of which this machine has none."""
    if hardware.granted and not hardware.devices:
        variable = hardware.granted.partition("=")[0]
        yield broken(hardware.device_source, hint=f"`unset {variable}`, or `ddplaunch --devices cpu train.py`")


def _distance_findings(shown: Sequence[Health], gpus: Gpus) -> Iterator[Finding]:
    """Yield which GPUs are on another socket than all CPUs that this process may use."""
    if far := [gpu.index for gpu in shown if gpu.index in gpus.far_from_cpus]:
        yield slow(
            f"this process may not use the CPUs near {_gpus(far)}",
            f"this process may use CPUs {compress(gpus.hardware.cpus)}\ncopies to these GPUs cross sockets",
            "ask for CPUs near the GPUs, in Slurm by `--gres-flags=enforce-binding`, or for whole nodes",
        )


def _is_visible(gpu: Health, hardware: Hardware) -> bool:
    """Whether a job would use this GPU, or would miss it: one that is lost counts, unless others were named."""
    uuids = {device.uuid for device in hardware.devices}
    pcis = {device.pci for device in hardware.devices}
    if gpu.lost:
        return not hardware.granted
    may_be_any = None in uuids  # a device of which only an index is known
    return gpu.uuid in uuids or (gpu.pci is not None and gpu.pci in pcis) or may_be_any


def _driver_hint(problem: str) -> str:
    if "mismatch" in problem:
        return "the driver was updated under a running kernel module: reboot, or unload the module and load the new one"
    return "`nvidia-smi` shows the same\n`dmesg | grep -i -e nvrm -e xid` the reason, and a reboot often helps"


def _torch_findings(gpus: Gpus) -> Iterator[Finding]:
    """Compare the build of torch with the driver: a driver runs the CUDA of its own major version and of older ones."""
    build, devices = gpus.build, gpus.hardware.devices
    if build is None or not devices:
        return
    was_granted_devices = bool(gpus.hardware.granted)  # by a variable, as of Slurm: the job counts on them
    severity: Severity = "broken" if was_granted_devices else "slow"
    if not (build.cuda or build.hip or build.xpu):
        yield Finding(
            severity=severity,
            title=f"torch {build.version} is a build for CPUs, though this machine has {count(len(devices), 'accelerator')}",
            evidence="its version.py names neither CUDA nor ROCm nor oneAPI",
            hint="install a build for these devices: pytorch.org/get-started/locally has the line to type",
        )
    elif gpus.machine is not None and build.cuda is not None:
        wanted = tuple(int(part) for part in build.cuda.split(".")[:2] if part.isdecimal())
        newest = gpus.machine.cuda[0]  # the major version that the driver runs; 0: not known
        if wanted and newest and wanted[0] > newest:
            has = ".".join(map(str, gpus.machine.cuda))
            yield broken(
                f"torch {build.version} needs a driver for CUDA {build.cuda}, and this driver runs CUDA {has} at most",
                f"driver {gpus.machine.driver}",
                f"install a newer driver, or a torch for CUDA {newest} (pytorch.org/get-started/locally)",
            )
        if not build.nccl and len(devices) > 1:
            yield slow(
                f"torch {build.version} has no NCCL, so that GPUs talk through gloo and main memory",
                hint="`pip install --force-reinstall torch` installs a build with NCCL",
            )


def _health_findings(gpu: Health) -> Iterator[Finding]:
    """Judge one GPU by itself."""
    name = f"GPU {gpu.index}"
    reset = f"`nvidia-smi --gpu-reset -i {gpu.index}` as root while nothing uses it, or reboot"
    if gpu.lost:
        yield broken(f"{name} has fallen off the bus", "NVML: GPU is lost", reset)
        return
    if gpu.prohibited:
        hint = f"`nvidia-smi -i {gpu.index} -c DEFAULT` as root"
        yield broken(f"{name} takes no process: its compute mode is prohibited", hint=hint)
    elif gpu.exclusive and gpu.holders:
        yield broken(
            f"{name} takes one process only, and has one",
            f"its compute mode is exclusive\n{some(f'pid {one.pid}' for one in gpu.holders)} uses it",
            f"`nvidia-smi -i {gpu.index} -c DEFAULT` as root, or wait for that process",
        )
    if gpu.fabric_starts:
        yield broken(
            f"{name} waits for the fabric manager of its NVSwitch, and CUDA fails until then",
            "NVML: the state of the fabric is not completed",
            "`systemctl status nvidia-fabricmanager`\n`systemctl restart nvidia-fabricmanager` as root",
        )
    if gpu.remap_failed:
        yield broken(
            f"{name} has defective memory that it cannot replace any more",
            "NVML: the remapping of a row has failed",
            "leave it out (`ddplaunch --devices LIST`) and have it exchanged",
        )
    elif gpu.remap_pending:
        yield note(f"{name} will replace defective memory at its next reset", hint=reset)
    if gpu.uncorrected:
        yield slow(
            f"{name} has had {count(gpu.uncorrected, 'memory error')} that could not be corrected",
            "NVML: volatile ECC counts since the driver was loaded\neach ends the process that it meets",
            f"{reset}\nif they come back, have it exchanged",
        )
    if gpu.brakes:
        yield slow(
            f"{name} runs at lower clocks because of {some(gpu.brakes)}",
            hint=f"`nvidia-smi -q -d PERFORMANCE,TEMPERATURE -i {gpu.index}` shows more\nlook at fans, air and power",
        )
    used, lanes = gpu.pci_width or (0, 0)  # 0: not known
    if used < lanes:
        yield slow(
            f"{name} uses {used} of its {lanes} PCI lanes",
            f"PCI address {gpu.pci or 'not known'}\ncopies from and to the CPU take longer",
            "some boards and clouds have no more\nelse reseat the card",
        )
    up, links = gpu.links or (0, 0)
    if 0 < up < links:  # none is up where there is no bridge
        yield slow(
            f"{up} of the {links} NVLinks of {name} are up",
            hint=f"`nvidia-smi nvlink -s -i {gpu.index}` shows which; {reset}",
        )
    if gpu.persistence is False:
        yield note(
            f"{name} is not in persistence mode, so each start waits for the driver to wake it",
            hint="`nvidia-smi -pm 1` as root, or run nvidia-persistenced",
        )


class _Held(NamedTuple):
    """What a process has of one GPU."""

    gpu: int  # its index
    memory: int  # bytes


def _use_findings(gpus: Sequence[Health], processes: Mapping[int, UsingProcess]) -> Iterator[Finding]:
    """Yield which processes use these GPUs, and how to end one of this user's that nobody waits for any more."""
    # the driver counts memory that belongs to no process, and may not say what a process of a container has
    held = {gpu.index: max(gpu.used, sum(holder.memory or 0 for holder in gpu.holders)) for gpu in gpus if gpu.holders}
    if not held:
        return
    by_pid: dict[int, list[_Held]] = {}
    for gpu in gpus:
        for holder in gpu.holders:
            by_pid.setdefault(holder.pid, []).append(_Held(gpu.index, holder.memory or 0))
    ours = {pid for pid in by_pid if pid in processes and processes[pid].is_ours}
    forgotten = sorted(pid for pid in ours if processes[pid].is_orphan)
    if forgotten:
        them = "it" if len(forgotten) == 1 else "them"
        hint = f"if no job of yours needs {them} any more: `kill {' '.join(map(str, forgotten))}`"
    elif ours:
        hint = "`ddplaunch ps` shows your jobs, and `ddplaunch stop` ends one"
    else:
        hint = "`ddplaunch --devices LIST train.py` chooses other GPUs"
    is_crowded = any(held[gpu.index] > _SHARE_TAKEN_BY_OTHERS * gpu.memory for gpu in gpus if gpu.index in held)
    pids = some(f"pid {pid}" for pid in sorted(by_pid))
    lines = [_line(pid, on, processes.get(pid)) for pid, on in sorted(by_pid.items())]
    more = [f"and {len(lines) - _MOST_SHOWN} more"] if len(lines) > _MOST_SHOWN else []
    yield Finding(
        severity="slow" if is_crowded else "note",
        title=f"{_gpus(sorted(held))} {'is' if len(held) == 1 else 'are'} in use by {pids}",
        evidence="\n".join([*lines[:_MOST_SHOWN], *more]),
        hint=hint,
    )


def _line(pid: int, on: Sequence[_Held], process: UsingProcess | None) -> str:
    """Say what a process holds on which GPUs, and whose it is; None: /proc does not show it."""
    held = f"pid {pid} has {size(sum(one.memory for one in on))} of {_gpus([one.gpu for one in on])}"
    if process is None:
        return f"{held}: of another container, or hidden from you"
    whose = "yours" if process.is_ours else f"of user {process.uid}"
    orphan = ", and no shell or launcher waits for it" if process.is_orphan else ""
    return f"{held}: {whose}, for {duration(process.seconds)}{orphan}: {process.command}"


def _pair_findings(pairs: list[Pair]) -> Iterator[Finding]:
    """Yield that GPUs of a pair cannot copy to each other directly."""
    apart = [pair for pair in pairs if pair.peer_to_peer is False]
    if apart:
        yield note(
            f"in {len(apart)} of {count(len(pairs), 'pair')} of GPUs neither reads the other's memory",
            f"{some(f'{pair.first}-{pair.second}' for pair in apart)}: NCCL copies through /dev/shm",
            "`nvidia-smi topo -p2p r` shows why\na virtual machine or the IOMMU (ACS) often forbids it",
        )


def _gpus(indices: list[int]) -> str:
    return f"GPU{'s' if len(indices) > 1 else ''} {compress(indices)}"


# without persistence mode the driver takes a second for each GPU
CHECKS = (Check(id="gpus", examine=lambda subject: judge(read(subject)), within=9.0, if_late="broken"),)
