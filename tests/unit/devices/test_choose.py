import pytest

from ddplaunch.plan.devices import Device, Hardware
from ddplaunch.plan.devices.choose import choose
from ddplaunch.system.errors import LaunchError
from tests.unit.builders import refusal

FOUR = Hardware(
    devices=tuple(
        Device(kind="cuda", index=index, visible_as=str(index + 4), uuid=uuid)
        for index, uuid in enumerate(["GPU-8932aaaa", "GPU-8932bbbb", "GPU-12345678", "MIG-99999999"])
    ),
    device_source="NVML",
)


def indices(*wanted: str) -> list[int]:
    return [device.index for device in choose(FOUR, wanted, f"--devices {','.join(wanted)}")]


def test_without_a_wish_all_devices_are_taken() -> None:
    assert choose(FOUR, None, "default") == FOUR.devices


def test_for_the_cpus_no_device_is_taken_be_there_some_or_none() -> None:
    assert choose(FOUR, ["cpu"], "--devices cpu") == choose(Hardware(), ["cpu"], "--devices cpu") == ()


def test_indices_and_uuids_are_taken_in_their_order() -> None:
    assert indices("2", "GPU-8932b", "MIG-99999999", "0") == [2, 1, 3, 0]


@pytest.mark.parametrize(
    ("wanted", "message", "hint"),
    [
        (["0", "9"], "--devices 0,9: there is no device 9; this node has 0-3", "--devices 0,1,2,3"),
        (["GPU-7"], "--devices GPU-7: there is no device GPU-7; this node has 0-3", "--devices 0,1,2,3"),
        (["-1"], "--devices -1: there is no device -1; this node has 0-3", "--devices 0,1,2,3"),
        ([""], "--devices : there is no device (empty); this node has 0-3", "--devices 0,1,2,3"),
        (
            ["GPU-8932"],
            "--devices GPU-8932: GPU-8932 may be GPU-8932aaaa and GPU-8932bbbb",
            "give more digits of the UUID",
        ),
        (
            ["2", "GPU-12"],
            "--devices 2,GPU-12: device GPU-12 is named twice",
            "--workers-per-gpu 2 lets two workers share each device",
        ),
    ],
    ids=["no such index", "no such UUID", "negative", "empty", "ambiguous", "twice"],
)
def test_a_wrong_wish_is_refused(wanted: list[str], message: str, hint: str) -> None:
    assert refusal(lambda: indices(*wanted)) == (message, hint)


def test_a_node_without_devices_says_why() -> None:
    with pytest.raises(LaunchError, match=r"--devices 0: this node has no accelerator \(CUDA_VISIBLE_DEVICES=-1\)"):
        choose(Hardware(device_source="CUDA_VISIBLE_DEVICES=-1"), ["0"], "--devices 0")


def test_the_error_says_within_what_was_counted_and_who_asked() -> None:
    narrowed = Hardware(devices=FOUR.devices[:1], device_source="CUDA_VISIBLE_DEVICES")
    with pytest.raises(LaunchError, match=r"^DDPLAUNCH_DEVICES=4: .* 0 alone, counted within CUDA_VISIBLE"):
        choose(narrowed, ["4"], "DDPLAUNCH_DEVICES=4")
