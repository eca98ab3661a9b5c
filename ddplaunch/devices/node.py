"""Inspects this node as far as a job needs to know: once, before anything is decided. Starts nothing."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from ddplaunch.devices import Core, Device, Hardware
from ddplaunch.devices.choose import choose
from ddplaunch.devices.probe import probe
from ddplaunch.spec import JobSpec, Program, ProgramKind

if TYPE_CHECKING:
    from ddplaunch.devices.torch_build import TorchBuild

_LONGEST_SCRIPT = 1 << 18  # bytes; to parse more takes a notable time


def inspect(spec: JobSpec, env: Mapping[str, str], *, divided_by: int = 1) -> Node:
    """Inspect this node; `divided_by` is how many simulated nodes share it.

    Raises:
        LaunchError: a device that was asked for is not there.
    """
    hardware = probe({**env, **dict(spec.env)})  # the workers' variables determine what they will see
    if divided_by > 1:
        hardware = replace(hardware, cpu_quota=hardware.usable_cpus / divided_by)
    devices = choose(hardware, spec.devices, spec.asked("devices", ",".join(spec.devices or ())))
    return Node(
        host=os.uname().nodename,
        hardware=hardware,
        devices=devices,
        cores=_cores(spec, hardware),
        build=torch_build(spec) if devices else None,
        python=sys.executable,
        mps_control=_mps_control(env) if spec.mps else None,
        bootstrap=os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "worker", "bootstrap.py"),
        script=_text(spec.program) if spec.start_method == "auto" else b"",
        env=env,
    )


def _cores(spec: JobSpec, hardware: Hardware) -> tuple[Core, ...]:
    if spec.cpu_bind == "none" and spec.numa_binding is None:
        return ()
    from ddplaunch.devices import cpus  # most jobs bind nothing

    return cpus.cores("/", hardware.cpus)


def torch_build(spec: JobSpec) -> TorchBuild | None:
    """The torch that the workers would import, as its files describe it."""
    from ddplaunch.devices import torch_build as torchbuild  # only devices, and several nodes, need it

    return torchbuild.find(spec.program.python or sys.executable)


def _mps_control(env: Mapping[str, str]) -> str | None:
    import shutil  # 5 ms, and few jobs need it

    return shutil.which("nvidia-cuda-mps-control", path=env.get("PATH"))


def _text(program: Program) -> bytes:
    try:
        if program.kind is not ProgramKind.SCRIPT or not stat.S_ISREG(os.stat(program.target).st_mode):
            return b""
        with open(program.target, "rb") as file:
            text = file.read(_LONGEST_SCRIPT + 1)
    except (OSError, ValueError):
        return b""
    return text if len(text) <= _LONGEST_SCRIPT else b""


class Node(Struct, frozen=True, kw_only=True):
    """What this node is and has, as far as the job needs to know."""

    host: str
    hardware: Hardware
    devices: tuple[Device, ...]  # of `hardware`, those that the job may use, in order
    shared: bool = False  # by other, simulated nodes
    cores: tuple[Core, ...] = ()  # read only if workers are to be bound
    build: TorchBuild | None = None  # of the workers' torch; None: not found, or there are no devices
    python: str  # the interpreter of this command
    bootstrap: str  # path of worker/bootstrap.py
    mps_control: str | None = None  # path of nvidia-cuda-mps-control; looked for only if it was asked for
    script: bytes = b""  # the text of the program, if that decides how workers are started
    env: Mapping[str, str]  # of the caller
    has_terminal: bool = True  # the command has one, which a worker can be given
