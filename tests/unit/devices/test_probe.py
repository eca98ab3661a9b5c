import os
from pathlib import Path

import pytest

from ddplaunch.plan.devices import Hardware
from ddplaunch.plan.devices.node import probe
from ddplaunch.plan.devices.nvidia import gpus_in_proc
from tests.unit.builders import write_files

SLURM = {"CUDA_VISIBLE_DEVICES": "0,1", "ROCR_VISIBLE_DEVICES": "0,1", "ZE_AFFINITY_MASK": "0,1"}


def seen(hardware: Hardware) -> list[tuple[str, str]]:
    """The devices as torch calls them and as the visibility variable does."""
    return [(str(device), device.visible_as) for device in hardware.devices]


def test_an_empty_machine_has_no_devices_but_our_cpus(tmp_path: Path) -> None:
    assert probe({}, root=tmp_path) == Hardware(
        cpus=tuple(sorted(os.sched_getaffinity(0))), machine_cpus=os.cpu_count() or 0
    )


def test_a_variable_alone_proves_no_device(tmp_path: Path) -> None:
    found = probe(SLURM, root=tmp_path)
    assert found.devices == ()
    assert found.device_source == "no GPU driver found, although CUDA_VISIBLE_DEVICES=0,1"


def information(root: Path, address: str, minor: int, **facts: str) -> None:
    lines = {"Model": "NVIDIA A100-SXM4-40GB", "Device Minor": str(minor), **facts}
    text = "".join(f"{key}: \t {value}\n" for key, value in lines.items())
    write_files(root, {f"proc/driver/nvidia/gpus/{address}/information": text})


def test_the_driver_lists_its_gpus_in_proc(tmp_path: Path) -> None:
    information(tmp_path, "0000:3b:00.0", 1, **{"GPU UUID": "GPU-????????-????-????"})
    information(tmp_path, "0000:18:00.0", 0, **{"GPU UUID": "GPU-8932f937-d72c"})
    write_files(tmp_path, {"dev/nvidia0": "", "dev/nvidia1": ""})
    assert [(gpu.pci, gpu.uuid, gpu.name) for gpu in gpus_in_proc(tmp_path)] == [
        ("0000:18:00.0", "GPU-8932f937-d72c", "NVIDIA A100-SXM4-40GB"),
        ("0000:3b:00.0", None, "NVIDIA A100-SXM4-40GB"),
    ]


def test_gpus_of_the_host_that_a_container_was_not_given_do_not_count(tmp_path: Path) -> None:
    information(tmp_path, "0000:18:00.0", 0)
    information(tmp_path, "0000:3b:00.0", 1)
    information(tmp_path, "0000:5e:00.0", 2, **{"GPU Excluded": "Yes"})
    write_files(tmp_path, {"dev/nvidia1": "", "dev/nvidia2": ""})
    assert [gpu.pci for gpu in gpus_in_proc(tmp_path)] == ["0000:3b:00.0"]


@pytest.fixture
def amd(tmp_path: Path) -> Path:
    """A CPU (node 0), four MI250-like GPUs (1-4) and one that this container may not use (5)."""
    nodes = "sys/class/kfd/kfd/topology/nodes"
    write_files(tmp_path, {f"{nodes}/0/properties": "cpu_cores_count 64\nsimd_count 0\n", f"{nodes}/5/properties": ""})
    for number in range(1, 5):
        write_files(
            tmp_path,
            {
                f"{nodes}/{number}/name": "aldebaran\n",
                f"{nodes}/{number}/properties": (
                    f"simd_count 416\nlocation_id {number << 8}\ndomain 0\nunique_id {0xABC0 + number}\n"
                ),
                f"{nodes}/{number}/mem_banks/0/properties": "heap_type 1\nsize_in_bytes 68702699520\n",
                f"{nodes}/{number}/mem_banks/1/properties": "heap_type 4\nsize_in_bytes 65536\n",
                f"sys/bus/pci/devices/0000:0{number}:00.0/local_cpulist": f"{number}\n",
            },
        )
    return tmp_path


def test_amd_gpus_are_the_nodes_with_compute_units(amd: Path) -> None:
    found = probe({}, root=amd)
    assert seen(found) == [("cuda:0", "0"), ("cuda:1", "1"), ("cuda:2", "2"), ("cuda:3", "3")]
    assert found.visible_variable == "HIP_VISIBLE_DEVICES"
    second = found.devices[1]
    assert (second.name, second.memory, second.pci) == ("aldebaran", 68702699520, "0000:02:00.0")
    assert (second.uuid, second.cpus) == ("GPU-000000000000abc2", (2,))


@pytest.mark.parametrize(
    ("env", "expected", "buses"),
    [
        ({"HIP_VISIBLE_DEVICES": "3,1"}, ["3", "1"], [4, 2]),
        ({"CUDA_VISIBLE_DEVICES": "2"}, ["2"], [3]),
        ({"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "2"}, ["0"], [1]),
        ({"ROCR_VISIBLE_DEVICES": "3,2"}, ["0", "1"], [4, 3]),
        ({"ROCR_VISIBLE_DEVICES": "GPU-000000000000abc4"}, ["0"], [4]),
        ({"ROCR_VISIBLE_DEVICES": "1,2,3", "HIP_VISIBLE_DEVICES": "2,0"}, ["2", "0"], [4, 2]),
        ({"HIP_VISIBLE_DEVICES": "-1"}, [], []),
        ({"HIP_VISIBLE_DEVICES": ""}, [], []),
    ],
    ids=str,
)
def test_rocm_counts_within_what_its_lower_layer_left(amd, env, expected, buses):
    found = probe(env, root=amd)
    assert [device.visible_as for device in found.devices] == expected
    assert [device.index for device in found.devices] == list(range(len(expected)))
    assert [device.pci for device in found.devices] == [f"0000:0{bus}:00.0" for bus in buses]
    assert found.notes == ()


def test_lists_of_two_layers_that_do_not_fit_each_other_are_told(amd: Path) -> None:
    found = probe({"ROCR_VISIBLE_DEVICES": "2,3", "CUDA_VISIBLE_DEVICES": "2,3"}, root=amd)
    assert found.devices == ()
    assert found.notes == (
        "CUDA_VISIBLE_DEVICES=2,3: there is no device 2 here, so it and what follows it is ignored; "
        "it counts within ROCR_VISIBLE_DEVICES=2,3",
    )


@pytest.fixture
def intel(tmp_path: Path) -> Path:
    """The graphics of the processor, two discrete cards of two tiles, a card of another vendor."""
    cards = {"card0": "0000:00:02.0", "card1": "0000:3A:00.0", "card2": "0000:9a:00.0"}
    for card, address in cards.items():
        write_files(
            tmp_path,
            {
                f"sys/class/drm/{card}/device/vendor": "0x8086\n",
                f"sys/class/drm/{card}/device/uevent": f"DRIVER=xe\nPCI_SLOT_NAME={address}\n",
                f"sys/class/drm/{card}/device/tile0/gt0/name": "",
                f"sys/class/drm/{card}/device/tile1/gt1/name": "",
            },
        )
    write_files(
        tmp_path,
        {
            "sys/class/drm/card1-DP-1/device/name": "card1\n",
            "sys/class/drm/card3/device/vendor": "0x1a03\n",
            "sys/class/drm/card3/device/uevent": "DRIVER=ast\nPCI_SLOT_NAME=0000:05:00.0\n",
            "sys/bus/pci/devices/0000:9a:00.0/local_cpulist": "8-15\n",
        },
    )
    return tmp_path


def test_each_tile_of_a_discrete_intel_card_is_a_device(intel: Path) -> None:
    found = probe({}, root=intel)
    assert seen(found) == [("xpu:0", "0"), ("xpu:1", "1"), ("xpu:2", "2"), ("xpu:3", "3")]
    assert [device.pci for device in found.devices] == ["0000:3a:00.0"] * 2 + ["0000:9a:00.0"] * 2
    assert found.devices[3].cpus == tuple(range(8, 16))
    assert found.visible_variable == "ZE_AFFINITY_MASK"


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"ZE_FLAT_DEVICE_HIERARCHY": "COMPOSITE"}, ["0", "1"]),
        ({"ZE_AFFINITY_MASK": "1,3"}, ["1", "3"]),
        ({"ZE_FLAT_DEVICE_HIERARCHY": "COMPOSITE", "ZE_AFFINITY_MASK": "1.0,1.1"}, ["1.0", "1.1"]),
        ({"ZE_AFFINITY_MASK": "9"}, []),
    ],
    ids=str,
)
def test_the_mask_chooses_among_intel_devices(intel: Path, env: dict[str, str], expected: list[str]) -> None:
    assert [device.visible_as for device in probe(env, root=intel).devices] == expected


def test_slurms_variables_for_all_vendors_do_not_hide_the_one_that_is_there(intel: Path) -> None:
    assert seen(probe(SLURM, root=intel)) == [("xpu:0", "0"), ("xpu:1", "1")]


@pytest.mark.parametrize(
    ("env", "granted"),
    [
        ({}, ""),
        (SLURM, "CUDA_VISIBLE_DEVICES=0,1"),
        ({"SLURM_JOB_GPUS": "0"}, "SLURM_JOB_GPUS=0"),
        ({"SLURM_JOB_GPUS": "0", "SLURM_STEP_ID": "1", "SLURM_STEP_GPUS": "2"}, "SLURM_STEP_GPUS=2"),
        ({"SLURM_JOB_GPUS": "0", "SLURM_STEP_ID": "1"}, ""),
        ({"SLURM_JOB_GPUS": "0", "CUDA_VISIBLE_DEVICES": "-1"}, ""),
        ({**SLURM, "CUDA_VISIBLE_DEVICES": ""}, ""),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, ""),
    ],
)
def test_what_grants_accelerators_is_named_unless_they_are_hidden(tmp_path, env, granted):
    assert probe(env, root=tmp_path).granted == granted
