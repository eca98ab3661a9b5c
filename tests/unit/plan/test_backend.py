import pytest
from msgspec.structs import replace

from ddplaunch.plan.assign import cannot_use, choose_backend
from ddplaunch.plan.devices import Device
from ddplaunch.plan.devices.interpreter import TorchBuild

CUDA = TorchBuild(version="2.13.0+cu130", cuda="13.0", hip=None, xpu=None, nccl=True)
CPU = TorchBuild(version="2.13.0+cpu", cuda=None, hip=None, xpu=None, nccl=False)
ROCM = TorchBuild(version="2.13.0+rocm7.0", cuda=None, hip="7.0", xpu=None, nccl=True)
XPU = TorchBuild(version="2.13.0+xpu", cuda=None, hip=None, xpu="2025.2", nccl=False)

Owned = list[tuple[Device, ...]]


def gpu(index: int, kind: str = "cuda") -> Device:
    return Device(kind=kind, index=index, visible_as=str(index))


def each(*indices: int, kind: str = "cuda") -> Owned:
    return [(gpu(index, kind),) for index in indices]


CHOICES: list[tuple[Owned, TorchBuild | None, str, str]] = [
    ([()], CUDA, "gloo", "no accelerator"),
    ([(), ()], None, "gloo", "no accelerator"),
    ([(gpu(0),), ()], CUDA, "gloo", "some workers have no accelerator"),
    (each(0, 1), CUDA, "nccl", "every worker has a GPU of its own"),
    (each(0, 1), ROCM, "nccl", "every worker has a GPU of its own"),
    (each(0, 1), None, "nccl", "every worker has a GPU of its own"),
    ([(gpu(0), gpu(1)), (gpu(2), gpu(3))], CUDA, "nccl", "every worker has a GPU of its own"),
    (each(0, 1, 0), CUDA, "gloo", "3 workers share 2 GPUs, which NCCL refuses"),
    (each(0, 0), CUDA, "gloo", "2 workers share 1 GPU, which NCCL refuses"),
    (each(0), CPU, "gloo", "torch 2.13.0+cpu is a CPU build"),
    ([(gpu(0), gpu(1)), (gpu(1), gpu(2))], CUDA, "gloo", "2 workers share 3 GPUs, which NCCL refuses"),
    (each(0, 0), CPU, "gloo", "torch 2.13.0+cpu is a CPU build"),
    (each(0), XPU, "gloo", "torch 2.13.0+xpu is a build for other accelerators"),
    (each(0), replace(CUDA, nccl=False), "gloo", "torch 2.13.0+cu130 was built without NCCL"),
    (each(0, 1, kind="xpu"), XPU, "xccl", "every worker has an Intel GPU of its own"),
    (each(0, 1, kind="xpu"), None, "xccl", "every worker has an Intel GPU of its own"),
    (each(0, 0, kind="xpu"), XPU, "gloo", "2 workers share 1 device"),
    (each(0, 1, kind="xpu"), CUDA, "gloo", "torch 2.13.0+cu130 is a build for other accelerators"),
    (each(0, 1, kind="xpu"), CPU, "gloo", "torch 2.13.0+cpu is a CPU build"),
]


@pytest.mark.parametrize(("owned", "build", "backend", "reason"), CHOICES)
def test_the_backend_suits_devices_and_torch(owned: Owned, build: TorchBuild | None, backend: str, reason: str) -> None:
    assert choose_backend(owned, build) == (backend, reason)


@pytest.mark.parametrize(
    ("build", "kind", "usable"),
    [(CUDA, "cuda", True), (ROCM, "cuda", True), (XPU, "xpu", True), (XPU, "cuda", False), (CUDA, "xpu", False)],
)
def test_a_torch_can_use_what_it_was_built_for(build: TorchBuild, kind: str, usable: bool) -> None:
    assert (cannot_use(build, kind) is None) is usable


def mig(card: int, instance: int) -> tuple[Device]:
    return (Device(kind="cuda", index=0, visible_as=f"MIG-{card}-{instance}", pci=f"0000:{card}1:00.0"),)


def test_instances_of_one_gpu_share_it() -> None:
    """NCCL knows a MIG instance only by the PCI address of its GPU."""
    assert choose_backend([mig(0, 0), mig(0, 1), mig(1, 0)], CUDA) == (
        "gloo",
        "3 workers share 2 GPUs, which NCCL refuses",
    )


def test_instances_of_different_gpus_are_gpus_of_ones_own() -> None:
    assert choose_backend([mig(0, 0), mig(1, 0)], CUDA)[0] == "nccl"


def test_tiles_of_one_intel_gpu_are_devices_of_ones_own() -> None:
    tiles = [(Device(kind="xpu", index=tile, visible_as=f"0.{tile}", pci="0000:11:00.0"),) for tile in range(2)]
    assert choose_backend(tiles, XPU)[0] == "xccl"
