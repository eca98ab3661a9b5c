"""Changes to torch's process groups, made when the program imports torch.distributed. Imports no torch.

**At the end of a program.** torch 2.13 at times aborts a process that ends well with a process group: "terminate called without
an active exception". A thread of gloo releases the Python objects of a collective late, and wants the GIL of an interpreter that
is ending. So the group is destroyed at exit, after the program's own functions of `atexit`, which may need it, and in at most
LIMIT seconds: a success stays one. A group that the program has destroyed may live on, where something still holds it, so that
its threads get time in any case.

**DDP models.** A gloo group that ends waits for its threads, one of which may need the GIL as above. Python's own references let
go of the GIL before they end a group; the reducer of a DDP model does not. If a program destroys the group before the model ends,
the reducer is its last holder, and the program never exits. So each group is held until the reducers that use it have ended.

**Timeouts** are long where a worker may be held by a debugger: the others wait for it.
"""

import atexit
import functools
import os
import threading
import time
import weakref
from datetime import timedelta

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

LIMIT = 5.0  # seconds to destroy a group at exit
LONG = timedelta(days=7)
_AFTER_FAILURE = 0.2  # seconds: the other workers wait for this one
_PAUSE = 0.002  # seconds without the GIL


def destroy_at_exit(distributed: "Any", has_failed: "Callable[[], bool]") -> None:
    """Destroy the process group at exit, unless the program `has_failed`: that could mean waiting for others in vain."""
    worker = os.getpid()

    def destroy() -> None:
        try:
            distributed.destroy_process_group()
        except Exception:  # noqa: BLE001, S110 - the program has ended well without it
            pass

    def at_exit() -> None:
        if os.getpid() != worker:
            return
        try:
            if not has_failed() and distributed.is_initialized():
                thread = threading.Thread(target=destroy, daemon=True)
                thread.start()
                thread.join(LIMIT)
        except Exception:  # noqa: BLE001, S110 - a torch without process groups; 3.12.0 and 3.12.1 start no thread any more
            pass
        _wait_for_gloo(_AFTER_FAILURE if has_failed() else LIMIT)

    atexit.register(at_exit)


def _wait_for_gloo(limit: float) -> None:
    """Wait until no thread of gloo computes: one that waits, waits for work or for the GIL, which it gets here."""
    until = time.monotonic() + limit
    states = _states_of_gloo()
    while states and time.monotonic() < until:
        time.sleep(_PAUSE)
        if "R" not in (states := _states_of_gloo()):
            break


def _states_of_gloo() -> "list[str]":
    """Return the states (proc_pid_stat(5)) of the threads of gloo's process groups, known by the name that torch gives them."""
    states = []
    for thread in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{thread}/stat", encoding="utf-8", errors="replace") as file:
                _, name, rest = file.read().replace(")", "(").split("(", 2)
        except (OSError, ValueError):  # it has ended
            continue
        if name.startswith("pt_gloo"):
            states.append(rest.split()[0])
    return states


def hold_for_reducers(distributed: "Any") -> None:
    """Hold the group of each reducer until the reducer has ended."""
    if not hasattr(distributed, "Reducer"):  # a torch without process groups
        return
    held: dict[int, tuple[Any, ...]] = {}

    def release(reference: "Any") -> None:
        del held[id(reference)]

    def hold(user: "Any", *objects: "Any") -> None:
        reference = weakref.ref(user, release)  # called when the C++ object is gone
        held[id(reference)] = (reference, *objects)

    def after(kind: type, name: str, then: "Callable[[Any, Any], None]", position: int) -> None:
        original = getattr(kind, name)

        @functools.wraps(original)
        def extended(self: "Any", *args: "Any", **named: "Any") -> None:
            original(self, *args, **named)
            try:
                then(self, args[position])
            except Exception:  # noqa: BLE001, S110 - not the torch that we know: nothing is held
                pass

        setattr(kind, name, extended)

    def of_reducer(reducer: "Any", group: "Any") -> None:
        # the last one ends first: a group of older torch keeps the GIL when it ends, its backends do not
        hold(reducer, *map(group._get_backend, group._device_types), group)

    after(distributed.Reducer, "__init__", of_reducer, 3)
    after(distributed.Reducer, "_update_process_group", of_reducer, 0)
    after(distributed.Logger, "__init__", hold, 0)  # it keeps the reducer


def raise_timeouts(distributed: "Any") -> None:
    """Give every process group that the program makes a LONG timeout, whatever it asks for."""
    module: Any = distributed.distributed_c10d
    make = module._new_process_group_helper

    @functools.wraps(make)
    def patient(*args: "Any", **keywords: "Any") -> "Any":
        if isinstance(keywords.get("timeout"), timedelta):
            keywords["timeout"] = LONG
        return make(*args, **keywords)

    module._new_process_group_helper = patient
