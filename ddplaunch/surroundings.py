"""What this node is and has, as far as a job needs to know: looked at once, before anything is decided."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

from ddplaunch import torchbuild
from ddplaunch.devices import cpus
from ddplaunch.devices.choose import choose
from ddplaunch.devices.probe import probe
from ddplaunch.plan.make import Node
from ddplaunch.record import replace
from ddplaunch.spec import JobSpec


def look_around(spec: JobSpec, env: Mapping[str, str], *, divided_by: int = 1) -> Node:
    """Look at this node; `divided_by` is how many simulated nodes share it.

    Raises:
        LaunchError: a device that was asked for is not there.
    """
    hardware = probe({**env, **dict(spec.env)})  # the workers' variables say what they will see
    if divided_by > 1:
        hardware = replace(hardware, cpu_quota=hardware.usable_cpus / divided_by)
    devices = choose(hardware, spec.devices, asked=spec.asked("devices", ",".join(spec.devices or ())))
    bound = spec.cpu_bind != "none" or spec.numa_binding is not None
    return Node(
        host=socket.gethostname(),
        hardware=hardware,
        devices=devices,
        cores=cpus.cores("/", hardware.cpus) if bound else (),
        # only a choice between backends asks what torch was built with
        build=torch_build(spec) if devices and spec.backend == "auto" else None,
        python=our_python(),
        mps_control=_mps_control(env) if spec.mps else None,
        bootstrap=os.path.join(os.path.dirname(os.path.abspath(__file__)), "worker", "bootstrap.py"),
        env=env,
    )


def torch_build(spec: JobSpec) -> torchbuild.TorchBuild | None:
    """The torch that the workers would import, as far as its files tell."""
    return torchbuild.find(spec.program.python or our_python(), our_python())


def _mps_control(env: Mapping[str, str]) -> str | None:
    import shutil  # 5 ms, and few jobs ask

    return shutil.which("nvidia-cuda-mps-control", path=env.get("PATH"))


def our_python() -> str:
    """The interpreter that runs this."""
    import sys

    return sys.executable
