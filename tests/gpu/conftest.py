"""The GPUs that these tests need, and the reason why they are skipped without."""

import os
import sys

import pytest

from ddplaunch.devices import Hardware
from ddplaunch.devices.interpreter import find_torch
from ddplaunch.devices.node import probe


def missing() -> str | None:
    """Why nothing here can be tested; None: it can."""
    hardware = probe(os.environ)
    if hardware.visible_variable != "CUDA_VISIBLE_DEVICES" or not hardware.devices:
        return f"needs an NVIDIA GPU ({hardware.device_source})"
    if any(device.is_mig or device.uuid is None for device in hardware.devices):
        return "needs whole GPUs that NVML knows"
    build = find_torch(sys.executable)
    if build is None or build.cuda is None:
        return f"needs a torch with CUDA ({build.version if build else 'torch is not installed'})"
    return None


@pytest.fixture
def hardware() -> Hardware:
    if reason := missing():
        pytest.skip(reason)
    return probe(os.environ)


@pytest.fixture
def uuids(hardware: Hardware) -> list[str]:
    """The GPUs that CUDA shows here, in its order."""
    return [device.uuid or "" for device in hardware.devices]
