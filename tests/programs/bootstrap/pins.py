"""Uses CUDA in several ways, each in a child of its own, on a make-believe driver below the real torch: pins.py WAY...

Prints for each way what the driver was asked to do, and the device that was current in the end.
"""

import os
import sys

import torch

asked = []
current = 0
count = 4


def set_device(index):
    """As torch/csrc/cuda/Module.cpp: CUDA is initialised first."""
    global current
    torch.cuda._lazy_init()
    if not 0 <= index < count:
        raise RuntimeError("CUDA error: invalid device ordinal")
    asked.append(f"set {index}")
    current = index


def exchange_device(index):
    before = get_device()
    set_device(index)
    return before


def get_device():
    torch.cuda._lazy_init()
    return current


torch._C._cuda_init = lambda: asked.append("init")
torch._C._cuda_getDeviceCount = lambda: count
torch._C._cuda_getDevice = get_device
torch._C._cuda_setDevice = set_device
torch.cuda._exchange_device = torch.cuda._maybe_exchange_device = exchange_device
torch.cuda._cudart = object()
torch.cuda._device_count_nvml = lambda: -1  # a machine that has GPUs is not asked for them


class Properties:
    """What a build for CUDA reads of each device as soon as CUDA starts, to warn of one that it has no code for."""

    name, major, minor = "NVIDIA H100", 9, 0


torch.cuda._get_device_properties = lambda _: Properties


class Generator:
    def __init__(self, index):
        self.index = index

    def manual_seed(self, seed):
        asked.append(f"seed {self.index}")


torch.cuda.default_generators = [Generator(index) for index in range(4)]


def use(way):
    global count
    if way == "uses none":
        torch.zeros(1)
        torch.cuda.device_count()
    elif way == "chooses":
        torch.cuda.set_device(1)
    elif way == "chooses the first":
        torch.cuda.set_device(0)
    elif way == "chooses for a while":
        with torch.cuda.device(1):
            assert torch.cuda.current_device() == 1
    elif way == "seeds first":
        torch.cuda.manual_seed(1)
        torch.cuda.init()
    elif way == "narrows":
        os.environ["CUDA_VISIBLE_DEVICES"] = "3"
        count = 1
        torch.cuda.init()
    elif way == "has fewer":
        count = 2
        torch.cuda.init()
    elif way == "forks first":
        if os.fork():
            os.wait()
        torch.cuda.init()
    elif way == "uses it":
        torch.cuda.init()


for way in sys.argv[1:]:
    if os.fork() == 0:
        use(way)
        print(way, asked, current, sep=": ", flush=True)
        os._exit(0)
    os.wait()
