"""DECIDE: whether workers failed in the first lines of their program, at an import that fails at the next start as well. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ddplaunch.supervise.first_failure import failed_itself
from ddplaunch.supervise.outcome import WorkerError, WorkerExit

_OF_SYNTAX = ("SyntaxError", "IndentationError", "TabError")
_OF_RUNPY = ("runpy.py", "<frozen runpy>")  # `python -m`, when it does not find a module that it can run
_TYPES = ("ImportError", "ModuleNotFoundError", *_OF_SYNTAX)


def import_failure(error: WorkerError | None) -> str:
    """Return the import that failed in the first lines of the program: "ModuleNotFoundError: No module named 'x'"; else "".

    In the first lines: the outermost line of the traceback is an import of the program itself, or cannot be compiled. An import
    in a function may run whenever that is called, after hours of training.
    """
    if error is None or not error.frames:
        return ""
    outermost = error.frames[0]
    file = outermost.file.rpartition("/")[2]
    if error.type == "SystemExit" and file in _OF_RUNPY:
        return error.message
    if error.type not in _TYPES:
        return ""
    # as SyntaxError puts it of the program's own file, of which no line has run
    is_compiled = error.type not in _OF_SYNTAX or f"({file}, line {outermost.line})" not in error.message
    is_import = outermost.source.startswith(("import ", "from "))
    if outermost.function != "<module>" or (is_compiled and not is_import):
        return ""
    return f"{error.type}: {error.message}"


def shared_by_all(exits: Sequence[WorkerExit]) -> bool:
    """Whether each worker failed by itself, all at the same import in their first lines."""
    failures = {import_failure(end.error) if failed_itself(end) else "" for end in exits}
    return len(failures) == 1 and "" not in failures
