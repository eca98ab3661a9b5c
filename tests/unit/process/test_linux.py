"""What Linux offers, whatever Python was built with."""

import fcntl
import os

import pytest

from ddplaunch.system.process.linux import bounded_file


def test_a_file_in_memory_is_made_where_python_was_built_with_an_old_glibc(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (os, fcntl):
        for name in dir(module):
            if name.startswith(("memfd_", "MFD_", "F_ADD_SEALS", "F_SEAL_")):
                monkeypatch.delattr(module, name)
    file = bounded_file("ddplaunch-test", 100)
    assert os.readlink(f"/proc/self/fd/{file}").startswith("/memfd:ddplaunch-test")
    assert not os.get_inheritable(file)
    assert os.pwrite(file, b"x" * 100, 0) == 100
    with pytest.raises(PermissionError):
        os.pwrite(file, b"x", 100)
    os.close(file)


@pytest.mark.parametrize("size", [-1, 1 << 70])
def test_a_file_in_memory_that_cannot_have_its_size_leaves_no_descriptor(size: int) -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises((OSError, OverflowError)):
        bounded_file("ddplaunch-test", size)
    assert os.listdir("/proc/self/fd") == before
