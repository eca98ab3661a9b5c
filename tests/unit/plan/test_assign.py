from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplaunch.plan.assign import Owned, divide_devices, simulated
from ddplaunch.plan.cluster.by_flags import of_one_node
from ddplaunch.plan.devices import Device, Hardware
from ddplaunch.plan.devices.node import Node
from ddplaunch.plan.ranks import count_workers
from ddplaunch.spec.job import JobSpec
from ddplaunch.system.errors import LaunchError
from tests.unit.builders import spec


def gpus(number: int) -> tuple[Device, ...]:
    return tuple(Device(kind="cuda", index=index, visible_as=str(index)) for index in range(number))


def hardware(number: int, cpus: int = 8, quota: float | None = None) -> Hardware:
    source = "NVML" if number else "none found"
    return Hardware(devices=gpus(number), device_source=source, cpus=tuple(range(cpus)), cpu_quota=quota)


def count(asked: JobSpec, devices: tuple[Device, ...], hardware: Hardware) -> tuple[int, str]:
    node = Node(host="here", hardware=hardware, devices=devices, python="", bootstrap="", env={})
    return count_workers(asked, of_one_node(asked, "here"), node)


def indices(owned: Owned) -> list[list[int]]:
    return [[device.index for device in devices] for devices in owned]


COUNTS = [
    ({}, 0, 1, "no accelerator, so one worker"),
    ({}, 1, 1, "1 accelerator"),
    ({}, 8, 8, "8 accelerators"),
    ({"nproc_per_node": 3}, 8, 3, "--nproc-per-node"),
    ({"nproc_per_node": "gpu"}, 2, 2, "--nproc-per-node gpu: 2 accelerators"),
    ({"nproc_per_node": "auto"}, 2, 2, "--nproc-per-node auto: 2 accelerators"),
    ({"nproc_per_node": "auto"}, 0, 8, "--nproc-per-node auto: 8 usable CPUs"),
    ({"nproc_per_node": "cpu"}, 2, 8, "--nproc-per-node cpu: 8 usable CPUs"),
    ({"gpus_per_worker": 2}, 8, 4, "8 accelerators, 2 for each worker"),
    ({"gpus_per_worker": 3}, 8, 2, "8 accelerators, 3 for each worker"),
    ({"workers_per_gpu": 2}, 2, 4, "2 accelerators, 2 workers on each"),
    ({"workers_per_gpu": 1}, 2, 2, "2 accelerators, 1 worker on each"),
]


@pytest.mark.parametrize(("fields", "devices", "workers", "reason"), COUNTS)
def test_workers_are_counted_and_the_reason_is_said(fields, devices, workers, reason):
    assert count(spec(**fields), gpus(devices), hardware(devices)) == (workers, reason)


@pytest.mark.parametrize(("cpus", "quota", "workers"), [(8, 2.5, 2), (8, 0.5, 1), (2, None, 2)])
def test_cpus_that_are_counted_are_those_that_can_be_used(cpus: int, quota: float | None, workers: int) -> None:
    assert count(spec(nproc_per_node="cpu"), (), hardware(0, cpus, quota))[0] == workers


def test_an_origin_is_named_as_it_is_written() -> None:
    asked = spec(origins={"nproc_per_node": "PET_NPROC_PER_NODE"}, nproc_per_node="auto")
    assert count(asked, gpus(1), hardware(1)) == (1, "PET_NPROC_PER_NODE=auto: 1 accelerator")


@pytest.mark.parametrize(
    ("asked", "workers", "devices", "expected"),
    [
        pytest.param({"nproc_per_node": 5}, 5, 2, [[0], [1], [0], [1], [0]], id="more workers take devices in turn"),
        pytest.param({"nproc_per_node": 2}, 2, 4, [[0], [1]], id="fewer leave the last ones"),
        pytest.param({"workers_per_gpu": 2}, 4, 2, [[0], [0], [1], [1]], id="neighbours share"),
        pytest.param({"gpus_per_worker": 2}, 2, 4, [[0, 1], [2, 3]], id="a worker has neighbouring ones"),
    ],
)
def test_devices_are_given_out_in_their_order(asked, workers: int, devices: int, expected: list[list[int]]) -> None:
    assert indices(divide_devices(spec(**asked), workers, gpus(devices))) == expected


def test_a_job_for_the_cpus_owns_no_device() -> None:
    assert divide_devices(spec(nproc_per_node="cpu"), 3, gpus(2)) == ((), (), ())


def test_without_devices_nobody_owns_one() -> None:
    assert divide_devices(spec(), 2, ()) == ((), ())


REFUSED = [
    (
        {"nproc_per_node": "gpu"},
        0,
        "--nproc-per-node gpu: this node has no accelerator (none found)",
        "--nproc-per-node cpu, or a number",
    ),
    (
        {"gpus_per_worker": 3},
        2,
        "--gpus-per-worker 3: 1 worker needs 3 GPUs, but the job has only 2",
        "--gpus-per-worker 2",
    ),
    (
        {"gpus_per_worker": 1},
        0,
        "--gpus-per-worker 1: 1 worker needs 1 GPU, but the job has none",
        "leave --gpus-per-worker out",
    ),
    (
        {"gpus_per_worker": 2, "nproc_per_node": 4},
        4,
        "--gpus-per-worker 2: 4 workers need 8 GPUs, but the job has only 4",
        "--nproc-per-node 2",
    ),
    (
        {"gpus_per_worker": 2, "nproc_per_node": "cpu"},
        4,
        "--gpus-per-worker 2: 8 workers need 16 GPUs, but the job has only 4",
        "--nproc-per-node 2",
    ),
    (
        {"workers_per_gpu": 2, "nproc_per_node": 5},
        2,
        "--workers-per-gpu 2: 5 workers need 3 GPUs, but the job has only 2",
        "--nproc-per-node 4",
    ),
    (
        {"workers_per_gpu": 2},
        0,
        "--workers-per-gpu 2: 1 worker needs 1 GPU, but the job has none",
        "leave --workers-per-gpu out",
    ),
]


@pytest.mark.parametrize(("fields", "devices", "message", "hint"), REFUSED)
def test_what_the_devices_do_not_allow_is_refused(fields, devices, message, hint):
    with pytest.raises(LaunchError) as raised:
        assign(spec(**fields), devices)
    assert (raised.value.message, raised.value.hint, raised.value.status) == (message, hint, 2)


def assign(asked: JobSpec, devices: int) -> Owned:
    return divide_devices(asked, count(asked, gpus(devices), hardware(devices))[0], gpus(devices))


nproc = st.one_of(st.none(), st.integers(1, 20), st.sampled_from(["gpu", "cpu", "auto"]))
each = st.one_of(st.none(), st.integers(1, 10))


@given(nproc, each, each, st.integers(0, 9))
def test_every_owned_device_is_there_and_shared_fairly(nproc, gpus_per_worker, workers_per_gpu, devices):
    # the options refuse both together
    asked = spec(
        nproc_per_node=nproc,
        gpus_per_worker=gpus_per_worker,
        workers_per_gpu=None if gpus_per_worker else workers_per_gpu,
    )
    try:
        owned = assign(asked, devices)
    except LaunchError as error:
        assert gpus_per_worker or workers_per_gpu or (nproc == "gpu" and not devices), error
        return
    owners = Counter(device for own in owned for device in own)
    assert set(owners) <= set(gpus(devices))
    assert len(owned) >= 1
    assert len({len(own) for own in owned}) == 1, "every worker has as many as the others"
    if gpus_per_worker:
        assert set(owners.values()) == {1}
        assert {len(own) for own in owned} == {gpus_per_worker}
    elif workers_per_gpu:
        assert max(owners.values()) <= workers_per_gpu
    elif devices and nproc != "cpu":
        loads = [owners[device] for device in gpus(devices)]
        assert max(loads) - min(loads) <= 1
        assert all(len(own) == 1 for own in owned)


@given(st.integers(1, 9), each, each)
def test_what_is_counted_always_fits(devices: int, gpus_per_worker: int | None, workers_per_gpu: int | None) -> None:
    gpus_per_worker = min(gpus_per_worker, devices) if gpus_per_worker else None
    asked = spec(gpus_per_worker=gpus_per_worker, workers_per_gpu=None if gpus_per_worker else workers_per_gpu)
    assert assign(asked, devices)


@pytest.mark.parametrize(
    ("how", "devices", "nodes", "shares"),
    [
        ("divide", 8, 2, ["0123", "4567"]),
        ("divide", 8, 3, ["01", "23", "45"]),
        ("divide", 2, 3, ["01", "01", "01"]),
        ("divide", 0, 2, ["", ""]),
        ("share", 4, 2, ["0123", "0123"]),
    ],
)
def test_simulated_nodes_divide_the_devices_if_there_is_one_for_each(how, devices, nodes, shares):
    here = Node(host="a", hardware=hardware(devices), devices=gpus(devices), python="", bootstrap="", env={})
    got = [simulated(here, node_rank, nodes, how) for node_rank in range(nodes)]
    assert ["".join(str(device.index) for device in one.devices) for one in got] == shares
    assert {one.shared for one in got} == {len(set(shares)) < nodes}


def test_a_node_that_is_not_simulated_or_alone_is_as_it_is() -> None:
    here = Node(host="a", hardware=hardware(2), devices=gpus(2), python="", bootstrap="", env={})
    assert simulated(here, 1, 2, None) == simulated(here, 0, 1, "share") == here
