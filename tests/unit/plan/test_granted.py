"""Accelerators that the job was granted, and that its workers cannot use."""

from typing import Any

import pytest
from msgspec.structs import replace

from ddplaunch.plan import Plan
from ddplaunch.plan.cluster import Allocation
from ddplaunch.plan.devices import Device
from ddplaunch.plan.make import make_plan
from ddplaunch.spec.job import JobSpec, Program, ProgramKind
from ddplaunch.system.errors import LaunchError
from tests.unit.plan.test_make import CPU, CUDA, HERE, node, spec

GRANTED = "CUDA_VISIBLE_DEVICES=0,1"
NO_DRIVER = f"no GPU driver found, although {GRANTED}"
NO_TORCH = f"torch 2.13.0+cpu is a CPU build, although {GRANTED}"


def plan(gpus: int, asked: JobSpec, where: Allocation = HERE, granted: str = GRANTED, **hardware: Any) -> Plan:
    """The plan of a node that was granted accelerators: without any, there is no driver; the torch is a CPU build."""
    here = node(gpus, build=hardware.pop("build", CPU if gpus else None))
    if not gpus:
        hardware = {
            "device_source": f"no GPU driver found, although {granted}" if granted else "none found",
            **hardware,
        }
    return make_plan(
        asked, where, replace(here, hardware=replace(here.hardware, granted=granted, **hardware)), run_id="1"
    )


def refused(gpus: int, asked: JobSpec, **more: Any) -> tuple[str, str | None]:
    with pytest.raises(LaunchError) as raised:
        plan(gpus, asked, **more)
    assert raised.value.status == 2
    return raised.value.message, raised.value.hint


ON_CPUS = "to train on the CPUs all the same: --devices cpu"
INSTALL = f"install a torch that is built for these devices; {ON_CPUS}"


@pytest.mark.parametrize("asked", [spec(), spec(nproc_per_node="auto"), spec(cpu_bind="cores")])
@pytest.mark.parametrize(("gpus", "message", "hint"), [(0, NO_DRIVER, ON_CPUS), (2, NO_TORCH, INSTALL)])
def test_a_job_that_would_train_on_the_cpus_unnoticed_is_refused(asked, gpus, message, hint):
    assert refused(gpus, asked) == (message, hint)


def test_the_tasks_of_a_cluster_do_not_ask_for_the_cpus() -> None:
    assert refused(0, spec(), where=replace(HERE, tasks_per_node=4))[0] == NO_DRIVER


def test_a_variable_that_names_no_device_is_the_reason() -> None:
    note = "CUDA_VISIBLE_DEVICES=7: there is no device 7 here, so it and what follows it is ignored"
    found = refused(0, spec(), granted="CUDA_VISIBLE_DEVICES=7", device_source="CUDA_VISIBLE_DEVICES=7", notes=(note,))
    assert found == (note, ON_CPUS)


def test_a_driver_that_does_not_work_is_the_reason() -> None:
    found = refused(0, spec(), device_source="NVML: Driver/library version mismatch")
    assert found[0] == f"NVML: Driver/library version mismatch, although {GRANTED}"


@pytest.mark.parametrize(
    ("gpus", "asked", "reason"),
    [
        (0, spec(nproc_per_node=2), f"no accelerator; warning: {NO_DRIVER}"),
        (0, spec(nproc_per_node="cpu"), f"no accelerator; warning: {NO_DRIVER}"),
        (0, spec(backend="gloo"), f"--backend; warning: {NO_DRIVER}"),
        (0, spec(devices=("cpu",)), f"no accelerator; warning: {NO_DRIVER}"),
        (2, spec(nproc_per_node=2), f"warning: {NO_TORCH}"),
        (2, spec(backend="gloo"), f"--backend; warning: {NO_TORCH}"),
    ],
)
def test_a_job_that_asks_for_the_cpus_is_warned_beside_its_backend(gpus: int, asked: JobSpec, reason: str) -> None:
    assert plan(gpus, asked).reasons["backend"] == reason


def test_a_number_of_workers_from_a_list_of_hosts_is_asked_for_too() -> None:
    assert plan(0, spec(), where=replace(HERE, nproc_per_node=2)).world_size == 2


@pytest.mark.parametrize(
    ("gpus", "granted", "build"), [(0, "", None), (2, "", CPU), (2, GRANTED, CUDA), (2, GRANTED, None)]
)
def test_all_others_are_not_warned(gpus: int, granted: str, build: Any) -> None:
    assert "warning" not in plan(gpus, spec(), granted=granted, build=build).reasons["backend"]


def test_a_command_may_bring_another_torch() -> None:
    command = Program(kind=ProgramKind.COMMAND, target="apptainer", args=())
    assert plan(2, spec(program=command)).world_size == 2


# --- a backend that needs devices


@pytest.mark.parametrize(
    ("gpus", "asked", "more", "message"),
    [
        (0, spec(backend="nccl"), {"granted": ""}, "--backend nccl: this node has no accelerator"),
        (0, spec(backend="nccl"), {}, f"--backend nccl: {NO_DRIVER}"),
        (0, spec(backend="nccl", nproc_per_node=2), {"granted": ""}, "--backend nccl: this node has no accelerator"),
        (0, spec(backend="xccl"), {"granted": ""}, "--backend xccl: this node has no accelerator"),
        (2, spec(backend="nccl"), {}, "--backend nccl: torch 2.13.0+cpu is a CPU build"),
        (
            2,
            spec(backend="nccl"),
            {"build": replace(CUDA, nccl=False)},
            "--backend nccl: torch 2.13.0+cu130 was built without NCCL",
        ),
        (
            2,
            spec(backend="nccl", nproc_per_node="cpu"),
            {"build": CUDA},
            "--backend nccl: there is no accelerator for the workers",
        ),
    ],
)
def test_a_backend_that_needs_devices_is_refused_without(gpus, asked, more, message):
    assert refused(gpus, asked, **more) == (message, "--backend gloo")


def test_nccl_is_taken_where_every_worker_has_a_gpu() -> None:
    devices = tuple(Device(kind="cuda", index=n, visible_as=str(n)) for n in range(2))
    assert plan(2, spec(backend="nccl"), build=CUDA, devices=devices).backend == "nccl"
