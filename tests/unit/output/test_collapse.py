"""Equal lines of several ranks."""

import time
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from ddplaunch.launcher.output.collapse import MAX_HELD, WAIT, Collapse, Group
from ddplaunch.system.console.streams import Stream

OUT, ERR = Stream.OUT, Stream.ERR


def collapse(ranks: int) -> Collapse:
    return Collapse((rank, stream) for rank in range(ranks) for stream in Stream)


def lines_of(groups: list[Group], rank: int, stream: Stream) -> list[bytes]:
    return [line for to, ranks, block in groups if to is stream and rank in ranks for line in block.split(b"\n")[:-1]]


steps = st.lists(
    st.tuples(
        st.integers(0, 2),  # rank
        st.sampled_from([OUT, OUT, ERR]),
        st.lists(st.sampled_from([b"", b"a", b"b", b"c"]), min_size=1, max_size=4),
        st.sampled_from([0.0, 0.1, 0.3]),  # seconds since the last one
        st.sampled_from([False, False, False, True]),  # the stream ends after it
    ),
    max_size=20,
)


@given(steps)
def test_no_rank_loses_gains_or_swaps_a_line(history):
    lines, shown, at = collapse(3), [], 0.0
    written: dict[tuple[int, Stream], list[bytes]] = {(rank, stream): [] for rank in range(3) for stream in Stream}
    for rank, stream, wrote, pause, ends in history:
        at += pause
        written[rank, stream] += wrote
        shown += lines.feed(rank, stream, b"".join(line + b"\n" for line in wrote), at)
        if ends:
            shown += lines.end_stream(rank, stream, at)
        deadline = lines.deadline
        assert deadline is None or at < deadline <= at + WAIT
    shown += lines.flush(at + WAIT)
    assert lines.deadline is None
    assert {writer: lines_of(shown, *writer) for writer in written} == written


@given(st.permutations([0, 0, 1, 1, 2, 2]))
def test_lines_that_all_ranks_write_in_one_order_are_shown_once(turns: list[int]) -> None:
    lines, shown, wrote = collapse(3), [], Counter[int]()
    for rank in turns:
        shown += lines.feed(rank, OUT, (b"first\n", b"second\n")[wrote[rank]], 0.0)
        wrote[rank] += 1
    assert b"".join(block for _, _, block in shown) == b"first\nsecond\n"
    assert {ranks for _, ranks, _ in shown} == {(0, 1, 2)}


def test_a_line_that_a_rank_wrote_twice_stays_twice() -> None:
    lines = collapse(2)
    assert lines.feed(0, OUT, b"a\na\n", 0.0) == []
    assert lines.feed(1, OUT, b"a\n", 0.0) == [(OUT, (0, 1), b"a\n")]
    assert lines.flush(WAIT) == [(OUT, (0,), b"a\n")]


def test_lines_are_shown_in_the_order_of_their_first_appearance() -> None:
    lines = collapse(2)
    lines.feed(0, OUT, b"a\n", 0.0)
    lines.feed(1, ERR, b"b\n", 0.1)
    lines.feed(0, ERR, b"b\n", 0.1)
    assert lines.flush(WAIT) == [(OUT, (0,), b"a\n"), (ERR, (0, 1), b"b\n")]


def test_a_rank_that_is_past_a_line_is_not_waited_for() -> None:
    lines = collapse(2)
    assert lines.feed(0, OUT, b"only 0\nboth\n", 0.0) == []
    assert lines.feed(1, OUT, b"both\n", 0.0) == [(OUT, (0,), b"only 0\n"), (OUT, (0, 1), b"both\n")]


def test_a_rank_that_ended_is_waited_for_again_when_all_have_ended_and_start_anew() -> None:
    lines = Collapse([(0, OUT), (1, OUT)])
    lines.end_stream(0, OUT, 0.0)
    assert lines.feed(1, OUT, b"a\n", 0.0) == [(OUT, (1,), b"a\n")]
    lines.end_stream(1, OUT, 0.0)
    assert lines.feed(1, OUT, b"a\n", 1.0) == []
    assert lines.feed(0, OUT, b"a\n", 1.0) == [(OUT, (0, 1), b"a\n")]


def test_what_waits_is_bounded() -> None:
    lines = collapse(2)
    line = b"x" * 2**20 + b"\n"
    shown = [group for number in range(40) for group in lines.feed(0, OUT, b"%d" % number + line, 0.0)]
    assert 40 * len(line) - sum(len(block) for _, _, block in shown) <= MAX_HELD + len(line)


def test_many_equal_lines_take_no_time_each() -> None:
    """20,000 empty lines of one rank, joined one by one: seconds if each searched the queue from its start."""
    lines = collapse(2)
    lines.feed(0, OUT, b"\n" * 20_000, 0.0)
    began = time.process_time()
    shown = [group for _ in range(20_000) for group in lines.feed(1, OUT, b"\n", 0.0)]
    assert time.process_time() - began < 2
    assert lines_of(shown, 0, OUT) == lines_of(shown, 1, OUT) == [b""] * 20_000
