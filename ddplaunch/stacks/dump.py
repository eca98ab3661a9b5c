"""Reads the stacks that faulthandler writes, as CPython 3.8 to 3.15 do (Python/traceback.c). Pure; trusts none of the text.

    Thread 0x00007f3b2c [name] (most recent call first):         the name since 3.14
      File "/home/me/train.py", line 88 in train_step
    Current thread 0x00007f3b2d (most recent call first):        the one that took the signal

Whatever else stands there is left out: the notes of a collection or of a frame that cannot be read, stacks of C.
"""

from __future__ import annotations

import re

from ddplaunch.stacks import Thread
from ddplaunch.supervise.outcome import Frame

MOST_THREADS = 128  # faulthandler writes 100
MOST_FRAMES = 128  # of a thread; faulthandler writes 100
_LONGEST = 512  # characters of a path or a name; faulthandler writes 500
_THREAD = re.compile(r"(Current t|T)hread 0x[0-9a-f]{1,16}(?: \[([^]\n]{0,64})\])? \(most recent call first\):")
_FRAME = re.compile(r'  File (?:"(.{0,2048})"|\?\?\?), line (\d{1,9}|\?\?\?) in (.{1,2048})')
_LONGEST_LINE = 8192
_OF_DEBUGGER = tuple(f"/ddplaunch/worker/{name}.py" for name in ("signals", "debugger", "prompt"))
# below the program's first frame, or where it has none yet
_BELOW = ("/ddplaunch/worker/bootstrap.py", "/ddplaunch/worker/lifecycle.py")
_ESCAPED = re.compile(r"\\x([89a-f][0-9a-f])|\\u([0-9a-f]{4})|\\U([0-9a-f]{8})")


def parse(text: str) -> tuple[Thread, ...]:
    """Return the threads of a dump, the main one marked: that which took the signal, as the kernel prefers, else the last."""
    threads: list[tuple[bool, str, list[Frame]]] = []
    for line in text.split("\n"):
        if len(line) > _LONGEST_LINE:
            continue
        if (head := _THREAD.fullmatch(line)) is not None:
            if len(threads) == MOST_THREADS:
                del threads[0]  # the main thread comes last
            threads.append((head[1] == "Current t", head[2] or "", []))
        elif threads and (found := _FRAME.fullmatch(line)) is not None and len(threads[-1][2]) < MOST_FRAMES:
            threads[-1][2].append(_frame(found))
    main = next((place for place, (current, _, _) in enumerate(threads) if current), len(threads) - 1)
    return tuple(
        Thread(frames=of_program(frames), name=name, is_main=place == main)
        for place, (_, name, frames) in enumerate(threads)
    )


def of_program(frames: list[Frame]) -> tuple[Frame, ...]:
    """Leave out the frames of ours below the program's first one, and those of a debugger of ours, which holds its last one."""
    held = max((at for at, frame in enumerate(frames, 1) if frame.file.endswith(_OF_DEBUGGER)), default=0)
    return tuple(frame for frame in frames[held:] if not frame.file.endswith(_BELOW))


def _frame(found: re.Match[str]) -> Frame:
    file, line, function = found.groups()
    number = int(line) if line != "???" else 0
    return Frame(file=_unescaped(file or "???")[-_LONGEST:], line=number, function=_unescaped(function)[:_LONGEST])


def _unescaped(text: str) -> str:
    """Return the letters that faulthandler writes as escapes, since it writes ASCII only."""
    return _ESCAPED.sub(_letter, text) if "\\" in text else text


def _letter(found: re.Match[str]) -> str:
    code = int(found[found.lastindex or 0], 16)
    return chr(code) if code <= 0x10FFFF and not 0xD800 <= code <= 0xDFFF else "\N{REPLACEMENT CHARACTER}"
