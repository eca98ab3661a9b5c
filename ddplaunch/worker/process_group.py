"""Destroys the process group that a program has left when it ends well. Imports no torch.

torch 2.13 at times aborts a process that ends with one: "terminate called without an active exception". That is a thread of
gloo that comes to release what a collective has kept of Python, and wants the GIL of an interpreter that ends. A group that the
program has destroyed may live on, where something still holds it, so that its threads get time for that in any case.

It is done after the program's own functions of `atexit`, which may need the group, and not waited for longer than LIMIT: a
success stays one.
"""

import atexit
import os
import threading
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

LIMIT = 5.0  # seconds
_AFTER_FAILURE = 0.2  # seconds, which the other workers wait for
_PAUSE = 0.002  # seconds without the GIL


def destroy_at_exit(distributed: "Any", has_failed: "Callable[[], bool]") -> None:
    """Do that; `distributed` is torch.distributed, and nothing is done if the program `has_failed`: others may wait in vain."""
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
    """Wait until no thread that runs collectives computes: one that waits, waits for work or for the GIL, which it gets here."""
    until = time.monotonic() + limit
    states = _states_of_gloo()
    while states and time.monotonic() < until:
        time.sleep(_PAUSE)
        if "R" not in (states := _states_of_gloo()):
            break


def _states_of_gloo() -> "list[str]":
    """The states, as in proc_pid_stat(5), of the threads of gloo's process groups, by the name that torch gives them."""
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
