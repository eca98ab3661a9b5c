"""What probe() finds where NVML answers; a stand-in library is compiled and loaded in a forked process of its own."""

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ddplaunch.plan.devices import Device, Hardware
from tests.forks import BOOTSTRAP, Forks

REPOSITORY = Path(__file__).parents[3]
PROBE = REPOSITORY / "tests/programs/probe.py"
USE = REPOSITORY / "tests/programs/gpu_use.py"
GIB = 1 << 30

Probe = Callable[..., Hardware]


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("the stand-in for NVML needs a C compiler, and there is no gcc here")
    folder = tmp_path_factory.mktemp("nvml")
    source = REPOSITORY / "tests/fake_nvml/nvml.c"
    target = folder / "libnvidia-ml.so.1"
    command = [compiler, "-shared", "-fPIC", "-Wall", "-Werror", "-Wl,-soname,libnvidia-ml.so.1"]
    subprocess.run([*command, "-o", str(target), str(source)], check=True)
    return folder


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    forks = Forks("ddplaunch.plan.devices.node", "ddplaunch.plan.devices.nvidia")
    yield forks
    forks.close()


@pytest.fixture
def probed(library: Path, forks: Forks, tmp_path: Path) -> Probe:
    """Probes with these GPUs and variables; the root is an empty folder, so nothing of this machine mixes in."""

    def run(gpus: str, **variables: str) -> Hardware:
        env = {"LD_LIBRARY_PATH": str(library), "PYTHONPATH": str(REPOSITORY)}
        argv = [sys.executable, str(BOOTSTRAP), "script", str(PROBE), str(tmp_path)]
        status, out, err = forks.run(argv, REPOSITORY, env, {"FAKE_GPUS": gpus, **variables})
        if status:
            raise RuntimeError(err.decode())
        found = eval(out, {"Hardware": Hardware, "Device": Device})  # its own repr, from our own process
        assert isinstance(found, Hardware)
        return found

    return run


def gpu(number: int) -> str:
    return f"GPU-{number:x}0000000-1111-2222-3333-444444444444"


def mig(number: int, instance: int) -> str:
    return f"MIG-{number:x}000000{instance:x}-1111-2222-3333-444444444444"


def tokens(hardware: Hardware) -> list[str]:
    return [device.visible_as for device in hardware.devices]


@pytest.mark.parametrize("count", [1, 4, 8])
def test_equal_gpus_are_counted_by_index(probed: Probe, count: int) -> None:
    found = probed(" ".join(["H200"] * count))
    assert [(device.index, device.visible_as) for device in found.devices] == [(i, str(i)) for i in range(count)]
    assert found.device_source == "NVML"
    assert found.visible_variable == "CUDA_VISIBLE_DEVICES"
    assert found.notes == ()


def test_a_gpu_is_described_in_full(probed: Probe, tmp_path: Path) -> None:
    near = tmp_path / "sys/bus/pci/devices/0000:11:00.0/local_cpulist"
    near.parent.mkdir(parents=True)
    near.write_text("0-1,8\n")
    assert probed("H200 H200").devices[1] == Device(
        kind="cuda",
        index=1,
        visible_as="1",
        uuid=gpu(1),
        name="NVIDIA H200",
        memory=80 * GIB,
        pci="0000:11:00.0",
        cpus=(0, 1, 8),
    )


def test_a_driver_without_gpus_gives_none(probed: Probe) -> None:
    found = probed("")
    assert found.devices == ()
    assert found.device_source == "none found"


def test_a_driver_that_is_not_loaded_is_said(probed: Probe) -> None:
    found = probed("H200", FAKE_NVML_INIT="9")
    assert found.devices == ()
    assert found.device_source == "NVML: Driver Not Loaded"


def test_a_broken_nvml_leaves_the_gpus_that_the_driver_lists(probed: Probe, tmp_path: Path) -> None:
    """Code 18 is what a driver that was upgraded without a reboot gives."""
    information = tmp_path / "proc/driver/nvidia/gpus/0000:18:00.0/information"
    information.parent.mkdir(parents=True)
    information.write_text("Model: \t\t NVIDIA H200\nGPU UUID: \t GPU-????????-????\nDevice Minor: \t 0\n")
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    found = probed("", FAKE_NVML_INIT="18")
    assert tokens(found) == ["0"]
    assert found.device_source == "/proc/driver/nvidia"
    assert found.notes == (
        "NVML does not work (RM has detected an NVML/RM version mismatch), so CUDA most likely does not either",
    )


def test_the_outer_list_gives_order_and_tokens(probed: Probe) -> None:
    found = probed("H200 H200 H200 H200", CUDA_VISIBLE_DEVICES="2,0")
    assert [(str(device), device.visible_as, device.uuid) for device in found.devices] == [
        ("cuda:0", "2", gpu(2)),
        ("cuda:1", "0", gpu(0)),
    ]
    assert found.device_source == "CUDA_VISIBLE_DEVICES"


def test_a_shortened_uuid_becomes_the_whole_one(probed: Probe) -> None:
    assert tokens(probed("H200 H200", CUDA_VISIBLE_DEVICES="GPU-1")) == [gpu(1)]


def test_what_slurm_sets_for_other_vendors_changes_nothing(probed: Probe) -> None:
    both = {"ROCR_VISIBLE_DEVICES": "1", "ZE_AFFINITY_MASK": "1", "GPU_DEVICE_ORDINAL": "1"}
    assert tokens(probed("H200 H200", CUDA_VISIBLE_DEVICES="1", **both)) == ["1"]


def test_mig_instances_are_the_devices(probed: Probe) -> None:
    found = probed("A100 A100/3")
    assert tokens(found) == [gpu(0), mig(1, 0), mig(1, 1), mig(1, 2)]
    assert [device.is_mig for device in found.devices] == [False, True, True, True]
    assert found.devices[3] == Device(
        kind="cuda",
        index=3,
        visible_as=mig(1, 2),
        uuid=mig(1, 2),
        name="NVIDIA A100 MIG 1g.10gb",
        memory=10 * GIB,
        pci="0000:11:00.0",
    )


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (f"{mig(1, 2)},{mig(1, 0)}", [mig(1, 2), mig(1, 0)]),
        (f"MIG-{gpu(1)}/2/0", [mig(1, 1)]),
        ("1", [mig(1, 0), mig(1, 1), mig(1, 2)]),
        (gpu(1), [mig(1, 0), mig(1, 1), mig(1, 2)]),
        ("0", ["0"]),
    ],
    ids=["instances", "an instance as old drivers name it", "its GPU by index", "its GPU by UUID", "another GPU"],
)
def test_the_outer_list_chooses_among_mig_instances(probed: Probe, value: str, expected: list[str]) -> None:
    assert tokens(probed("A100 A100/3", CUDA_VISIBLE_DEVICES=value)) == expected


def test_a_mig_gpu_without_instances_is_left_out_with_a_note(probed: Probe) -> None:
    found = probed("A100 A100/0")
    assert tokens(found) == [gpu(0)]
    assert found.notes == ("GPU 1 is left out: it is in MIG mode and has no instance",)


def test_a_lost_gpu_is_left_out_with_a_note(probed: Probe) -> None:
    found = probed("H200 !H200 H200")
    assert tokens(found) == [gpu(0), gpu(2)]  # UUIDs: what CUDA would call the third one is not certain now
    assert found.notes[0].startswith("GPU 1 is left out: NVML reports it as lost")


def test_a_lost_gpu_that_was_asked_for_is_an_error(probed: Probe) -> None:
    with pytest.raises(RuntimeError, match="LaunchError: CUDA_VISIBLE_DEVICES=0,1: GPU 1 is lost"):
        probed("H200 !H200 H200", CUDA_VISIBLE_DEVICES="0,1")


def test_a_gpu_of_another_job_leaves_no_gap(probed: Probe) -> None:
    found = probed("#H200 H200 H200", CUDA_VISIBLE_DEVICES="0,1")
    assert [(device.visible_as, device.uuid) for device in found.devices] == [("0", gpu(1)), ("1", gpu(2))]


def test_gpus_that_know_no_mig_are_gpus(probed: Probe) -> None:
    assert tokens(probed("RTX4090 RTX4090")) == ["0", "1"]


def test_different_models_are_named_by_uuid(probed: Probe) -> None:
    """CUDA counts the fastest first, NVML by PCI address: an index of one is not an index of the other."""
    found = probed("A100 H200")
    assert tokens(found) == [gpu(0), gpu(1)]
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in found.notes[0]


def test_different_models_in_pci_order_are_counted_by_index(probed: Probe) -> None:
    found = probed("A100 H200", CUDA_DEVICE_ORDER="PCI_BUS_ID")
    assert tokens(found) == ["0", "1"]
    assert found.notes == ()


def test_an_index_among_different_models_stays_what_it_is(probed: Probe) -> None:
    found = probed("A100 H200", CUDA_VISIBLE_DEVICES="1")
    assert found.devices == (Device(kind="cuda", index=0, visible_as="1"),)


@pytest.mark.parametrize(
    ("gpus", "uses"),
    [
        ("H200 H200", [(10, 1 * GIB), (20, 2 * GIB)]),
        ("A100/2", [(None, 1 * GIB), (None, 2 * GIB)]),  # instances
        ("H200 !H200", [(10, 1 * GIB)]),
    ],
)
def test_the_use_of_each_device_is_told_as_often_as_it_is_asked_for(
    library: Path, forks: Forks, gpus: str, uses: list[tuple[int | None, int]]
) -> None:
    env = {"LD_LIBRARY_PATH": str(library), "PYTHONPATH": str(REPOSITORY)}
    argv = [sys.executable, str(BOOTSTRAP), "script", str(USE)]
    status, out, err = forks.run(argv, REPOSITORY, env, {"FAKE_GPUS": gpus})
    assert (status, err) == (0, b"")
    assert eval(out) == [uses, uses]
