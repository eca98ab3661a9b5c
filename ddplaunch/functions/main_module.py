"""What the caller's `__main__` is, and how a worker gets the same: as multiprocessing's "spawn" does it. Imports nothing."""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import Any

_MOST_SOURCES = 4 << 20  # characters
_SELF_MADE = ("<stdin>", "<string>")  # what `python` without a file, and with -c, calls its code


def imported_by(main: ModuleType) -> dict[str, str]:
    """Say how a worker can import this `__main__`, in the words of multiprocessing.spawn.prepare; {}: it cannot."""
    spec = getattr(main, "__spec__", None)
    if name := getattr(spec, "name", None):
        return {"init_main_from_name": name}
    path = getattr(main, "__file__", None)
    if not isinstance(path, str) or os.path.basename(path) in _SELF_MADE or not os.path.isfile(path):
        return {}
    return {"init_main_from_path": os.path.abspath(path)}


def is_interactive() -> bool:
    """Whether code is typed into this interpreter: what it defines stands in no file."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive) or "get_ipython" in vars(sys.modules["__main__"])


def preparation(main: dict[str, str]) -> dict[str, Any]:
    """Give what a worker needs for multiprocessing.spawn.prepare; `main` is what `imported_by` gave, {} to leave it out.

    multiprocessing's own get_preparation_data would settle the start method of this process, once and for all.
    """
    import multiprocessing
    from multiprocessing import process

    path = list(sys.path)
    if "" in path:
        path[path.index("")] = _here()
    data: dict[str, Any] = {
        "authkey": bytes(process.current_process().authkey),  # for what managers of the caller serve
        "sys_path": path,
        "sys_argv": list(sys.argv) if hasattr(sys, "argv") else [""],
        **main,
    }
    if method := multiprocessing.get_start_method(allow_none=True):
        data["start_method"] = method
    return data


def sources() -> dict[str, Any]:
    """Give the lines of what was typed, for tracebacks: a notebook keeps those of its cells in linecache, without a file."""
    import linecache

    typed = {name: entry for name, entry in linecache.cache.items() if len(entry) == 4 and entry[1] is None}
    return typed if sum(entry[0] for entry in typed.values()) <= _MOST_SOURCES else {}


def _here() -> str:
    try:
        return os.getcwd()
    except OSError:  # removed meanwhile
        return "."
