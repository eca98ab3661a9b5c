"""Variables that make a job slow, or another job: left by another launcher, or set to look for a mistake."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping

from msgspec import Struct

from ddplaunch.devices.choose import HIDES_ALL
from ddplaunch.doctor import Check, Finding, Severity, Subject, Verdict
from ddplaunch.words import some

# what a launcher sets for each worker: in the shell of a person it is left from another job, or was exported by hand
_OF_TORCHRUN = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "NNODES",
    "TORCHELASTIC_RUN_ID",
)  # fmt: skip
_OF_MPI = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK", "PMI_RANK", "PMI_SIZE", "PMIX_RANK")
_DEFAULTS_OF_TORCHRUN = "PET_"
_LONGEST = 60  # characters of a value that are shown


class Setting(Struct, frozen=True, kw_only=True):
    """A variable that matters, and what it does."""

    applies: Callable[[str], bool]
    severity: Severity
    does: str
    of_gpus: bool = False  # it does nothing on a machine without accelerators


def _on(value: str) -> bool:
    return value.strip().lower() not in ("", "0", "false", "no", "off")


def _is(*values: str) -> Callable[[str], bool]:
    return lambda value: value.strip().upper() in values


_SETTINGS = {
    "CUDA_LAUNCH_BLOCKING": Setting(applies=_on, severity="slow", does="each kernel waits for the last", of_gpus=True),
    "HIP_LAUNCH_BLOCKING": Setting(applies=_on, severity="slow", does="each kernel waits for the last", of_gpus=True),
    "AMD_SERIALIZE_KERNEL": Setting(applies=_on, severity="slow", does="each kernel waits for the last", of_gpus=True),
    "TORCH_DISTRIBUTED_DEBUG": Setting(
        applies=_is("DETAIL"), severity="slow", does="torch compares each collective among all ranks before it runs"
    ),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": Setting(
        applies=_on, severity="slow", does="torch asks the driver for memory for each tensor", of_gpus=True
    ),
    "NCCL_DEBUG": Setting(applies=_is("TRACE"), severity="slow", does="NCCL writes a line for each call", of_gpus=True),
    "NCCL_P2P_DISABLE": Setting(
        applies=_on,
        severity="slow",
        does="GPUs of one node copy through main memory, not over NVLink or PCI",
        of_gpus=True,
    ),
    "NCCL_SHM_DISABLE": Setting(
        applies=_on, severity="slow", does="GPUs of one node without peer-to-peer talk over the network", of_gpus=True
    ),
    "NCCL_IB_DISABLE": Setting(
        applies=_on, severity="note", does="NCCL uses TCP between nodes, not InfiniBand", of_gpus=True
    ),
    "NCCL_NVLS_ENABLE": Setting(
        applies=_is("0"), severity="note", does="NCCL does not reduce in the NVSwitch", of_gpus=True
    ),
    "NCCL_ALGO": Setting(
        applies=_on, severity="note", does="NCCL does not choose its algorithm by itself", of_gpus=True
    ),
    "NCCL_PROTO": Setting(
        applies=_on, severity="note", does="NCCL does not choose its protocol by itself", of_gpus=True
    ),
    "CUDA_DEVICE_ORDER": Setting(
        applies=_is("FASTEST_FIRST"),
        severity="note",
        does="CUDA may number GPUs in another order than nvidia-smi",
        of_gpus=True,
    ),
    "PYTHONDEVMODE": Setting(applies=_on, severity="slow", does="Python checks memory and warns"),
    "PYTHONMALLOC": Setting(
        applies=_is("DEBUG", "MALLOC_DEBUG", "PYMALLOC_DEBUG"), severity="slow", does="Python checks each allocation"
    ),
    "PYTHONPROFILEIMPORTTIME": Setting(applies=_on, severity="slow", does="Python writes a line for each import"),
    "MALLOC_CHECK_": Setting(applies=_on, severity="slow", does="the C library checks each allocation"),
    "LD_PRELOAD": Setting(
        applies=lambda value: bool(re.search(r"lib[altu]san", value)),
        severity="slow",
        does="a sanitizer checks each access to memory",
    ),
    "TORCH_SHOW_CPP_STACKTRACES": Setting(
        applies=_on, severity="note", does="torch collects a stack of C++ for each exception, which takes seconds"
    ),
}


class Surroundings(Struct, frozen=True, kw_only=True):
    """The variables, and what decides whether they matter."""

    env: Mapping[str, str]
    has_accelerators: bool = False
    cpus: int = 1  # that this process may use


def read(subject: Subject) -> Surroundings:
    """Take the variables, and see whether a driver of an accelerator is there."""
    import os

    from ddplaunch.devices.node import AMD, has_nvidia
    from ddplaunch.devices.sysfs import exists

    return Surroundings(
        env=subject.env,
        has_accelerators=has_nvidia(subject.env, subject.root) or exists(subject.root, AMD),
        cpus=len(os.sched_getaffinity(0)),
    )


def judge(surroundings: Surroundings) -> Verdict:
    """Judge the variables. Only names that stand here are shown with their values."""
    findings = [
        *_of_launchers(surroundings.env),
        *_settings(surroundings),
        *_of_threads(surroundings),
        *_hidden(surroundings),
    ]
    named = sorted(
        {name for name in surroundings.env if name.startswith(("NCCL_", "GLOO_", "CUDA_VISIBLE", "OMP_", "DDPLAUNCH_"))}
    )
    return Verdict(f"set: {some(named, 20)}" if named else "none that matters is set", tuple(findings))


def _of_launchers(env: Mapping[str, str]) -> Iterator[Finding]:
    if "DDPLAUNCH_RUN_ID" in env or "KUBERNETES_SERVICE_HOST" in env:
        return  # a worker of ours, or a pod: there they are right
    # a step of Slurm sets those of MPI, and mpirun more than these
    is_started = "SLURM_STEP_ID" in env or "PRTE_LAUNCHED" in env
    found = {name: env[name] for name in (*_OF_TORCHRUN, *(() if is_started else _OF_MPI)) if name in env}
    if found:
        yield Finding(
            check="variables",
            severity="note",
            title="this shell has variables of a worker or of another job",
            evidence=f"{_shown(found)}\nddplaunch and libraries may take this for a part of that job",
            hint=f"if no launcher has started this shell: `unset {' '.join(found)}`",
        )
    defaults = {name: env[name] for name in sorted(env) if name.startswith(_DEFAULTS_OF_TORCHRUN)}
    if defaults:
        yield Finding(
            check="variables",
            severity="note",
            title="variables of torchrun set options of each job",
            evidence=_shown(defaults),
            hint=f"if that is not meant: `unset {' '.join(defaults)}`",
        )


def _shown(variables: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={value[:_LONGEST]}" for name, value in variables.items())


def _settings(surroundings: Surroundings) -> Iterator[Finding]:
    for name, setting in _SETTINGS.items():
        value = surroundings.env.get(name)
        if value is not None and setting.applies(value) and (surroundings.has_accelerators or not setting.of_gpus):
            yield Finding(
                check="variables",
                severity=setting.severity,
                title=f"{name}={value[:_LONGEST]}: {setting.does}",
                hint=f"`unset {name}`",
            )


def _of_threads(surroundings: Surroundings) -> Iterator[Finding]:
    value = surroundings.env.get("OMP_NUM_THREADS", "")
    first = value.partition(",")[0]
    if first.isdecimal() and len(first) < 6 and int(first) > 2 * surroundings.cpus:
        yield Finding(
            check="variables",
            severity="slow",
            title=f"OMP_NUM_THREADS={value[:_LONGEST]} starts more threads in each worker than there are CPUs",
            evidence=f"this process may use {surroundings.cpus}",
            hint="`unset OMP_NUM_THREADS`: ddplaunch divides the CPUs among the workers",
        )


def _hidden(surroundings: Surroundings) -> Iterator[Finding]:
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        value = surroundings.env.get(name)
        if surroundings.has_accelerators and value is not None and value.strip() in HIDES_ALL:
            yield Finding(
                check="variables",
                severity="note",
                title=f"{name}={shlex.quote(value)} hides all GPUs, so that workers use the CPU",
                hint=f"`unset {name}`",
            )


CHECKS = (Check(id="variables", examine=lambda subject: judge(read(subject))),)
