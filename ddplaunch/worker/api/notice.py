"""Handles the signals that announce the end of the job, in this worker only; `stop.py` asks the others."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping
from types import FrameType

ALWAYS = (signal.SIGTERM, signal.SIGUSR1)
_ENDS_CHILDREN = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)

_received = False
_previous: dict[int, object] = {}  # the handlers that were there before ours, by signal; empty: ours are not installed
_spares_children = False


def received() -> bool:
    """Return whether this process has received a notice."""
    return _received


def install_handlers() -> None:
    """Install handlers for the signals of a notice. Handlers that the program has installed are still called.

    Raises: RuntimeError: this is not the main thread, in which alone Python can install handlers. ValueError:
    `DDPLAUNCH_NOTICE_SIGNALS` has a name that is no signal.
    """
    if _previous:
        return
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("the first should_stop() installs signal handlers: call it once in the main thread before")
    for signum in signals(os.environ):
        _previous[signum] = signal.signal(signum, _on_signal)
    spare_children()


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
    if callable(previous) and previous is not signal.default_int_handler:
        previous(signum, frame)


def _in_child() -> None:
    """Give a forked child the handlers that the program had; it ignores signals without one, if they are not to end children."""
    global _received
    _received = False
    for signum in signals(os.environ):
        handler = _previous.get(signum) if signal.getsignal(signum) is _on_signal else signal.getsignal(signum)
        if handler is signal.SIG_DFL and signum not in _ENDS_CHILDREN:
            handler = _ignore  # not SIG_IGN, which programs that the child starts would inherit
        signal.signal(signum, handler)  # type: ignore[arg-type]
    _previous.clear()


def _ignore(signum: int, frame: FrameType | None) -> None:
    pass
