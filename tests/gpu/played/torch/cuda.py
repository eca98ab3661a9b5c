"""Plays torch.cuda; see the package."""

import os

_begun_in: list[int] = []  # the processes that have begun to use the GPU, of which this one descends


class AcceleratorError(RuntimeError):
    """torch's."""

    __module__ = "torch"


def begin():
    """Use the GPU: not after a fork."""
    if _begun_in not in ([], [os.getpid()]):
        hint = "To use CUDA with multiprocessing, you must use the 'spawn' start method"
        raise RuntimeError(f"Cannot re-initialize CUDA in forked subprocess. {hint}")
    _begun_in[:] = [os.getpid()]


def device_count():
    return 1


def is_available():
    return True


def set_device(device):
    if device not in (0, "cuda:0"):
        raise AcceleratorError("CUDA error: invalid device ordinal")


def synchronize():
    pass


def _lazy_call(call):
    call()
