"""Tracebacks of KeyboardInterrupt: the first becomes a line, the others go; all else stays."""

import pytest

from ddplaunch.output.display import Display
from ddplaunch.output.interrupts import Interrupts
from ddplaunch.output.streams import ShownWorker, Stream

INTERRUPTED = b"""\
Traceback (most recent call last):
  File "/home/ann/train.py", line 7, in step
    loss.backward()
    ^^^^^^^^^^^^^^^
  File "/usr/lib/python3.11/selectors.py", line 5, in select
KeyboardInterrupt
"""
OTHER = INTERRUPTED.replace(b"KeyboardInterrupt", b"ValueError: KeyboardInterrupt")
CHAIN = b"\nDuring handling of the above exception, another exception occurred:\n\n"
LINE = b"KeyboardInterrupt at /home/ann/train.py:7 in step\n"

SHOWN = {
    "one": (INTERRUPTED, LINE),
    "lines before and after it": (b"a\n" + INTERRUPTED + b"b\n\n", b"a\n" + LINE + b"b\n\n"),
    "two in a row, of a worker and a child of its": (INTERRUPTED + INTERRUPTED, LINE),
    "another exception": (OTHER + b"more of it\n", OTHER + b"more of it\n"),
    "another one that was handled as it came": (OTHER + CHAIN + INTERRUPTED, LINE),
    "another one while it was handled": (INTERRUPTED + CHAIN + OTHER, INTERRUPTED + CHAIN + OTHER),
    "another one after it": (INTERRUPTED + OTHER, LINE + OTHER),
    "one that was cut off": (INTERRUPTED[:60], INTERRUPTED[:60]),
    "with a message": (INTERRUPTED[:-1] + b": stop\n", LINE),
}


@pytest.mark.parametrize("size", [1, 7, 4096])
@pytest.mark.parametrize("case", SHOWN)
def test_what_is_shown(case: str, size: int) -> None:
    """However many lines come at a time."""
    text, expected = SHOWN[case]
    folded, shown = Interrupts(), b""
    lines = text.splitlines(keepends=True)
    for at in range(0, len(lines), size):
        shown += folded.feed(0, b"".join(lines[at : at + size]))
    assert shown + folded.end(0) == expected


def test_a_traceback_without_end_is_shown() -> None:
    folded = Interrupts()
    endless = INTERRUPTED[:-18] + b"  File\n" * 2000
    assert folded.feed(0, endless) + folded.end(0) == endless


def test_of_several_workers_the_first_is_shown_and_only_after_ctrl_c() -> None:
    display = Display(mode="prefix", ranks=[ShownWorker(rank=rank, local_rank=rank) for rank in range(2)])
    before = display.feed(0, Stream.ERR, INTERRUPTED, 0.0)
    assert b"[0] Traceback" in before[0][1]
    display.interrupted()
    chunks = []
    for rank in (1, 0):
        chunks += display.feed(rank, Stream.ERR, INTERRUPTED, 0.0)
        chunks += display.end(rank, Stream.ERR, 0.0)
    assert chunks == [(Stream.ERR, b"[1] " + LINE)]
