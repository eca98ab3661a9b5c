"""What `ps` shows of this process: its name, and its command line, which lies in its own memory."""

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

# of the fields behind the name in /proc/PID/stat, counted from 0: where the command line begins and ends (proc(5))
_ARG_START, _ARG_END = 45, 46


def change(name: str, text: str) -> "Callable[[], None]":
    """Show this name, and as much of this text as fits; return what undoes both.

    Where the kernel does not allow it nothing changes.
    """
    try:
        with open("/proc/self/comm", "rb") as file:
            old_name = file.read().rstrip(b"\n")
        with open("/proc/self/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        start, end = int(fields[_ARG_START]), int(fields[_ARG_END])
        with open("/proc/self/cmdline", "rb") as file:
            old_line = file.read()
        if len(old_line) != end - start:  # a library shows something else already
            return lambda: None
        # what ends with no zero would be read on, into the environment
        _write(name.encode(), start, text.encode()[: end - start - 1].ljust(end - start, b"\0"))
    except (OSError, ValueError, IndexError):
        return lambda: None

    def undo() -> None:
        try:
            _write(old_name, start, old_line)
        except OSError:
            pass

    return undo


def _write(name: bytes, start: int, line: bytes) -> None:
    with open("/proc/self/comm", "wb", buffering=0) as file:
        file.write(name)
    memory = os.open("/proc/self/mem", os.O_WRONLY)
    try:
        os.pwrite(memory, line, start)
    finally:
        os.close(memory)
