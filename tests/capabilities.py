"""Takes from root what it may do beyond every other user: to read any file, whatever its mode."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

_VERSION = 0x20080522  # _LINUX_CAPABILITY_VERSION_3
_ANY_FILE = 1 << 1 | 1 << 2  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
_PR_SET_SECUREBITS, _SECBIT_NOROOT = 28, 1

_libc = ctypes.CDLL(None, use_errno=True)


@contextmanager
def bound_by_modes() -> Iterator[None]:
    """Bind this thread by the modes of files, and the programs that it starts, which have no capability at all."""
    if os.geteuid() != 0:
        yield
        return
    header, sets = (ctypes.c_uint32 * 2)(_VERSION, 0), (ctypes.c_uint32 * 6)()
    _check(_libc.capget(header, sets))
    effective = sets[0]
    try:
        sets[0] = effective & ~_ANY_FILE
        _check(_libc.capset(header, sets))
        _check(_libc.prctl(_PR_SET_SECUREBITS, _SECBIT_NOROOT, 0, 0, 0))
        yield
    finally:
        _check(_libc.prctl(_PR_SET_SECUREBITS, 0, 0, 0, 0))
        sets[0] = effective
        _check(_libc.capset(header, sets))


def _check(result: int) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), "capabilities")
