"""Variables that make a job slow, or another job: left by another launcher, or set to look for a mistake."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping

from msgspec import Struct

from ddplaunch.plan.devices.choose import HIDES_ALL
from ddplaunch.spec.options.sources import without_service_links
from ddplaunch.system.redaction import Redactor, literals
from ddplaunch.system.words import some
from ddplaunch.tools.doctor import Check, Finding, Severity, Subject, Verdict, note, slow

# what a launcher sets for each worker: in the shell of a person it is left from another job, or was exported by hand
_OF_TORCHRUN = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "NNODES",
    "TORCHELASTIC_RUN_ID",
)  # fmt: skip
_OF_MPI = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK", "PMI_RANK", "PMI_SIZE", "PMIX_RANK")
_DEFAULTS_OF_TORCHRUN = "PET_"
_LONGEST = 60  # characters of a value that are shown


class Setting(Struct, frozen=True):
    """A variable that matters, and what it does."""

    values: str  # those with which it matters: a pattern, in which capital letters stand for small ones too
    severity: Severity
    does: str
    of_gpus: bool = True  # it does nothing on a machine without accelerators


_ON = r"(?!(0|FALSE|NO|OFF|)$).*"  # any value but these
_SERIAL = Setting(_ON, "slow", "each kernel waits for the last")
_SETTINGS = {
    "CUDA_LAUNCH_BLOCKING": _SERIAL,
    "HIP_LAUNCH_BLOCKING": _SERIAL,
    "AMD_SERIALIZE_KERNEL": _SERIAL,
    "PYTORCH_NO_CUDA_MEMORY_CACHING": Setting(_ON, "slow", "torch asks the driver for memory for each tensor"),
    "NCCL_DEBUG": Setting("TRACE", "slow", "NCCL writes a line for each call"),
    "NCCL_P2P_DISABLE": Setting(_ON, "slow", "GPUs of one node copy through main memory, not over NVLink or PCI"),
    "NCCL_SHM_DISABLE": Setting(_ON, "slow", "GPUs of one node without peer-to-peer talk over the network"),
    "NCCL_IB_DISABLE": Setting(_ON, "note", "NCCL uses TCP between nodes, not InfiniBand"),
    "NCCL_NVLS_ENABLE": Setting("0", "note", "NCCL does not reduce in the NVSwitch"),
    "NCCL_ALGO": Setting(_ON, "note", "NCCL does not choose its algorithm by itself"),
    "NCCL_PROTO": Setting(_ON, "note", "NCCL does not choose its protocol by itself"),
    "CUDA_DEVICE_ORDER": Setting("FASTEST_FIRST", "note", "CUDA may number GPUs in another order than nvidia-smi"),
    "TORCH_DISTRIBUTED_DEBUG": Setting(
        "DETAIL", "slow", "torch compares each collective among all ranks before it runs", of_gpus=False
    ),
    "PYTHONDEVMODE": Setting(_ON, "slow", "Python checks memory and warns", of_gpus=False),
    "PYTHONMALLOC": Setting("(PYMALLOC_|MALLOC_)?DEBUG", "slow", "Python checks each allocation", of_gpus=False),
    "LD_PRELOAD": Setting(".*LIB[ALTU]SAN.*", "slow", "a sanitizer checks each access to memory", of_gpus=False),
}


class Surroundings(Struct, frozen=True, kw_only=True):
    """The variables, and what decides whether they matter."""

    env: Mapping[str, str]
    has_accelerators: bool = False
    cpus: int = 1  # that this process may use
    has_launcher: bool = False  # a launcher of MPI has started this process, so that its variables are right


def read(subject: Subject) -> Surroundings:
    """Take the variables, and see whether a driver of an accelerator is there."""
    import os
    from pathlib import Path

    from ddplaunch.plan.cluster.mpi import may_be_below_launcher
    from ddplaunch.plan.devices.node import AMD, has_nvidia
    from ddplaunch.plan.devices.sysfs import exists

    return Surroundings(
        env=subject.env,
        has_accelerators=has_nvidia(subject.env, subject.root) or exists(subject.root, AMD),
        cpus=len(os.sched_getaffinity(0)),
        has_launcher=may_be_below_launcher(lambda path: Path(path).read_text(errors="replace")),
    )


def judge(surroundings: Surroundings) -> Verdict:
    """Judge the variables. Values are shown of variables that this module names, since others may be secrets."""
    findings = [
        *_launcher_findings(surroundings),
        *_setting_findings(surroundings),
        *_thread_findings(surroundings),
        *_hidden_device_findings(surroundings),
    ]
    own = without_service_links(surroundings.env)  # Kubernetes sets variables for each Service, such as NCCL_PORT
    named = sorted(name for name in own if name.startswith(("NCCL_", "GLOO_", "CUDA_VISIBLE", "OMP_", "DDPLAUNCH_")))
    return Verdict(f"set: {some(named, 20)}" if named else "none that matters is set", tuple(findings))


def _launcher_findings(surroundings: Surroundings) -> Iterator[Finding]:
    """Yield which variables of another launcher this shell has though no launcher started it."""
    env = surroundings.env
    is_worker, is_pod = "DDPLAUNCH_RUN_ID" in env, "KUBERNETES_SERVICE_HOST" in env
    if is_worker or is_pod:  # there they are right
        return
    env = without_service_links(env)
    # a task of a Slurm step, or of mpirun, has MPI's variables by right
    is_task = surroundings.has_launcher or "SLURM_STEP_ID" in env or "PRTE_LAUNCHED" in env
    found = {name: env[name] for name in (*_OF_TORCHRUN, *(() if is_task else _OF_MPI)) if name in env}
    if found:
        yield note(
            "this shell has variables of a worker or of another job",
            f"{_shown(found)}\nddplaunch and libraries may take this for a part of that job",
            f"if no launcher has started this shell: `unset {' '.join(found)}`",
        )
    defaults = {name: env[name] for name in sorted(env) if name.startswith(_DEFAULTS_OF_TORCHRUN)}
    if defaults:
        yield note(
            "variables of torchrun set options of each job",
            _shown(defaults),
            f"if that is not meant: `unset {' '.join(defaults)}`",
        )


def _shown(variables: Mapping[str, str]) -> str:
    shown = Redactor(literals(variables)).variables(variables)
    return ", ".join(f"{name}={value[:_LONGEST]}" for name, value in shown.items())


def _setting_findings(surroundings: Surroundings) -> Iterator[Finding]:
    """Yield which variables are set that make a job slow."""
    for name, setting in _SETTINGS.items():
        value = surroundings.env.get(name, "")
        matters = re.fullmatch(setting.values, value.strip(), re.IGNORECASE | re.DOTALL)
        if matters and (surroundings.has_accelerators or not setting.of_gpus):
            yield Finding(
                severity=setting.severity, title=f"{name}={value[:_LONGEST]}: {setting.does}", hint=f"`unset {name}`"
            )


def _thread_findings(surroundings: Surroundings) -> Iterator[Finding]:
    """Yield that OMP_NUM_THREADS, with a number for each level as "8,2", starts too many threads on the first one."""
    value = surroundings.env.get("OMP_NUM_THREADS", "")
    first = value.partition(",")[0]
    is_number = first.isdecimal() and len(first) < 6  # longer ones no library accepts
    if is_number and int(first) > 2 * surroundings.cpus:
        yield slow(
            f"OMP_NUM_THREADS={value[:_LONGEST]} starts more threads in each worker than there are CPUs",
            f"this process may use {surroundings.cpus}",
            "`unset OMP_NUM_THREADS`: ddplaunch divides the CPUs among the workers",
        )


def _hidden_device_findings(surroundings: Surroundings) -> Iterator[Finding]:
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        value = surroundings.env.get(name)
        if surroundings.has_accelerators and value is not None and value.strip() in HIDES_ALL:
            yield note(
                f"{name}={shlex.quote(value)} hides all GPUs, so that workers use the CPU", hint=f"`unset {name}`"
            )


CHECKS = (Check(id="variables", examine=lambda subject: judge(read(subject))),)
