"""Tracebacks of Ctrl-C, and those that follow from another failure, become a line; all else stays."""

from math import inf
from typing import NamedTuple

import pytest

from ddplaunch.launcher.output.display import Display
from ddplaunch.launcher.output.tracebacks import HELD_FOR, SETTLED_AFTER, Tracebacks
from ddplaunch.system.console.streams import BOTH, Chunks, Screen, Stream
from tests.unit.builders import shown_workers

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
    "lines before and after it": (b"a\n" + INTERRUPTED + b"b\n\n", b"a\nb\n\n" + LINE),
    "two in a row, of a worker and a child of its": (INTERRUPTED + INTERRUPTED, LINE),
    "another exception": (OTHER + b"more of it\n", OTHER + b"more of it\n"),
    "another one that was handled as it came": (OTHER + CHAIN + INTERRUPTED, LINE),
    "another one while it was handled": (INTERRUPTED + CHAIN + OTHER, INTERRUPTED + CHAIN + OTHER),
    "another one after it": (INTERRUPTED + OTHER, OTHER + LINE),
    "one that was cut off": (INTERRUPTED[:60], INTERRUPTED[:60]),
    "with a message": (INTERRUPTED[:-1] + b": stop\n", LINE),
}


def whole(tracebacks: Tracebacks, rank: int = 0) -> bytes:
    """Return what is left of a rank that ends."""
    return tracebacks.end_stream(rank, 0.0) + b"".join(block for _, block in tracebacks.flush(inf))


@pytest.mark.parametrize("size", [1, 7, 4096])
@pytest.mark.parametrize("case", SHOWN)
def test_what_is_shown_after_ctrl_c(case: str, size: int) -> None:
    """However many lines come at a time."""
    text, expected = SHOWN[case]
    tracebacks, shown = Tracebacks(), b""
    tracebacks.note_interrupt()
    lines = text.splitlines(keepends=True)
    for at in range(0, len(lines), size):
        shown += tracebacks.feed(0, b"".join(lines[at : at + size]), 0.0)
    assert shown + whole(tracebacks) == expected


def test_a_traceback_without_end_is_shown() -> None:
    tracebacks = Tracebacks()
    tracebacks.note_interrupt()
    endless = INTERRUPTED[:-18] + b"  File\n" * 2000
    assert tracebacks.feed(0, endless, 0.0) + whole(tracebacks) == endless


def test_one_that_stops_in_the_middle_is_shown_soon() -> None:
    tracebacks = Tracebacks()
    tracebacks.note_interrupt()
    assert tracebacks.feed(0, INTERRUPTED[:60], 5.0) == b""
    assert tracebacks.deadline == 5.0 + SETTLED_AFTER
    assert tracebacks.flush(5.0 + SETTLED_AFTER) == [((0,), INTERRUPTED[:60])]
    assert tracebacks.deadline is None


def test_of_several_workers_one_line_names_all_and_only_after_ctrl_c() -> None:
    display = Display(mode="prefix", ranks=shown_workers(*range(3)))
    before = display.feed(0, Stream.ERR, INTERRUPTED, 0.0)
    assert b"[0] Traceback" in before[0][1]
    display.note_interrupt()
    chunks: Chunks = []
    for rank in (1, 0, 2):
        chunks += display.feed(rank, Stream.ERR, INTERRUPTED, 0.0)
    for rank in (1, 0, 2):
        chunks += display.end_stream(rank, Stream.ERR, 0.0)
    assert chunks == []
    chunks += display.release(0.0)
    assert chunks == [(Stream.ERR, b"[0-2] " + LINE)]


# --- failures that follow from another

LOST = b"""\
Traceback (most recent call last):
  File "/home/ann/train.py", line 9, in step
    dist.all_reduce(t)
  File "/v/site-packages/torch/distributed/distributed_c10d.py", line 3252, in all_reduce
    work.wait()
RuntimeError: [/__w/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:10644. This is
"""
NCCL = LOST.replace(b"RuntimeError: [/__w/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer",
                    b"torch.distributed.DistBackendError: Failed to recv, got 0 bytes") + (
    b"Exception raised from recvBytes at socket.cpp:670 (most recent call first):\nframe #0: c10::Error()\n"
)  # fmt: skip
WHERE = b" at /home/ann/train.py:9 in step   (-v shows the traceback)\n"
FOLDED = b"RuntimeError: Connection closed by peer [127.0.0.1]:10644," + WHERE
FOLDED_OF_SEVERAL = b"RuntimeError: Connection closed by peer," + WHERE


def following() -> Tracebacks:
    return Tracebacks(folds_consequences=True)


def test_one_that_follows_becomes_a_line_once_its_cause_is_known() -> None:
    tracebacks = following()
    tracebacks.note_failed({0})
    assert tracebacks.feed(1, b"a\n" + LOST, 1.0) == b"a\n"
    assert tracebacks.end_stream(1, 1.0) == b""
    tracebacks.note_failed({1})
    assert tracebacks.flush(1.0 + SETTLED_AFTER) == [((1,), FOLDED)]
    assert tracebacks.deadline is None


def test_equal_ones_are_one_line_with_their_ranks_whatever_their_ports() -> None:
    tracebacks = following()
    for rank in (3, 1, 2):
        at = 1.0 + rank / 100
        assert tracebacks.feed(rank, LOST.replace(b"10644", b"%d" % rank), at) + tracebacks.end_stream(rank, at) == b""
    tracebacks.note_failed({0, 1, 2, 3})
    assert tracebacks.flush(1.0 + SETTLED_AFTER) == []
    assert tracebacks.flush(1.01 + SETTLED_AFTER) == [((1, 2, 3), FOLDED_OF_SEVERAL)]


def test_what_torch_adds_in_c_goes_with_it_and_what_comes_later_stays() -> None:
    tracebacks = following()
    tracebacks.note_failed({0, 1})
    shown = (
        tracebacks.feed(1, NCCL + b"saved\n", 1.0) + tracebacks.feed(1, b"bye\n", 1.1) + tracebacks.end_stream(1, 1.1)
    )
    assert shown == b""
    (_, later), (_, line) = tracebacks.flush(inf)
    assert later == b"saved\nbye\n"
    assert line.startswith(b"torch.distributed.DistBackendError: Failed to recv, got 0 bytes")
    assert b"frame" not in line


def test_an_error_of_its_own_is_shown_at_once_whoever_has_failed() -> None:
    tracebacks = following()
    tracebacks.note_failed({0, 1})
    assert tracebacks.feed(1, OTHER, 1.0) + tracebacks.end_stream(1, 1.0) == OTHER
    assert tracebacks.deadline is None


def test_a_first_failure_that_looks_as_if_it_followed_is_shown_whole_and_others_fold() -> None:
    """A peer that has ended with 0 leaves no other cause."""
    tracebacks = following()
    for rank in (1, 2):
        tracebacks.feed(rank, LOST, float(rank) / 10)
        tracebacks.end_stream(rank, float(rank) / 10)
    tracebacks.note_failed({1, 2})
    assert tracebacks.flush(HELD_FOR) == []
    assert tracebacks.flush(0.1 + HELD_FOR) == [((1,), LOST), ((2,), FOLDED)]


def test_one_that_ends_no_worker_is_shown() -> None:
    tracebacks = following()
    tracebacks.note_failed({0})
    assert tracebacks.feed(1, LOST + b"tried again\n", 1.0) == b""
    assert tracebacks.deadline == 1.0 + HELD_FOR
    assert tracebacks.flush(1.0 + HELD_FOR) == [((1,), LOST + b"tried again\n")]


def test_the_cause_may_be_on_another_node() -> None:
    tracebacks = following()
    tracebacks.feed(1, LOST, 1.0)
    tracebacks.end_stream(1, 1.0)
    tracebacks.note_failed({1})
    assert tracebacks.flush(1.0 + SETTLED_AFTER) == []
    tracebacks.note_failed(elsewhere=True)
    assert tracebacks.deadline == 1.0 + SETTLED_AFTER
    assert tracebacks.flush(1.0 + SETTLED_AFTER) == [((1,), FOLDED)]


def test_the_next_generation_has_no_failure_yet() -> None:
    tracebacks = following()
    tracebacks.note_failed({0})
    tracebacks.restart()
    tracebacks.feed(1, LOST, 1.0)
    tracebacks.note_failed({1})
    assert tracebacks.flush(1.0 + SETTLED_AFTER + SETTLED_AFTER) == []


@pytest.mark.parametrize(
    ("terminal", "mode", "folds"), [(BOTH, "prefix", True), (frozenset(), "prefix", False), (BOTH, "raw", False)]
)
def test_they_are_folded_on_a_terminal(terminal: frozenset[Stream], mode: str, folds: bool) -> None:
    workers = shown_workers(0, 1)
    display = Display(mode=mode, ranks=workers, screen=Screen(terminals=terminal), folds_tracebacks=True)
    display.note_failed({0, 1})
    chunks = [*display.feed(1, Stream.ERR, LOST, 0.0), *display.end_stream(1, Stream.ERR, 0.0), *display.release(0.0)]
    assert chunks == ([(Stream.ERR, b"[1] " + FOLDED)] if folds else chunks)
    assert (b"all_reduce" in chunks[0][1]) is not folds


# --- the same error of several ranks

SAME = OTHER.replace(b"KeyboardInterrupt", b"batch of rank 0")
LINE_OF_SAME = b"ValueError: batch of rank 1, at /home/ann/train.py:7 in step   (-v shows the traceback)\n"


def test_an_error_that_another_rank_has_shown_becomes_one_line_with_the_other_ranks() -> None:
    tracebacks, shown = Tracebacks(folds_equal=True), b""
    for rank in range(8):
        shown += tracebacks.feed(rank, SAME.replace(b"rank 0", b"rank %d" % rank), 1.0) + tracebacks.end_stream(
            rank, 1.0
        )
    assert shown == SAME
    assert tracebacks.flush(1.0 + SETTLED_AFTER) == [((1, 2, 3, 4, 5, 6, 7), LINE_OF_SAME)]
    assert tracebacks.deadline is None


@pytest.mark.parametrize(
    "other",
    [SAME.replace(b"line 7", b"line 8"), SAME.replace(b"batch", b"size"), OTHER],
    ids=["place", "words", "error"],
)
def test_another_error_is_shown_whole(other: bytes) -> None:
    tracebacks = Tracebacks(folds_equal=True)
    assert tracebacks.feed(0, SAME, 1.0) + tracebacks.end_stream(0, 1.0) == SAME
    assert tracebacks.feed(1, other, 1.0) + tracebacks.end_stream(1, 1.0) == other


def test_an_error_that_a_rank_prints_again_is_shown_again_and_so_is_that_of_the_next_generation() -> None:
    tracebacks = Tracebacks(folds_equal=True)
    for _ in range(2):
        assert tracebacks.feed(0, SAME, 1.0) + tracebacks.end_stream(0, 1.0) == SAME
    tracebacks.restart()
    assert tracebacks.feed(1, SAME, 1.0) + tracebacks.end_stream(1, 1.0) == SAME


class Logs(NamedTuple):
    logs_have_all: bool


@pytest.mark.parametrize(("is_kept", "mode"), [(True, "prefix"), (False, "prefix"), (True, "raw")])
def test_equal_errors_and_the_list_of_modules_are_left_out_where_the_logs_have_them(is_kept: bool, mode: str) -> None:
    display = Display(mode=mode, ranks=shown_workers(0, 1), folds_tracebacks=True)
    display.logs = Logs(logs_have_all=is_kept)
    chunks: Chunks = []
    for rank in range(2):
        chunks += display.feed(rank, Stream.ERR, SAME + b"Extension modules: numpy (total: 1)\n", 0.0)
        chunks += display.end_stream(rank, Stream.ERR, 0.0)
    shown = b"".join(block for _, block in [*chunks, *display.release(0.0)])
    number = 1 if is_kept and mode == "prefix" else 2
    assert (shown.count(b"Traceback"), shown.count(b"Extension")) == (number, 0 if number == 1 else 2)
