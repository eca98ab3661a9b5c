from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplaunch.plan.assign import Owned, bind_device, choose_pin, pin_notes
from ddplaunch.plan.devices import Device, Hardware
from ddplaunch.spec.job import JobSpec, ProgramKind
from tests.unit.builders import refusal, spec

NONE: Owned = ((), ())
ONE_EACH: Owned = tuple((Device(kind="cuda", index=n, visible_as=str(n)),) for n in range(2))
ONE_SHARED: Owned = (ONE_EACH[0], ONE_EACH[0])
TWO_FOR_ONE: Owned = ((*ONE_EACH[0], *ONE_EACH[1]),)
MIG: Owned = tuple((Device(kind="cuda", index=n, visible_as=f"MIG-{n}"),) for n in range(2))
ONE_INSTANCE = "CUDA shows a process no more than one MIG instance"
OWN_ONLY = "each worker sees only its own devices, so LOCAL_RANK is not a device index: use DDPLAUNCH_DEVICE"


COMMAND = ProgramKind.COMMAND
HOW: list[tuple[JobSpec, Owned, tuple[str, str]]] = [
    (spec(), ONE_EACH, ("device", "default")),
    (spec(ProgramKind.MODULE), ONE_EACH, ("device", "default")),
    (spec(COMMAND), ONE_EACH, ("none", "default for a command")),
    (spec(pin="none"), ONE_EACH, ("none", "--pin")),
    (spec(COMMAND, pin="visible"), ONE_EACH, ("visible", "--pin")),
    (spec(virtual_local_rank=True), ONE_EACH, ("visible", "--virtual-local-rank")),
    (spec(COMMAND, virtual_local_rank=True), ONE_EACH, ("visible", "--virtual-local-rank")),
    (spec(), TWO_FOR_ONE, ("visible", "each worker has several devices")),
    (spec(pin="device"), TWO_FOR_ONE, ("device", "--pin")),
    (spec(), MIG, ("visible", ONE_INSTANCE)),
    (spec(COMMAND), MIG, ("visible", ONE_INSTANCE)),
    (spec(pin="device"), MIG[:1], ("device", "--pin")),
    (spec(pin="none"), MIG, ("none", "--pin")),
]


@pytest.mark.parametrize(("asked", "owned", "how"), HOW)
def test_how_workers_are_bound_depends_on_program_and_devices(asked, owned, how):
    assert choose_pin(asked, owned) == how


@pytest.mark.parametrize(
    ("asked", "owned", "message"),
    [
        (spec(COMMAND, pin="device"), ONE_EACH, "--pin device: it works inside python, but --no-python runs a command"),
        (spec(pin="device"), MIG, f"--pin device: {ONE_INSTANCE}"),
    ],
)
def test_a_way_that_cannot_work_is_refused(asked: JobSpec, owned: Owned, message: str) -> None:
    assert refusal(lambda: choose_pin(asked, owned)) == (message, "--pin visible")


def gpu(index: int, token: str) -> Device:
    return Device(kind="cuda", index=index, visible_as=token)


def place(how: str, own: tuple[Device, ...], there: tuple[Device, ...], **fields: Any) -> tuple[str, dict[str, str]]:
    return bind_device(spec(**fields), how, own, there, Hardware(devices=there))


FOUR = tuple(gpu(n, str(n)) for n in range(4))
OUTER = (gpu(0, "4"), gpu(1, "7"))
NAMED = (gpu(0, "GPU-a"), gpu(1, "GPU-b"))
CHOSEN = (FOUR[2], FOUR[0])


@pytest.mark.parametrize(
    ("how", "own", "devices", "fields", "device", "variables"),
    [
        ("device", FOUR[2:3], FOUR, {}, "cuda:2", {"DDPLAUNCH_PIN_DEVICE": "cuda:2"}),
        ("none", FOUR[2:3], FOUR, {}, "cuda:2", {}),
        ("visible", FOUR[2:3], FOUR, {}, "cuda:0", {"CUDA_VISIBLE_DEVICES": "2"}),
        ("visible", FOUR[2:], FOUR, {}, "cuda:0", {"CUDA_VISIBLE_DEVICES": "2,3"}),
        ("device", FOUR[2:], FOUR, {}, "cuda:2", {"DDPLAUNCH_PIN_DEVICE": "cuda:2"}),
        ("device", OUTER[1:], OUTER, {}, "cuda:1", {"DDPLAUNCH_PIN_DEVICE": "cuda:1"}),
        ("visible", OUTER[1:], OUTER, {}, "cuda:0", {"CUDA_VISIBLE_DEVICES": "7"}),
        (
            "device",
            NAMED[1:],
            NAMED,
            {},
            "cuda:1",
            {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b", "DDPLAUNCH_PIN_DEVICE": "cuda:1"},
        ),
        ("none", NAMED[1:], NAMED, {}, "cuda:1", {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"}),
        ("visible", NAMED[1:], NAMED, {}, "cuda:0", {"CUDA_VISIBLE_DEVICES": "GPU-b"}),
        (
            "device",
            CHOSEN[:1],
            CHOSEN,
            {"devices": ("2", "0")},
            "cuda:0",
            {"CUDA_VISIBLE_DEVICES": "2,0", "DDPLAUNCH_PIN_DEVICE": "cuda:0"},
        ),
        ("visible", CHOSEN[:1], CHOSEN, {"devices": ("2", "0")}, "cuda:0", {"CUDA_VISIBLE_DEVICES": "2"}),
        ("device", (), FOUR, {}, "cpu", {}),
        ("visible", (), (), {}, "cpu", {}),
    ],
)
def test_a_worker_calls_its_device_as_torch_will_count_it(how, own, devices, fields, device, variables):
    assert place(how, own, devices, **fields) == (device, variables)


@given(st.permutations(range(6)), st.integers(1, 6), st.booleans(), st.data())
def test_what_a_worker_is_told_leads_cuda_to_its_own_device(outer, count, by_uuid, data):
    """CUDA's own rule: cuda:N is the N-th entry of CUDA_VISIBLE_DEVICES."""
    tokens = [f"GPU-{number}" if by_uuid else str(number) for number in outer[:count]]
    there = tuple(gpu(index, token) for index, token in enumerate(tokens))
    chosen = data.draw(st.one_of(st.none(), st.permutations(there).map(lambda order: tuple(order[:3]))))
    of_job = chosen or there
    first = data.draw(st.integers(0, len(of_job) - 1))
    own = of_job[first : data.draw(st.integers(first + 1, len(of_job)))]
    how = data.draw(st.sampled_from(["device", "visible", "none"]))
    device, variables = place(how, own, of_job, **({"devices": ("given",)} if chosen else {}))
    visible = variables.get("CUDA_VISIBLE_DEVICES", ",".join(tokens)).split(",")
    assert visible[int(device.removeprefix("cuda:"))] == own[0].visible_as
    if how == "visible":
        assert visible == [mine.visible_as for mine in own]


def test_other_vendors_have_a_variable_of_their_own() -> None:
    tiles = tuple(Device(kind="xpu", index=n, visible_as=str(n)) for n in range(2))
    hardware = Hardware(devices=tiles, visible_variable="ZE_AFFINITY_MASK")
    assert bind_device(spec(), "visible", tiles[1:], tiles, hardware) == ("xpu:0", {"ZE_AFFINITY_MASK": "1"})


@pytest.mark.parametrize(
    ("how", "owned", "fields", "notes"),
    [
        ("device", ONE_EACH, {}, []),
        ("device", NONE, {}, []),
        ("visible", NONE, {}, []),
        ("visible", ONE_EACH, {}, [OWN_ONLY]),
        ("visible", ONE_EACH[:1], {}, []),
        ("visible", ONE_EACH, {"virtual_local_rank": True}, []),
        (
            "device",
            ONE_SHARED,
            {},
            [
                "2 workers on 1 device: set_device(LOCAL_RANK) fails from local rank 1 on; "
                "use DDPLAUNCH_DEVICE, or --virtual-local-rank"
            ],
        ),
        (
            "none",
            (*ONE_EACH, *ONE_EACH),
            {},
            [
                "4 workers on 2 devices: set_device(LOCAL_RANK) fails from local rank 2 on; "
                "use DDPLAUNCH_DEVICE, or --virtual-local-rank"
            ],
        ),
    ],
)
def test_where_local_rank_is_no_devices_index_this_is_said(how, owned, fields, notes):
    assert pin_notes(spec(**fields), how, owned) == notes
