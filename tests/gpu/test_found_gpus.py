"""What is found without torch is what torch finds, on real GPUs."""

import json
import os
import sys
from subprocess import run
from typing import Any

import pytest

from ddplaunch.plan.devices import Hardware
from ddplaunch.plan.devices.node import probe

pytestmark = pytest.mark.gpu

ASK_TORCH = """
import json, torch
found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
print(json.dumps([[f"GPU-{gpu.uuid}", gpu.name, gpu.pci_bus_id] for gpu in found]))
"""


def torch_finds(env: dict[str, str]) -> list[list[Any]]:
    ended = run([sys.executable, "-c", ASK_TORCH], env=env, text=True, capture_output=True, timeout=300, check=True)
    found: list[list[Any]] = json.loads(ended.stdout)
    return found


def without_outer_list() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}


@pytest.mark.claim("ddplaunch finds without torch the devices that torch finds, in its order", page="guides/devices.md")
def test_each_device_is_the_one_that_torch_counts_so(hardware: Hardware) -> None:
    ours = [[gpu.uuid, gpu.name, int((gpu.pci or "").split(":")[1], 16)] for gpu in hardware.devices]
    assert ours == torch_finds(dict(os.environ))


@pytest.mark.claim("CUDA_VISIBLE_DEVICES is read as CUDA reads it, also where it is wrong", page="guides/devices.md")
@pytest.mark.parametrize("value", ["", "-1", "0", "0,-1,0", "99", "0,99", "0,0", "GPU-none", "0gpu", " 0"])
def test_a_list_of_visible_gpus_is_read_as_cuda_reads_it(hardware: Hardware, value: str) -> None:
    env = {**without_outer_list(), "CUDA_VISIBLE_DEVICES": value}
    assert [gpu.uuid for gpu in probe(env).devices] == [uuid for uuid, _, _ in torch_finds(env)]


@pytest.mark.claim("ddplaunch finds without torch the devices that torch finds, in its order", page="guides/devices.md")
def test_a_token_shows_its_device_alone(hardware: Hardware) -> None:
    for gpu in hardware.devices:
        shown = torch_finds({**os.environ, "CUDA_VISIBLE_DEVICES": gpu.visible_as})
        assert [uuid for uuid, _, _ in shown] == [gpu.uuid]
