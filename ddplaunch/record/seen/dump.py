"""Reads the stacks that faulthandler writes: those of a process that was asked for them, and of one that a signal ended. Pure.

As CPython 3.8 to 3.15 write them (Python/traceback.c):

    Thread 0x00007f3b2c [name] (most recent call first):         the name since 3.14
      File "/home/me/train.py", line 88 in train_step
    Current thread 0x00007f3b2d (most recent call first):        the one that took the signal

Whatever else stands there is left out: the notes of a collection or of a frame that cannot be read, stacks of C. A thread of
compiled code that Python does not know, as that of NCCL's watchdog, is not in the list: if it took the signal, none is current.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from msgspec import Struct

from ddplaunch.record.seen import Thread
from ddplaunch.spec.outcome import Frame

# what explains nothing: the C++ stacks and places that torch adds to messages, and faulthandler's list of compiled modules
NOISE = re.compile(
    r"(?:\[rank\d+\]: ?)?(?:frame #\d+: |Exception raised from |Extension modules: |<omitting python frames>)"
)
FATAL = "Fatal Python error:"  # how the dump of a process begins that a signal ends
MOST_THREADS = 128  # faulthandler writes 100
MOST_FRAMES = 128  # of a thread; faulthandler writes 100
_WHOLE = 100  # frames from which on faulthandler leaves out the outermost
_LONGEST_NAME = 512  # characters of a path or a name; faulthandler writes 500
_THREAD = re.compile(r"(Current t|T)hread 0x[0-9a-f]{1,16}(?: \[([^]\n]{0,64})\])? \(most recent call first\):")
_FRAME = re.compile(r'  File (?:"(.{0,2048})"|\?\?\?), line (\d{1,9}|\?\?\?) in (.{1,2048})')
_LONGEST_LINE = 8192
_OF_DEBUGGER = tuple(f"/ddplaunch/worker/{name}.py" for name in ("signals", "debugger"))
# whose frames lie below the program's first one, or stand alone where it has none yet
_BOOTSTRAP = tuple(f"/ddplaunch/worker/{name}.py" for name in ("bootstrap", "lifecycle", "call"))
_ESCAPED = re.compile(r"\\x([89a-f][0-9a-f])|\\u([0-9a-f]{4})|\\U([0-9a-f]{8})")


class Crash(Struct, frozen=True, kw_only=True):
    """The stacks of a process that a signal ended, innermost frame first; empty: not known."""

    current: tuple[Frame, ...] = ()  # of the thread that took the signal
    main: tuple[Frame, ...] = ()  # of the main thread, if that is another one


class _Dumped(NamedTuple):
    """One thread of a dump."""

    took_signal: bool
    name: str  # "": not known
    frames: list[Frame]  # innermost first


def parse_dump(text: str) -> tuple[Thread, ...]:
    """Return the threads of a dump that a process was asked for.

    The main thread is the one that took the signal, else the last one.
    """
    threads = _threads(text)
    main = next((thread for thread in threads if thread.took_signal), threads[-1] if threads else None)
    return tuple(
        Thread(frames=of_program(thread.frames), name=thread.name, is_main=thread is main,
               at_exit=thread is main and _is_over(thread.frames))
        for thread in threads
    )  # fmt: skip


def parse_crash(text: str) -> Crash:
    """Return the stacks that were written to stderr as a signal ended the process; none if `text` has no such dump.

    The main thread is the one that runs our bootstrap, else the last one, unless the list was cut off before the end.
    """
    _, found, dump = text.rpartition(FATAL)
    threads = _threads(dump) if found else []
    current = next((thread.frames for thread in threads if thread.took_signal), [])
    of_bootstrap = (
        thread.frames for thread in threads if any(frame.file.endswith(_BOOTSTRAP) for frame in thread.frames)
    )
    is_cut_off = "\n...\n" in dump  # as faulthandler writes where there are too many threads
    last = threads[-1].frames if threads and not is_cut_off else []
    main = next(of_bootstrap, last)
    is_main_current = main is current  # its stack is told once
    return Crash(current=of_program(current), main=() if is_main_current else of_program(main))


def shortened(text: str, most: int) -> str:
    """Return the end of what a process wrote to stderr, in `most` characters or little more.

    What explains nothing goes first: stacks of C++, and those of the other threads and the list of modules of faulthandler,
    which can be longer than all that the process said before.
    """
    if len(text) <= most:
        return text
    crash = parse_crash(text)
    stacks = _as_dumped("Current thread", crash.current, most // 4) + _as_dumped("Thread", crash.main, most // 4)
    said = text
    if stacks:  # the dump is written again, with its first line and these stacks alone
        said, _, dump = text.rpartition(FATAL)
        signal = dump[:_LONGEST_NAME].partition("\n")[0]
        stacks = f"{FATAL}{signal}\n{stacks}"
    said = "".join(line for line in said.splitlines(keepends=True) if not NOISE.match(line))
    room = most - len(stacks)
    if len(said) > room:
        said = said[-room:].partition("\n")[2]
    return said + stacks


def _as_dumped(head: str, frames: tuple[Frame, ...], most: int) -> str:
    """Return a stack as faulthandler would write it, without its outermost frames if it is longer than `most` characters.

    "" if there is no frame, or no room for one.
    """
    text = "".join(f'  File "{frame.file}", line {frame.line} in {frame.function}\n' for frame in frames)
    whole = text[:most].rpartition("\n")[0]
    return f"\n{head} 0x0 (most recent call first):\n{whole}\n" if whole else ""


def _threads(text: str) -> list[_Dumped]:
    """Return the threads of a dump in its order: the main thread comes last. Of too many, the last ones are returned."""
    threads: list[_Dumped] = []
    for line in text.split("\n"):
        if len(line) > _LONGEST_LINE:
            continue
        if (head := _THREAD.fullmatch(line)) is not None:
            # "Current thread 0x..." is the one that took the signal, others are "Thread 0x..."
            is_current = head[1] == "Current t"
            threads.append(_Dumped(took_signal=is_current, name=head[2] or "", frames=[]))
            del threads[:-MOST_THREADS]
        elif threads and (found := _FRAME.fullmatch(line)) is not None and len(threads[-1].frames) < MOST_FRAMES:
            threads[-1].frames.append(_frame(found))
    return threads


def _is_over(frames: Sequence[Frame]) -> bool:
    """Whether none of these frames is that of the bootstrap, which lies below all that a script does.

    Of a very deep stack the outermost frames are not in the list.
    """
    return 0 < len(frames) < _WHOLE and not any(frame.file.endswith(_BOOTSTRAP) for frame in frames)


def of_program(frames: list[Frame]) -> tuple[Frame, ...]:
    """Leave out the frames of ours below the program's first one, and those of a debugger of ours, which holds its last one."""
    held = max((at for at, frame in enumerate(frames, 1) if frame.file.endswith(_OF_DEBUGGER)), default=0)
    return tuple(frame for frame in frames[held:] if not frame.file.endswith(_BOOTSTRAP))


def _frame(found: re.Match[str]) -> Frame:
    file, line, function = found.groups()
    number = int(line) if line != "???" else 0
    return Frame(
        file=_unescaped(file or "???")[-_LONGEST_NAME:], line=number, function=_unescaped(function)[:_LONGEST_NAME]
    )


def _unescaped(text: str) -> str:
    """Return the letters that faulthandler writes as escapes, since it writes ASCII only."""
    return _ESCAPED.sub(_letter, text) if "\\" in text else text


def _letter(found: re.Match[str]) -> str:
    code = int(found[found.lastindex or 0], 16)
    return chr(code) if code <= 0x10FFFF and not 0xD800 <= code <= 0xDFFF else "\N{REPLACEMENT CHARACTER}"
