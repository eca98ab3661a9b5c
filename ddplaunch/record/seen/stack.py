"""Frames of Python stacks: found in text, classified (user's code, library), written short. Pure; opens no file.

The stack of a worker whose script has ended says what Python still does there.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from ddplaunch.record.seen import Thread
from ddplaunch.spec.outcome import Frame, WorkerError

# installed packages, ours in a clone, the standard library, and what has no file: <frozen runpy>, <string>
_LIBRARY = re.compile(
    r"^<|.*/(?:site|dist)-packages/|.*/ddplaunch/worker/[^/]+$|.*/lib(?:64)?/python\d+(?:\.\d+)?t?/|.*/python\d+\.zip/"
)
# of what runs in the program's thread while pdb stops it: the line that it stopped at is the one to look at
_DEBUGGER = re.compile(r".*/python\d+[^/]*/(?:bdb|pdb|cmd)\.py")
_TRACEBACK_FRAME = r'^ *File "([^"]+)", line (\d+), in (.+)(?:\n {4,}(?!File ")(\S.*))?'


def frames_of(error: WorkerError) -> tuple[Frame, ...]:
    """Return the frames of an error, outermost first, from its traceback's text if that is all there is."""
    if error.frames:
        return error.frames
    # of a chain of exceptions the last one is what ended the worker
    last = error.traceback.rpartition("Traceback (most recent call last):")[2]
    return tuple(
        Frame(file=file, line=int(line), function=function, source=source)
        for file, line, function, source in re.findall(_TRACEBACK_FRAME, last, re.MULTILINE)
    )


def syntax_error_lines(traceback: str) -> list[str]:
    """Return where a SyntaxError points to: the file and line, then the source and the caret as Python printed both."""
    _, found, block = f"\n{traceback}".rpartition('\n  File "')
    if not found:
        return []
    where, *source = block.splitlines()
    file, _, line = where.partition('", line ')
    return [f"{file}:{line}", *(text.removeprefix("  ") for text in source if text.startswith("    "))]


def source_lines(error: WorkerError, frame: Frame) -> list[str]:
    """Return the line of code of a frame, and the pointer that Python may have printed below the line."""
    if not frame.source:
        return []
    file, source = re.escape(frame.file), re.escape(frame.source)
    found = re.findall(
        rf'^ *File "{file}", line {frame.line}, in .+\n( *){source}\n\1( *[~^]+)$', error.traceback, re.MULTILINE
    )
    return [frame.source, found[-1][1]] if found else [frame.source]


def is_library(frame: Frame) -> bool:
    """Return whether a frame is of an installed package or the standard library, not of the user's own code."""
    return _LIBRARY.match(frame.file) is not None


def relevant_frames(frames: Sequence[Frame]) -> tuple[Frame | None, Frame | None]:
    """Return the innermost frame of the user's code, and the innermost frame of all: None for it if both are the same."""
    own = next((frame for frame in reversed(frames) if not is_library(frame)), None)
    # <frozen importlib._bootstrap> and <string> have no source to look at
    shown = (frame for frame in reversed(frames) if not frame.file.startswith("<") and not _DEBUGGER.match(frame.file))
    inner = next(shown, own)
    return own, None if inner is own else inner


def location(frame: Frame, cwd: str) -> str:
    """Return where a frame is: "train.py:88 in train_step"; the module's own level has no name."""
    where = f"{short(frame.file, cwd)}:{frame.line}"
    return where if frame.function == "<module>" else f"{where} in {frame.function}"


def short(path: str, cwd: str) -> str:
    """Return a short path: relative to `cwd` if the path lies below, of a library from the name of the package on."""
    library = _LIBRARY.match(path)
    if library and not path.startswith("<"):
        return path[library.end() :]
    root = cwd.rstrip("/")
    return path.removeprefix(f"{root}/") if root else path


# --- a worker whose script has ended: Python waits there for threads and child processes, and runs `atexit`


_MOST_THREADS = 3  # threads that are named
ENDED = "its script has ended, and Python "  # how the sentences begin


def exit_state(threads: Sequence[Thread], cwd: str) -> str:
    """Return the state of a worker whose script has ended, "" while the script runs.

    For example "its script has ended, and Python waits for a thread: train.py:3 in upload". Python does not wait for daemon
    threads, but a stack does not say which threads are daemons: those in the program's own code are named first.
    """
    main = next((thread for thread in threads if thread.at_exit), None)
    if main is None:
        return ""
    outermost = main.frames[-1]  # with which Python began what it still does
    if outermost.function == "_shutdown" and outermost.file.endswith("/threading.py"):
        locations = _locations([thread for thread in threads if not thread.is_main], cwd)
        named = f": {', '.join(locations[:_MOST_THREADS])}" if locations else ""
        return f"{ENDED}waits for {'a thread' if len(locations) < 2 else 'threads'}{named}"
    if outermost.function == "_exit_function" and outermost.file.endswith("/multiprocessing/util.py"):
        return f"{ENDED}waits for its child processes"
    return f"{ENDED}runs a function that was registered for its exit: {location(_most_telling(main.frames), cwd)}"


def _locations(threads: Sequence[Thread], cwd: str) -> list[str]:
    """Return where threads are, each location once: those in the program's own code, else those in libraries."""
    frames = [_most_telling(thread.frames) for thread in threads if thread.frames]
    own = [frame for frame in frames if not is_library(frame)]
    return list(dict.fromkeys(location(frame, cwd) for frame in own or frames))


def _most_telling(frames: Sequence[Frame]) -> Frame:
    """Return the innermost frame of the program's own code, else the innermost frame of all."""
    return next((frame for frame in frames if not is_library(frame)), frames[0])
