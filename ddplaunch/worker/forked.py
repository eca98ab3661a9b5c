"""Makes a process that fork_server.py has forked what a fresh one would be, before the program begins."""

import os
import sys

before = set(sys.modules)
import ctypes  # noqa: E402

for name in set(sys.modules) - before:
    del sys.modules[name]  # the program finds what it imports, and nothing of ours

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_SIGKILL = 9
_NO_PARENT = 127  # exit status of a worker whose agent has ended, or has given it up: nothing waits for it


def become(agent: int, content: bytes, stdio: "list[int]", release: int) -> "list[str]":
    """Make this process what a fresh one would be, and begin once a byte comes from the pipe `release`; give its arguments."""
    os.setsid()
    for target, fd in enumerate(stdio[:3]):
        os.dup2(fd, target)
        os.close(fd)
    cpus, count, *fields = content.split(b"\0")[:-1]
    if cpus:
        os.sched_setaffinity(0, map(int, cpus.split(b",")))
    arguments = [os.fsdecode(field) for field in fields[: int(count)]]
    os.environ.clear()
    for field in fields[int(count) :]:
        name, _, value = field.partition(b"=")
        os.environ[os.fsdecode(name)] = os.fsdecode(value)
    _open_stdin()
    _seed()
    if "threading" in sys.modules:  # its main thread keeps the number of the server's
        sys.modules["threading"].main_thread()._set_native_id()
    # our parent is the agent by now; before, its end would not be that of our parent
    if not os.read(release, 1):
        os._exit(_NO_PARENT)
    os.close(release)
    for fd in stdio[3:]:  # now that no descriptor of ours can have the number
        _place(fd, int(os.environ["DDPLAUNCH_STACKS"].partition(",")[0]))
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0)
    if os.getppid() != agent:
        os._exit(_NO_PARENT)
    return arguments


def _place(fd: int, target: int) -> None:
    """Return a descriptor this number, unless what was imported has that, or a low limit of open files forbids it."""
    if fd == target:
        return
    try:
        if not _is_open(target):
            os.dup2(fd, target, False)
    except OSError:  # the program does without it
        pass
    os.close(fd)


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def _open_stdin() -> None:
    """Make sys.stdin anew, as Python does at its start: it keeps what kind of file it was made for."""
    import io

    old: Any = sys.__stdin__
    raw: Any = io.FileIO(0, "rb", closefd=False)
    raw.name = "<stdin>"
    buffer = io.BufferedReader(raw)
    stdin: Any = io.TextIOWrapper(buffer, old.encoding, old.errors, "\n", raw.isatty(), old.write_through)
    stdin.mode = "r"
    sys.stdin = sys.__stdin__ = stdin  # type: ignore[misc]


def _seed() -> None:
    """Take new secrets and random seeds where a fresh process would; `random` does so itself."""
    # torch.seed() would seed the GPUs too, whose seed is a constant
    if hasattr(sys.modules.get("torch"), "default_generator"):
        sys.modules["torch"].default_generator.seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if "multiprocessing.process" in sys.modules:
        sys.modules["multiprocessing.process"].current_process().authkey = os.urandom(32)
