"""What a launcher tells a worker: its rank, by variables, and a notice that the job is to end, by signals. Imports no torch."""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
from collections.abc import Mapping
from types import FrameType
from typing import NamedTuple

ALWAYS = (signal.SIGTERM, signal.SIGUSR1)
_ENDS_CHILDREN = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_received = False
_previous: dict[int, object] = {}  # the handlers that were there before ours, by signal; empty: ours are not installed
_spares_children = False  # `_in_child` is registered
_handling: set[int] = set()  # signals whose handlers run just now


def received() -> bool:
    """Return whether this process has received a notice."""
    return _received


def install_handlers() -> None:
    """Install handlers for the signals of a notice, as each should_stop() does. The handlers of the program are still called.

    Raises: RuntimeError: this is not the main thread, in which alone Python can install handlers. ValueError:
    `DDPLAUNCH_NOTICE_SIGNALS` has a name that is no signal.
    """
    if _previous:  # ours are installed, unless somebody has put back others since
        _install_again()
        return
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("the first should_stop() installs signal handlers: call it once in the main thread before")
    for signum in signals(os.environ):
        dumps_stacks: object = faulthandler.unregister(signum)  # type: ignore[func-returns-value]  # True or False
        _previous[signum] = signal.signal(signum, _on_signal)
        if dumps_stacks:  # faulthandler's handler is in C, so ours cannot call it: it calls ours
            faulthandler.register(signum, chain=True)
    spare_children()  # data loaders get the signals, too


def _install_again() -> None:
    """Install our handlers again where somebody who came before us, and has gone by now, put back what was there before both."""
    if threading.current_thread() is threading.main_thread():
        for signum, previous in _previous.items():
            found = signal.getsignal(signum)
            if found is signal.SIG_DFL or (found is previous and callable(found)):
                _previous[signum] = signal.signal(signum, _on_signal)


def signals(env: Mapping[str, str]) -> list[signal.Signals]:
    """Return the signals that are a notice: SIGTERM, SIGUSR1 and those of `DDPLAUNCH_NOTICE_SIGNALS`. Pure.

    Raises: ValueError: a name is not that of a signal, or of one that no process can handle.
    """
    names = env.get("DDPLAUNCH_NOTICE_SIGNALS", "")
    found = dict.fromkeys(ALWAYS)
    for text in filter(None, (text.strip() for text in names.split(","))):
        name = text.upper() if text.upper().startswith("SIG") else f"SIG{text.upper()}"
        signum = signal.Signals.__members__.get(name)
        if signum is None or signum in (signal.SIGKILL, signal.SIGSTOP):
            raise ValueError(f"DDPLAUNCH_NOTICE_SIGNALS is {names!r}, and {text!r} is no signal that can be handled")
        found[signum] = None
    return list(found)


def spare_children() -> None:
    """Keep forked children, such as data loaders, from being killed by a notice or handling it in our place.

    The signals go to the whole process group of a worker. A child killed by SIGUSR1 would fail the step during
    which the workers agree to stop. SIGTERM still ends children: that is how their parents end them.
    """
    global _spares_children
    if not _spares_children:
        _spares_children = True
        os.register_at_fork(after_in_child=_in_child)


def _on_signal(signum: int, frame: FrameType | None) -> None:
    """Remember the notice, and call the handler that the program had installed before."""
    global _received
    _received = True
    previous = _previous.get(signum)
    # the previous handler may have been installed a second time since, and call ours: then this call is from there
    is_called_by_previous = signum in _handling
    if callable(previous) and previous is not signal.default_int_handler and not is_called_by_previous:
        _handling.add(signum)
        try:
            previous(signum, frame)
        finally:
            _handling.discard(signum)


def _in_child() -> None:
    """Give a forked child the program's own handlers; signals without one are ignored, except for those that end children."""
    global _received
    _received = False
    for signum in signals(os.environ):
        found = signal.getsignal(signum)
        handler = _previous.get(signum) if found is _on_signal else found
        if handler is None:  # code in C has installed it
            continue
        ends_children = signum in _ENDS_CHILDREN  # a parent, such as a data loader's, ends its child by it
        if handler is signal.SIG_DFL and not ends_children:
            handler = _ignore  # not SIG_IGN, which programs that the child starts would inherit
        signal.signal(signum, handler)  # type: ignore[arg-type]
    _previous.clear()


def _ignore(signum: int, frame: FrameType | None) -> None:
    pass


class Ranks(NamedTuple):
    """Which worker of the job this is, of how many."""

    rank: int
    world_size: int


def ranks(env: Mapping[str, str]) -> Ranks:
    """Return rank and world size; 0 and 1 if no launcher has set them.

    Raises: ValueError: one of the variables is missing, or they contradict each other.
    """
    missing = [name for name in ("RANK", "WORLD_SIZE") if not env.get(name)]
    if len(missing) == 2:
        return Ranks(0, 1)
    if missing:
        there = "RANK" if missing == ["WORLD_SIZE"] else "WORLD_SIZE"
        raise ValueError(f"{there} is set and {missing[0]} is not: a launcher must set both or none")
    found = Ranks(number("RANK", env), number("WORLD_SIZE", env))
    if found.rank >= found.world_size:
        raise ValueError(f"RANK is {found.rank}, but WORLD_SIZE is {found.world_size}: ranks count from 0")
    return found


def number(name: str, env: Mapping[str, str]) -> int:
    """Return the number in a variable, 0 if it is not set.

    Raises: ValueError: it holds something else.
    """
    text = env.get(name) or "0"
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"{name} is {text!r}, which is no number from 0")
    return int(text)
