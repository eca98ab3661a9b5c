"""Plays the little of torch that programs use here on the GPU that tests/fake_nvml makes up: its memory, and torch's errors.

The errors are worded as those of torch 2.11. Whether a real torch words them so, only a real GPU can show.
"""

import os
import sys
import time

from torch import cuda as cuda
from torch.version import __version__ as __version__

uint8 = "uint8"
_GPU = 80 << 30  # bytes: what the made-up GPU has
_used = [0]  # bytes of it


class OutOfMemoryError(RuntimeError):
    """torch's."""


class Tensor:
    """Takes no memory and computes nothing."""

    def __matmul__(self, other):
        time.sleep(0.01)
        return self

    def __getitem__(self, at):
        return self

    def sum(self):
        return self

    def item(self):
        return 1.0

    def __float__(self):
        return 1.0


def empty(size, dtype=None, device=None):
    """Take this many bytes of the GPU."""
    cuda.begin()
    if _used[0] + size > _GPU:
        asked = f"Tried to allocate {size / (1 << 30):.2f} GiB. GPU 0 has a total capacity of 80.00 GiB"
        raise OutOfMemoryError(f"CUDA out of memory. {asked}")
    _used[0] += size
    file = os.path.join(os.environ["FAKE_GPU_USERS"], str(os.getpid()))
    with open(f"{file}.part", "w") as part:
        part.write(str(_used[0]))
    os.rename(f"{file}.part", file)
    return Tensor()


def ones(*size, device=None):
    """Take nothing worth counting."""
    cuda.begin()
    return Tensor()


def tensor(values, device=None):
    """Make a tensor of these values, of which none is kept."""
    return Tensor()


class nn:  # noqa: N801 - torch's
    class functional:  # noqa: N801 - torch's
        @staticmethod
        def embedding(indices, table):
            raise cuda.AcceleratorError("CUDA error: device-side assert triggered")


sys.modules["torch.nn"] = nn
