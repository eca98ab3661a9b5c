"""Measures which installed packages a script waits for while it imports them. Reads and changes no module."""

import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType
    from typing import Any

WORTH_NAMING = 0.5  # seconds
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


def measure(path: str) -> None:
    """Write a line to the file at `path` for each import of an installed module that takes long: its name and the seconds."""
    sys.meta_path.insert(0, _Timed(path))


class _Timed:
    """A finder that leaves the search to the others, and times their loaders; imports within imports count as one."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._is_busy = False  # it searches, or a module is being executed

    def find_spec(self, name: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None) -> "Any":
        """Return what the other finders find."""
        if self._is_busy:
            return None
        self._is_busy = True
        try:
            for finder in sys.meta_path:
                spec = getattr(finder, "find_spec", lambda *_: None)(name, path, target)
                if spec is not None:
                    if any(part in (spec.origin or "") for part in _INSTALLED):
                        self._time(name, spec.loader)
                    return spec
        finally:
            self._is_busy = False
        return None

    def _time(self, name: str, loader: "Any") -> None:
        execute = loader.exec_module

        def exec_module(module: "ModuleType") -> None:
            del loader.exec_module
            if self._is_busy:
                execute(module)
                return
            self._is_busy, began = True, time.monotonic()
            try:
                execute(module)
            finally:
                self._is_busy = False
                self._note(name, time.monotonic() - began)

        try:
            loader.exec_module = exec_module
        except AttributeError:  # a loader with slots
            pass

    def _note(self, name: str, seconds: float) -> None:
        if seconds < WORTH_NAMING:
            return
        try:
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(f"{name} {seconds:.1f}\n")
        except OSError:  # no room, or removed
            pass
