"""Forks past a debugger or a profiler around this command, and says whether there is a debugger. Imports neither.

VS Code and PyCharm run a program under pydevd, which replaces `os.fork`, `os.exec...` and what `subprocess` calls, so that it
gets into each process that the program starts. A worker is one process to it by its exec, and a second one by a fork before
that; and no other process of ours is to be slowed or held by it. So they are forked by the function that `os.fork` was.

`memray run --follow-fork` goes on in each fork, with a file of its own, whose descriptor processes of ours close.
"""

from __future__ import annotations

import gc
import os
import posix
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

_left_trackers: list[object] = []  # memray's, in this process or in one from which it was forked
_ORIGINAL_PREFIX = "original_"  # how the name begins under which it keeps a function that it has replaced


def fork() -> int:
    """Fork; neither a debugger nor a memory profiler in this process is in the child."""
    pid = posix.fork()
    if pid == 0 and "pydevd" in sys.modules:
        with suppress(Exception):  # a version of it that we do not know
            _leave_debugger()
    if pid == 0 and "memray" in sys.modules:
        with suppress(Exception):
            _leave_profiler()
    return pid


def debugger_follows_children() -> bool:
    """Return whether a debugger gets into each program of Python that this process, or one that it has forked, executes."""
    setup = _debugger_setup()
    return bool(setup.get("multiprocess") or setup.get("multiproc"))  # PyDev's and debugpy's word, and PyCharm's


@contextmanager
def unfollowed_by_debugger() -> Iterator[None]:
    """Have the debugger in this process not get into what `subprocess` starts meanwhile: put back what it has replaced."""
    of_debugger: list[tuple[Any, str, Any]] = []  # module, name of a function, and the debugger's in its place
    if "pydevd" in sys.modules:
        for name in ("subprocess", "_posixsubprocess"):
            module = sys.modules.get(name)
            for kept_as, original in list(vars(module).items()) if module is not None else ():
                if kept_as.startswith(_ORIGINAL_PREFIX):
                    function = kept_as.removeprefix(_ORIGINAL_PREFIX)
                    of_debugger.append((module, function, getattr(module, function)))
                    setattr(module, function, original)
    try:
        yield
    finally:
        for module, function, replacement in of_debugger:
            setattr(module, function, replacement)


def _debugger_setup() -> dict[str, Any]:
    """Return the options of the debugger in this process; {} if there is none."""
    holder = getattr(sys.modules.get("pydevd"), "SetupHolder", None)
    return getattr(holder, "setup", None) or {}


def _leave_debugger() -> None:
    """Have pydevd trace nothing in this forked process, which lacks its threads; it gets into programs executed from here."""
    constants: Any = sys.modules["_pydevd_bundle.pydevd_constants"]
    if constants.GlobalDebuggerHolder.global_dbg is None:  # the process that forked this one has left it
        return
    constants.GlobalDebuggerHolder.global_dbg = None
    if setup := _debugger_setup():
        setup["ppid"] = os.getppid()  # a worker belongs to the process that the debugger knows
    tracing: Any = sys.modules["pydevd_tracing"]
    tracing.restore_sys_set_trace_func()
    sys.settrace(None)
    monitoring: Any = getattr(sys, "monitoring", None)  # since Python 3.12
    if monitoring is not None and monitoring.get_tool(monitoring.DEBUGGER_ID) is not None:
        monitoring.set_events(monitoring.DEBUGGER_ID, 0)
        events = (event for name, event in vars(monitoring.events).items() if name.isupper() and event)
        for event in events:
            with suppress(ValueError):  # an event that can have no callback
                monitoring.register_callback(monitoring.DEBUGGER_ID, event, None)
        monitoring.free_tool_id(monitoring.DEBUGGER_ID)


def _leave_profiler() -> None:
    """Have memray record nothing in this forked process: it would end the process once it cannot write any more."""
    profiler: Any = sys.modules["memray"]
    for found in gc.get_objects():  # nothing else leads to the trackers
        if type(found) is profiler.Tracker and found not in _left_trackers:
            _left_trackers.append(found)
            found.__exit__(None, None, None)
