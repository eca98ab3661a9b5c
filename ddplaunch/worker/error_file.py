"""Writes the exception that ended the program to the error file, in the form that torch's `@record` has. Prints nothing.

The form is that of torch.distributed.elastic.multiprocessing.errors.error_handler, with a part of our own in `extraInfo`.
Loaded only when a program fails.
"""

import json
import linecache
import os
import time
import traceback

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType

# In characters. Even if each takes six bytes the file is no larger than the 1 MiB that its reader takes.
MESSAGE_LIMIT = 16 * 1024
CALLSTACK_LIMIT = 64 * 1024
FRAMES_LIMIT = 64  # a recursion has 1,000
FILE_LIMIT = 512
NAME_LIMIT = 128
SOURCE_LIMIT = 256


def record(error: BaseException, path: str) -> None:
    """Write the exception that ended the program, whole or not at all; nothing if the program chose to exit, or for Ctrl-C.

    Raises: any error of writing.
    """
    monotonic = time.monotonic()
    if isinstance(error, KeyboardInterrupt):
        return
    if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
        return
    # torch's, whose @record has written the file
    if type(error).__name__ == "ChildFailedError" and os.path.exists(path):
        return

    message = message_of(error)
    data = {
        "message": {
            "message": f"{type(error).__name__}: {message}",
            "extraInfo": {
                "py_callstack": callstack_of(error),
                "timestamp": str(int(time.time())),
                "ddplaunch": {
                    "type": type_of(error),
                    "message": message,
                    "monotonic": monotonic,
                    "frames": _frames(error),
                },
            },
        }
    }
    # A lone surrogate becomes an escape, which JSON understands; written so, no character takes more than six bytes.
    _write(path, json.dumps(data, ensure_ascii=False).encode("utf-8", "backslashreplace"))


def type_of(error: BaseException) -> str:
    """Return the exception's type as a traceback names it."""
    module, name = type(error).__module__, type(error).__qualname__
    return (name if module in ("builtins", "__main__", "__mp_main__") else f"{module}.{name}")[:FILE_LIMIT]


def message_of(error: BaseException) -> str:
    """Return the exception's text, without the middle of a very long one."""
    try:
        return _shorten(str(error), MESSAGE_LIMIT)
    except Exception:  # noqa: BLE001 - it is the program's code
        return "<exception str() failed>"  # as traceback writes it


def callstack_of(error: BaseException) -> str:
    """Return the traceback as the interpreter prints it."""
    if isinstance(error, SystemExit):
        text = f"{error.code}\n"
    else:
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return _shorten(text, CALLSTACK_LIMIT)


def _frames(error: BaseException) -> "list[dict[str, object]]":
    """Return the frames of the traceback for the error file, outermost first, without the middle ones of very many."""
    if isinstance(error, SyntaxError) and error.__traceback__ is None:
        return [_frame(error.filename or "", error.lineno or 0, "<module>", error.text or "")]
    entries: list[TracebackType] = []
    entry = error.__traceback__
    while entry is not None:
        entries.append(entry)
        entry = entry.tb_next
    if len(entries) > FRAMES_LIMIT:
        entries[FRAMES_LIMIT // 2 : -FRAMES_LIMIT // 2] = []
    frames = []
    for entry in entries:
        code, line = entry.tb_frame.f_code, entry.tb_lineno or 0
        source = linecache.getline(code.co_filename, line, entry.tb_frame.f_globals)
        frames.append(_frame(code.co_filename, line, code.co_name, source))
    return frames


def _frame(file: str, line: int, function: str, source: str) -> "dict[str, object]":
    return {
        "file": file[-FILE_LIMIT:],
        "line": line,
        "function": function[:NAME_LIMIT],
        "source": source.strip()[:SOURCE_LIMIT],
    }


def _shorten(text: str, limit: int) -> str:
    """Cut the middle out of what is longer than `limit` characters."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"


def _write(path: str, content: bytes) -> None:
    """Write a file whole or not at all: under another name first, then renamed."""
    temporary = f"{path}.{os.getpid()}"
    try:
        with open(temporary, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
