"""How a worker gets the caller's `__main__` module: as multiprocessing's "spawn" does it. Imports no module of the user's."""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import Any

from ddplaunch.process.program import working_directory

_MAX_SOURCES = 4 << 20  # characters
_NOT_FILES = ("<stdin>", "<string>")  # what `python` without a file, and with -c, calls its code


def imported_by(main: ModuleType) -> dict[str, str]:
    """Return the keys for multiprocessing.spawn.prepare by which a worker imports this `__main__`; {} if it cannot."""
    spec = getattr(main, "__spec__", None)
    if name := getattr(spec, "name", None):
        return {"init_main_from_name": name}
    path = getattr(main, "__file__", None)
    if not isinstance(path, str) or os.path.basename(path) in _NOT_FILES or not os.path.isfile(path):
        return {}
    return {"init_main_from_path": os.path.abspath(path)}


def is_interactive() -> bool:
    """Whether code is typed into this interpreter: its definitions are in no file."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive) or "get_ipython" in vars(sys.modules["__main__"])


def import_path() -> list[str]:
    """Return the folders and files from which this process imports, wherever a worker may be."""
    return [folder or working_directory() or "." for folder in sys.path if isinstance(folder, str)]


def preparation(main: dict[str, str]) -> dict[str, Any]:
    """Return the data for multiprocessing.spawn.prepare in a worker; `main` is from `imported_by`, {} to leave it out.

    multiprocessing's own get_preparation_data would fix the start method of this process for good.
    """
    import multiprocessing
    from multiprocessing import process

    data: dict[str, Any] = {
        "authkey": bytes(process.current_process().authkey),  # for managers of the caller
        "sys_path": import_path(),
        "sys_argv": list(sys.argv) if hasattr(sys, "argv") else [""],
        **main,
    }
    if method := multiprocessing.get_start_method(allow_none=True):
        data["start_method"] = method
    return data


def sources() -> dict[str, Any]:
    """Return the source lines that were typed, for tracebacks: a notebook keeps its cells in linecache, without files."""
    import linecache

    typed = {name: entry for name, entry in linecache.cache.items() if len(entry) == 4 and entry[1] is None}
    return typed if sum(entry[0] for entry in typed.values()) <= _MAX_SOURCES else {}
