"""Has torch record the collectives of this process, and answer the agent about them. Imports no torch.

torch's flight recorder keeps the last collectives of each process group. Its WorkerServer (torch 2.4) answers on a Unix socket,
even while the GIL is held: it has threads of C++, one for each CPU and at least 8. It is started with the first process group.
The ranks of each group are written to a file beside the socket, because gloo's groups do not record them.
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import Any

ENTRIES = "500"  # more cost memory, and time at each question; docs/design/inspection.md has the figures
MOST_GROUPS = 256  # in the file
ROOM = 1 << 20  # characters in the file, as many as the agent reads
# the first since torch 2.13, which warns of the second; before, only the second is known
VARIABLES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")


def switch_on(distributed: "Any", path: str, joined: "Callable[[], None]") -> None:
    """Record collectives from now on, before torch.distributed has made a process group, and call `joined` with the first.

    `path` is that of the socket; the ranks of groups are written to `path`.groups.
    """
    torch = sys.modules["torch.version"]
    major, minor = (int(part) for part in str(torch.__version__).split(".")[:2])
    if (major, minor) < (2, 4):
        return
    if not any(name in os.environ for name in VARIABLES):
        os.environ[VARIABLES[0] if (major, minor) >= (2, 13) else VARIABLES[1]] = ENTRIES
    groups = distributed.distributed_c10d
    groups._pg_group_ranks = GroupRanks(groups._pg_group_ranks, _Recorder(path, joined).note)


class GroupRanks(dict):  # type: ignore[type-arg]  # of any Python from 3.8 on
    """torch's table of the ranks of each process group, which calls `note` for each group that torch adds."""

    def __init__(self, table: "Mapping[Any, Any]", note: "Callable[[Any, Any], None]") -> None:
        super().__init__(table)
        self._note = note

    def __setitem__(self, group: "Any", ranks: "Any") -> None:
        super().__setitem__(group, ranks)
        try:
            self._note(group, ranks)
        except Exception:  # noqa: BLE001, S110 - not the torch that we know: the program does without it
            pass


class _Recorder:
    """Starts the WorkerServer with the first process group, and writes down the ranks of each."""

    def __init__(self, path: str, joined: "Callable[[], None]") -> None:
        self._path = path
        self._joined = joined
        self._worker = os.getpid()
        self._noted = 0
        self._room = ROOM

    def note(self, group: "Any", ranks: "Mapping[int, int]") -> None:
        """Write down the ranks of a group that torch has made; with the first group, start the WorkerServer."""
        if os.getpid() != self._worker or self._noted == MOST_GROUPS:
            return
        self._noted += 1
        if self._noted == 1:
            self._serve()
            self._joined()
        line = f"{group.group_name} {ranges_of(ranks)}\n"
        if len(line) <= self._room:  # else the group has too many ranks; later ones may have few
            self._room -= len(line)
            with open(f"{self._path}.groups", "a", encoding="utf-8") as file:
                file.write(line)

    def _serve(self) -> None:
        import ctypes  # torch has imported it

        from torch._C._distributed_c10d import _WorkerServer

        server = _quietly(lambda: _WorkerServer(self._path))
        # never freed: that would wait for its threads, which a forked child lacks, and abort where it was not shut down before
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(server))


def ranges_of(ranks: "Iterable[int]") -> str:
    """Return ranks as ascending ranges: "0-2,4"."""
    found: list[list[int]] = []
    for rank in sorted(ranks):
        if found and rank == found[-1][1] + 1:
            found[-1][1] = rank
        else:
            found.append([rank, rank])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in found)


def _quietly(make: "Callable[[], Any]") -> "Any":
    """Call `make` and return its result; drop the line that it writes to stderr, and keep those of others."""
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
