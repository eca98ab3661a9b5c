"""Frames of Python stacks: found in text, classified (user's code, library), written short. Pure; opens no file."""

from __future__ import annotations

import re
from collections.abc import Sequence

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
    """Find where a SyntaxError points to: the file and line, the source and the caret as Python printed them."""
    _, found, block = f"\n{traceback}".rpartition('\n  File "')
    if not found:
        return []
    where, *source = block.splitlines()
    file, _, line = where.partition('", line ')
    return [f"{file}:{line}", *(text.removeprefix("  ") for text in source if text.startswith("    "))]


def source_lines(error: WorkerError, frame: Frame) -> list[str]:
    """Return the line of code of a frame, and below it the pointer to what failed in it, if Python printed one."""
    if not frame.source:
        return []
    file, source = re.escape(frame.file), re.escape(frame.source)
    found = re.findall(
        rf'^ *File "{file}", line {frame.line}, in .+\n( *){source}\n\1( *[~^]+)$', error.traceback, re.MULTILINE
    )
    return [frame.source, found[-1][1]] if found else [frame.source]


def is_library(frame: Frame) -> bool:
    """Whether a frame is of an installed package or the standard library, not of the user's own code."""
    return _LIBRARY.match(frame.file) is not None


def relevant_frames(frames: Sequence[Frame]) -> tuple[Frame | None, Frame | None]:
    """Pick the innermost frame of the user's code, and the innermost of all where that is another one."""
    own = next((frame for frame in reversed(frames) if not is_library(frame)), None)
    # <frozen importlib._bootstrap> and <string> have no source to look at
    shown = (frame for frame in reversed(frames) if not frame.file.startswith("<") and not _DEBUGGER.match(frame.file))
    inner = next(shown, own)
    return own, None if inner is own else inner


def location(frame: Frame, cwd: str) -> str:
    """Write where a frame is: "train.py:88 in train_step"; the module's own level has no name."""
    where = f"{short(frame.file, cwd)}:{frame.line}"
    return where if frame.function == "<module>" else f"{where} in {frame.function}"


def short(path: str, cwd: str) -> str:
    """Shorten a path: relative to `cwd` if it lies below, a library's from the package's name on."""
    library = _LIBRARY.match(path)
    if library and not path.startswith("<"):
        return path[library.end() :]
    root = cwd.rstrip("/")
    return path.removeprefix(f"{root}/") if root else path
