"""Changes a worker's torch.distributed when the program imports it: groups that end, timeouts, records of collectives.

**At the end of a program.** torch 2.13 at times aborts a process that ends well with a process group: "terminate called without
an active exception". A thread of gloo releases the Python objects of a collective late, and wants the GIL of an interpreter that
is ending. So the group is destroyed at exit, after the functions that the program has registered with `atexit`, which may need
it, and in at most LIMIT seconds: a success stays one. A group that the program has destroyed may live on, where something still
holds it, so its threads get time in any case.

**DDP models.** A gloo group that ends waits for its threads, one of which may need the GIL as above. References of Python let
go of the GIL before they end a group; the reducer of a DDP model does not. If a program destroys the group before the model ends,
the reducer is its last holder, and the program never exits. So each group is held until the reducers that use it have ended.

**Timeouts** are long where a worker may be held by a debugger: the others wait for it.

**Collectives** are recorded by the flight recorder of torch, which keeps the last ones of each process group. Its WorkerServer
(torch 2.4) answers on a Unix socket, even while the GIL is held: it has threads of C++, one for each CPU and at least 8. It is
started with the first process group. The ranks of each group are written to a file beside the socket, because the groups of gloo
do not record them.
"""

import atexit
import functools
import os
import sys
import threading
import time
import weakref
from datetime import timedelta

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import Any

LIMIT = 5.0  # seconds to destroy a group at exit
LONG = timedelta(days=7)  # a debugger may hold a rank so long, and the others wait for it
_AFTER_FAILURE = 0.2  # seconds for threads of gloo in a worker that has failed: the other workers wait for its end
_PAUSE = 0.002  # seconds without the GIL
ENTRIES = "500"  # more cost memory, and time at each question; docs/design/inspection.md has the figures
MOST_GROUPS = 256  # in the file
ROOM = 1 << 20  # characters in the file, as many as the agent reads
# how many entries torch's flight recorder keeps: the name since torch 2.8, and the older one
SIZE_VARIABLES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")


def destroy_at_exit(distributed: "Any", has_failed: "Callable[[], bool]") -> None:
    """Destroy the process group when this worker exits: torch may abort the interpreter's end if a thread of gloo still runs.

    If the program `has_failed`, the group stays: destroying it could wait for other workers in vain.
    """
    worker = os.getpid()

    def destroy() -> None:
        try:
            distributed.destroy_process_group()
        except Exception:  # noqa: BLE001, S110 - the program has ended well without it
            pass

    def at_exit() -> None:
        """Destroy the group, in a thread that may hang, for at most LIMIT seconds; then wait until no thread of gloo computes."""
        if os.getpid() != worker:
            return
        try:
            if not has_failed() and distributed.is_initialized():
                thread = threading.Thread(target=destroy, daemon=True)
                thread.start()
                thread.join(LIMIT)
        except Exception:  # noqa: BLE001, S110 - a torch without process groups; 3.12.0 and 3.12.1 start no thread any more
            pass
        until = time.monotonic() + (_AFTER_FAILURE if has_failed() else LIMIT)
        states = _states_of_gloo()
        while states and time.monotonic() < until:
            time.sleep(_PAUSE)  # which releases the GIL, for which a thread of gloo may wait
            states = _states_of_gloo()
            if "R" not in states:  # none runs: all wait for work
                break

    atexit.register(at_exit)


def _states_of_gloo() -> "list[str]":
    """Return the states (proc_pid_stat(5)) of the threads that torch has named as gloo's."""
    states = []
    for thread in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{thread}/stat", encoding="utf-8", errors="replace") as file:
                _, name, rest = file.read().replace(")", "(").split("(", 2)  # ID (NAME) STATE ...
        except (OSError, ValueError):  # it has ended
            continue
        if name.startswith("pt_gloo"):
            states.append(rest.split()[0])
    return states


def hold_for_reducers(distributed: "Any") -> None:
    """Keep the process group of each DDP reducer until the reducer has ended, so that the reducer never is its last holder.

    A group that ends together with a reducer keeps the GIL while it waits for its threads, one of which may need the GIL.
    """
    if not hasattr(distributed, "Reducer"):  # a torch without process groups
        return
    held: dict[int, tuple[Any, ...]] = {}  # by the id of a weak reference to the user: that reference, and what is kept

    def release(reference: "Any") -> None:
        del held[id(reference)]

    def hold(user: "Any", *objects: "Any") -> None:
        """Keep these objects as long as `user` lives, which is an object of C++."""
        reference = weakref.ref(user, release)
        held[id(reference)] = (reference, *objects)

    def after(kind: type, name: str, then: "Callable[[Any, Any], None]", position: int) -> None:
        """Have `then` called after each call of `kind.name`, with the object and the argument at `position` behind it."""
        original = getattr(kind, name)

        @functools.wraps(original)
        def extended(self: "Any", *args: "Any", **named: "Any") -> None:
            original(self, *args, **named)
            try:
                then(self, args[position])
            except Exception:  # noqa: BLE001, S110 - not the torch that we know: nothing is held
                pass

        setattr(kind, name, extended)

    def hold_group(reducer: "Any", group: "Any") -> None:
        # an older torch keeps the GIL while a group ends. So the group is let go of first, as the last object here is: it waits
        # for nothing while its backends are held, and these let go of the GIL when they end
        backends = map(group._get_backend, group._device_types)
        hold(reducer, *backends, group)

    after(distributed.Reducer, "__init__", hold_group, position=3)
    after(distributed.Reducer, "_update_process_group", hold_group, position=0)
    after(distributed.Logger, "__init__", hold, position=0)  # it keeps the reducer, in C++


def raise_timeouts(distributed: "Any") -> None:
    """Give every process group of the program a LONG timeout: a debugger may hold a rank for as long as a user likes."""
    module: Any = distributed.distributed_c10d
    make = module._new_process_group_helper

    @functools.wraps(make)
    def patient(*args: "Any", **keywords: "Any") -> "Any":
        if isinstance(keywords.get("timeout"), timedelta):
            keywords["timeout"] = LONG
        return make(*args, **keywords)

    module._new_process_group_helper = patient


def size_variable_of_recorder(torch_version: str) -> "str | None":
    """Return the variable that sets the size of the flight recorder in this torch: `2.11.0+cu130`. None: it has none.

    torch 2.8 and later know both variables, and warn of the second; earlier ones know the second alone (seen in the
    libraries of 2.6.0, 2.7.1, 2.8.0 and 2.9.1, and in the warning of 2.11.0).
    """
    major, minor = (int(part) for part in torch_version.split(".")[:2])
    if (major, minor) < (2, 4):
        return None
    return SIZE_VARIABLES[0] if (major, minor) >= (2, 8) else SIZE_VARIABLES[1]


def record_collectives(distributed: "Any", path: str, on_first_group: "Callable[[], None]") -> None:
    """Have torch record collectives, before it has made a process group; call `on_first_group` when it has made the first.

    `path` is that of the socket at which the agent reads the records; the ranks of groups are written to `path`.groups.
    """
    size_variable = size_variable_of_recorder(str(sys.modules["torch.version"].__version__))
    if size_variable is None:  # this torch has no recorder
        return
    if not any(name in os.environ for name in SIZE_VARIABLES):  # else the user has chosen
        os.environ[size_variable] = ENTRIES
    groups = distributed.distributed_c10d
    table = groups._pg_group_ranks  # torch adds each group that it makes
    kind = class_in_place_of(table, GroupRanks)
    groups._pg_group_ranks = kind(table, path, on_first_group)


def class_in_place_of(table: "Mapping[Any, Any]", kind: "type[Any]") -> "type[Any]":
    """Return the class for our table in place of `table`: `kind`, or, where that is somebody else's, a class that is both."""
    return kind if type(table) is dict else type(kind.__name__, (kind, type(table)), {})


class GroupRanks(dict):  # type: ignore[type-arg]  # of any Python from 3.8 on
    """torch's table of the ranks of each process group, which writes down each group that torch adds.

    With the first of them it starts the WorkerServer at `path`, and calls `on_first_group`.
    """

    def __init__(self, table: "Mapping[Any, Any]", path: str, on_first_group: "Callable[[], None]") -> None:
        dict.__init__(self, table)  # of another class in our place it would be called with what is for ours
        vars(self).update(getattr(table, "__dict__", {}))
        self._path = path
        self._on_first_group = on_first_group
        self._worker = os.getpid()
        self._noted = 0  # groups
        self._room = ROOM  # characters left in the file

    def __setitem__(self, group: "Any", ranks: "Any") -> None:
        super().__setitem__(group, ranks)
        try:
            if os.getpid() == self._worker and self._noted < MOST_GROUPS:
                self._note(group, ranks)
        except Exception:  # noqa: BLE001, S110 - not the torch that we know: the program does without it
            pass

    def _note(self, group: "Any", ranks: "Mapping[int, int]") -> None:
        """Write down the ranks of a group that torch has made."""
        self._noted += 1
        if self._noted == 1:  # from now on there may be collectives
            self._start_record_server()
            self._on_first_group()
        line = f"{group.group_name} {ranges_of(ranks)}\n"
        if len(line) <= self._room:  # else the group has too many ranks; later ones may have few
            self._room -= len(line)
            with open(f"{self._path}.groups", "a", encoding="utf-8") as file:
                file.write(line)

    def _start_record_server(self) -> None:
        """Start torch's WorkerServer, which serves the records at `path`."""
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
    """Call `make` and return its result; drop its line "Server listening" from stderr, and keep all other lines."""
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
