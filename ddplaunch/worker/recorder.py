"""Has torch record the collectives of this process, and tell the agent of them while the GIL is held. Imports no torch.

torch's flight recorder keeps the last collectives of each process group. Its WorkerServer, since torch 2.4, answers on a Unix
socket by idle threads of C++, one for each CPU but 8 at least; it is started with the first process group. Which ranks a group
has is written to a file beside the socket, since gloo's groups do not record it.
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import Any

ENTRIES = "500"  # more cost memory, and time at each look; docs/guides/debugging.md has the figures
MOST_GROUPS = 256  # that are written down
ROOM = 1 << 20  # characters of all that is written down, which is what the agent reads
# the first since 2.13; before, the other is the only one, and later it makes torch print a warning
VARIABLES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")


def switch_on(distributed: "Any", path: str, joined: "Callable[[], None]") -> None:
    """Do that at this path, and for groups `path`.groups; `distributed` is torch.distributed, which makes no group before.

    `joined` is called when the first one is there.
    """
    torch = sys.modules["torch.version"]
    major, minor = (int(part) for part in str(torch.__version__).split(".")[:2])
    if (major, minor) < (2, 4):
        return
    if not any(name in os.environ for name in VARIABLES):
        os.environ[VARIABLES[0] if (major, minor) >= (2, 13) else VARIABLES[1]] = ENTRIES
    groups = distributed.distributed_c10d
    groups._pg_group_ranks = GroupRanks(groups._pg_group_ranks, _Teller(path, joined).note)


class GroupRanks(dict):  # type: ignore[type-arg]  # of any Python from 3.8 on
    """torch's table of the ranks of each process group, which tells of each that is put there."""

    def __init__(self, table: "Mapping[Any, Any]", note: "Callable[[Any, Any], None]") -> None:
        super().__init__(table)
        self._note = note

    def __setitem__(self, group: "Any", ranks: "Any") -> None:
        super().__setitem__(group, ranks)
        try:
            self._note(group, ranks)
        except Exception:  # noqa: BLE001, S110 - not the torch that we know: the program does without it
            pass


class _Teller:
    def __init__(self, path: str, joined: "Callable[[], None]") -> None:
        self._path = path
        self._joined = joined
        self._worker = os.getpid()
        self._noted = 0
        self._room = ROOM

    def note(self, group: "Any", ranks: "Mapping[int, int]") -> None:
        if os.getpid() != self._worker or self._noted == MOST_GROUPS:
            return
        self._noted += 1
        if self._noted == 1:
            self._serve()
            self._joined()
        line = f"{group.group_name} {ranges_of(ranks)}\n"
        if len(line) <= self._room:  # of a group that has too many ranks; later ones may have few
            self._room -= len(line)
            with open(f"{self._path}.groups", "a", encoding="utf-8") as file:
                file.write(line)

    def _serve(self) -> None:
        import ctypes  # torch has imported it

        from torch._C._distributed_c10d import _WorkerServer

        server = _quietly(lambda: _WorkerServer(self._path))
        # its end would wait for threads, which a forked child does not have; where it was not shut down before, it aborts
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(server))


def ranges_of(ranks: "Iterable[int]") -> str:
    """Write ranks as ascending ranges: "0-2,4"."""
    found: list[list[int]] = []
    for rank in sorted(ranks):
        if found and rank == found[-1][1] + 1:
            found[-1][1] = rank
        else:
            found.append([rank, rank])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in found)


def _quietly(make: "Callable[[], Any]") -> "Any":
    """Return what `make` makes, without the line that it writes to stderr; what others write there meanwhile is kept."""
    stderr = os.dup(2)
    in_memory = hasattr(os, "memfd_create")  # not where Python was built with an old glibc
    file = os.memfd_create("stderr") if in_memory else os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR, 0o600)
    try:
        os.dup2(file, 2)
        try:
            return make()
        finally:
            os.dup2(stderr, 2)
            for line in os.pread(file, os.fstat(file).st_size, 0).splitlines(keepends=True):
                if b"Server listening" not in line:
                    os.write(2, line)
    finally:
        os.close(file)
        os.close(stderr)
