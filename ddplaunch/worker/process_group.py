"""Destroys the process group that a program has left when it ends well. Imports no torch.

torch 2.13 at times aborts a process that ends with one: "terminate called without an active exception". It is done after the
program's own functions of `atexit`, which may need the group, and not waited for longer than LIMIT: a success stays one.
"""

import atexit
import os
import threading

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

LIMIT = 5.0  # seconds


def destroy_at_exit(distributed: "Any", has_failed: "Callable[[], bool]") -> None:
    """Do that; `distributed` is torch.distributed, and nothing is done if the program `has_failed`: others may wait in vain."""
    worker = os.getpid()

    def destroy() -> None:
        try:
            distributed.destroy_process_group()
        except Exception:  # noqa: BLE001, S110 - the program has ended well without it
            pass

    def at_exit() -> None:
        try:
            if os.getpid() != worker or has_failed() or not distributed.is_initialized():
                return
            thread = threading.Thread(target=destroy, daemon=True)
            thread.start()
            thread.join(LIMIT)
        except Exception:  # noqa: BLE001, S110 - a torch without process groups; 3.12.0 and 3.12.1 start no thread any more
            pass

    atexit.register(at_exit)
