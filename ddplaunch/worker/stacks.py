"""Lets the agent see where this process is: a real-time signal has faulthandler write all stacks to a file of the agent's.

It works while the GIL is held in C, needs no thread, and holds for forked children too. A program that takes the signal for
itself has it: the file is closed then, which tells the agent to send it no more.
"""

import faulthandler
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

NAME = "/memfd:ddplaunch-stacks"


def offer(fd: int, signum: int) -> None:
    """Do that; nothing where the descriptor is not the agent's file, as under a low limit of open files."""
    try:
        if not os.readlink(f"/proc/self/fd/{fd}").startswith(NAME):
            return
        os.set_inheritable(fd, False)
        faulthandler.register(signum, file=fd)
    except Exception:  # noqa: BLE001 - the program does without it
        return

    def give_up() -> None:
        try:
            if os.readlink(f"/proc/self/fd/{fd}").startswith(NAME):
                os.close(fd)
        except OSError:  # the program has closed it
            pass

    # Python's own `signal.signal` calls that of `_signal` by its name
    for module, name in ((sys.modules["_signal"], "signal"), (faulthandler, "register"), (faulthandler, "unregister")):
        setattr(module, name, noticed(getattr(module, name), signum, give_up))


def noticed(original: "Callable[..., Any]", signum: int, then: "Callable[[], None]") -> "Callable[..., Any]":
    """Return a function like `original` that calls `then` where the first argument has been this signal."""

    def function(*args: "Any", **keywords: "Any") -> "Any":
        found = original(*args, **keywords)
        if (args[0] if args else keywords.get("signum")) == signum:
            then()
        return found

    function.__name__ = function.__qualname__ = original.__name__
    function.__doc__ = original.__doc__
    function.__module__ = original.__module__
    return function
