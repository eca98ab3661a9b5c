"""What Linux and the C library are asked for."""

import platform
import subprocess
import sys

import pytest

_FAULTS = """
import resource, sys
from ddplaunch.system.process.linux import keep_freed_memory

if sys.argv[1] == "kept":
    keep_freed_memory()
faults = []
for _ in range(100):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    pieces = [b"x" * (1 << 16) for _ in range(8)]
    del pieces
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(sum(faults[1:]))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library keeps what it keeps")
def test_freed_memory_is_taken_again_without_the_kernel() -> None:
    def faults(which: str) -> int:
        argv = [sys.executable, "-c", _FAULTS, which]
        return int(subprocess.run(argv, check=True, capture_output=True, timeout=60).stdout)

    assert 5 * faults("kept") < faults("not kept")
