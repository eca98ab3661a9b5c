"""The console's side of the pipes: which bytes of which worker are shown, when, and as whose."""

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplaunch.launcher.output.display import Display
from ddplaunch.system.console.streams import BOTH, Chunks, Screen, Stream
from tests.unit.builders import shown_workers as workers

OUT, ERR = Stream.OUT, Stream.ERR


def text(chunks: Iterable[tuple[Stream, bytes]], stream: Stream = OUT) -> bytes:
    return b"".join(data for to, data in chunks if to is stream)


def everything(display: Display, outputs: dict[int, bytes], size: int) -> bytes:
    """Feed all outputs in turns, in pieces of this size, then end them."""
    chunks: Chunks = []
    for start in range(0, max(map(len, outputs.values()), default=0), size):
        for rank, output in outputs.items():
            chunks += display.feed(rank, OUT, output[start : start + size], 0.0)
    for rank in outputs:
        chunks += display.end_stream(rank, OUT, 0.0)
    return text(chunks)


def plain_lines() -> st.SearchStrategy[list[bytes]]:
    line = st.binary(max_size=12).map(lambda data: data.translate(None, b"\n\r\x1b"))
    return st.lists(line, max_size=12)


# --- whole lines, with prefixes


@given(
    written=st.lists(plain_lines(), min_size=2, max_size=4),
    last_newline=st.booleans(),
    size=st.sampled_from([1, 7, 4096]),
    mode=st.sampled_from(["prefix", "raw"]),
)
def test_every_line_is_shown_once_whole_and_in_order_however_the_pipe_cut_it(written, last_newline, size, mode):
    display = Display(mode=mode, ranks=workers(*range(len(written))))
    outputs = {rank: b"".join(line + b"\n" for line in lines) for rank, lines in enumerate(written)}
    if not last_newline:
        outputs = {rank: output.removesuffix(b"\n") for rank, output in outputs.items()}
        written = [lines[:-1] if lines and not lines[-1] else lines for lines in written]

    shown = everything(display, outputs, size).split(b"\n")

    assert shown.pop() == b""
    if mode == "raw":
        assert sorted(shown) == sorted(line for lines in written for line in lines)
    else:
        for rank, lines in enumerate(written):
            before = b"[%d] " % rank
            assert [line.removeprefix(before) for line in shown if line.startswith(before)] == lines


@given(
    output=st.lists(
        st.sampled_from([b"a", b"\xff", b"\r", b"\n", b"\r\n", b"\x1b[A", b"\x1b[31m", b"\x1b[2K"]), max_size=30
    )
)
def test_the_same_is_shown_of_bars_and_colours_however_the_pipe_cut_them(output: list[bytes]) -> None:
    data = b"".join(output)
    for ranks in workers(0, 1), workers(0):
        shown = {
            everything(Display(mode="prefix", ranks=ranks, screen=Screen(colour=BOTH)), {0: data}, size)
            for size in (1, 2, 7, 4096)
        }
        assert len(shown) == 1


def test_lines_of_two_writers_of_single_characters_are_not_torn() -> None:
    display = Display(mode="prefix", ranks=workers(0, 1))
    assert everything(display, {0: b"abc\n", 1: b"xyz\n"}, 1) == b"[0] abc\n[1] xyz\n"


def test_an_incomplete_line_waits_for_its_newline() -> None:
    display = Display(mode="prefix", ranks=workers(0, 1))
    assert display.feed(0, OUT, b"your na", 0.0) == []
    assert display.feed(0, OUT, b"me? ", 0.0) == []
    assert display.deadline() is None
    assert display.feed(0, OUT, b"\n", 0.0) == [(OUT, b"[0] your name? \n")]


def test_the_last_line_is_shown_without_its_newline_too() -> None:
    display = Display(mode="prefix", ranks=workers(0, 1))
    assert display.feed(1, ERR, b"killed", 0.0) == []
    assert display.end_stream(1, ERR, 0.0) == [(ERR, b"[1] killed\n")]
    assert display.end_stream(0, ERR, 0.0) == []


def test_stdout_goes_to_stdout_and_stderr_to_stderr() -> None:
    display = Display(mode="prefix", ranks=workers(0, 1))
    assert display.feed(0, OUT, b"a\n", 0.0) == [(OUT, b"[0] a\n")]
    assert display.feed(0, ERR, b"b\n", 0.0) == [(ERR, b"[0] b\n")]


def test_bytes_that_are_no_text_pass() -> None:
    display = Display(mode="prefix", ranks=workers(0, 1))
    assert text(display.feed(0, OUT, b"\xff\xfe\x00\n", 0.0)) == b"[0] \xff\xfe\x00\n"
    assert display.feed(0, OUT, "é".encode()[:1], 0.0) == []
    assert text(display.feed(0, OUT, "é".encode()[1:] + b"\n", 0.0)) == "[0] é\n".encode()


def test_a_line_of_ten_megabytes_stays_whole() -> None:
    display = Display(mode="prefix", ranks=workers(0, 1))
    assert all(display.feed(0, OUT, b"x" * 65536, 0.0) == [] for _ in range(160))
    assert text(display.feed(0, OUT, b"\n", 0.0)) == b"[0] " + b"x" * 65536 * 160 + b"\n"


@pytest.mark.parametrize("start", [b"", b"\r"], ids=["text", "a progress bar"])
def test_a_line_that_never_ends_is_cut_at_64_mib(start: bytes) -> None:
    display = Display(mode="prefix", ranks=workers(0, 1))
    piece = b"x" * 2**20
    shown = text(display.feed(0, OUT, start, 0.0))
    for _ in range(70):
        shown += text(display.feed(0, OUT, piece, 0.0))
    shown += text(display.end_stream(0, OUT, 0.0))
    assert shown.count(b"\n") == 2
    assert shown.replace(b"\n", b"").replace(b"[0] ", b"") == piece * 70


def test_a_worker_that_starts_again_is_shown_again() -> None:
    display = Display(mode="prefix", ranks=workers(0, 1))
    display.feed(0, OUT, b"half", 0.0)
    display.end_stream(0, OUT, 0.0)
    assert display.feed(0, OUT, b"new\n", 0.0) == [(OUT, b"[0] new\n")]


# --- who is shown


def test_hidden_streams_and_workers_are_not_shown() -> None:
    display = Display(
        mode="prefix", ranks=[*workers(0), *workers(1, streams=frozenset({ERR})), *workers(2, streams=frozenset())]
    )
    assert display.feed(1, OUT, b"a\n", 0.0) == []
    assert display.end_stream(1, OUT, 0.0) == []
    assert display.feed(1, ERR, b"b\n", 0.0) == [(ERR, b"[1] b\n")]
    assert display.feed(2, ERR, b"c\n", 0.0) == []


def test_rank0_shows_rank_0_alone_without_prefix() -> None:
    display = Display(mode="rank0", ranks=workers(0, 1))
    assert display.feed(0, OUT, b"your name? ", 0.0) == [(OUT, b"your name? ")]
    assert display.feed(1, OUT, b"a\n", 0.0) == []


def test_rank0_shows_nothing_on_a_node_without_rank_0() -> None:
    display = Display(mode="rank0", ranks=workers(2, 3), world_size=4)
    assert display.feed(2, OUT, b"a\n", 0.0) == []


def test_none_shows_nothing() -> None:
    display = Display(mode="none", ranks=workers(0, 1))
    assert display.feed(0, ERR, b"a\n", 0.0) == []
    assert display.end_stream(0, ERR, 0.0) == []


# --- one worker on the console


@given(st.lists(st.binary(max_size=9), max_size=9))
def test_a_lone_worker_without_prefix_passes_untouched(pieces: list[bytes]) -> None:
    display = Display(mode="raw", ranks=workers(0))
    shown = [text(display.feed(0, OUT, piece, 0.0)) for piece in pieces]
    assert shown == pieces
    assert display.end_stream(0, OUT, 0.0) == []


def test_the_last_line_of_a_lone_worker_ends_on_a_terminal_only() -> None:
    display = Display(mode="raw", ranks=workers(0), screen=Screen(terminals=frozenset({ERR})))
    for stream in OUT, ERR:
        display.feed(0, stream, b"\r50%", 0.0)
    assert display.end_stream(0, OUT, 0.0) == []
    assert display.end_stream(0, ERR, 0.0) == [(ERR, b"\n")]


def test_the_bar_of_a_lone_worker_with_prefix_stays_a_bar() -> None:
    display = Display(mode="prefix", ranks=[*workers(3), *workers(0, 1, 2, streams=frozenset())])
    assert text(display.feed(3, ERR, b"epoch 1", 0.0), ERR) == b""
    assert text(display.feed(3, ERR, b"\n\r 0%", 0.0), ERR) == b"[3] epoch 1\n[3] \r[3]  0%"
    assert text(display.feed(3, ERR, b"\r50%", 0.0), ERR) == b"\r[3] 50%"
    assert text(display.feed(3, ERR, b" ok\r\nnext", 0.0), ERR) == b" ok\n[3] next"
    assert text(display.feed(3, ERR, b"\nheld", 0.0), ERR) == b"\n[3] held"
    assert text(display.feed(3, ERR, b"\n", 0.0), ERR) == b"\n"
    assert text(display.feed(3, ERR, b"held", 0.0), ERR) == b""
    assert text(display.end_stream(3, ERR, 0.0), ERR) == b"[3] held\n"
    assert display.deadline() is None


def test_an_open_bar_of_a_lone_worker_gets_its_newline_at_the_end() -> None:
    display = Display(mode="prefix", ranks=workers(0))
    display.feed(0, ERR, b"\r50%", 0.0)
    assert display.end_stream(0, ERR, 0.0) == [(ERR, b"\n")]


def test_one_worker_here_is_not_alone_if_other_nodes_show_theirs() -> None:
    display = Display(mode="prefix", ranks=workers(0), world_size=2)
    assert display.feed(0, ERR, b"\r50%", 0.0) == []
    assert display.feed(0, ERR, b"\r99%\n", 0.0) == [(ERR, b"[0] 99%\n")]


# --- equal lines of several ranks


def test_collapse_shows_a_line_of_all_ranks_once_and_at_once() -> None:
    display = Display(mode="collapse", ranks=workers(0, 1, 2))
    assert display.feed(2, OUT, b"loss 0.3\n", 0.0) == []
    assert display.feed(0, OUT, b"loss 0.3\n", 0.1) == []
    assert display.deadline() == 0.25
    assert display.feed(1, OUT, b"loss 0.3\n", 0.2) == [(OUT, b"[0-2] loss 0.3\n")]
    assert display.deadline() is None


def test_collapse_shows_a_line_of_some_ranks_when_the_wait_is_over() -> None:
    display = Display(mode="collapse", ranks=workers(0, 1, 2))
    display.feed(0, ERR, b"a\n", 1.0)
    display.feed(2, ERR, b"a\n", 1.1)
    assert display.flush(1.2) == []
    assert display.flush(1.25) == [(ERR, b"[0,2] a\n")]
    assert display.feed(1, ERR, b"a\n", 1.3) == []
    assert display.flush(1.55) == [(ERR, b"[1]   a\n")]


def test_collapse_does_not_wait_for_a_worker_that_ended() -> None:
    display = Display(mode="collapse", ranks=workers(0, 1))
    display.feed(0, OUT, b"a\n", 0.0)
    assert display.feed(1, OUT, b"b", 0.0) == []
    assert display.end_stream(1, OUT, 0.0) == [(OUT, b"[0]   a\n")]
    assert display.feed(0, OUT, b"b\n", 0.1) == [(OUT, b"[0-1] b\n")]
    assert display.feed(0, OUT, b"c\n", 0.1) == [(OUT, b"[0]   c\n")]


def test_collapse_of_one_worker_waits_for_nobody() -> None:
    display = Display(mode="collapse", ranks=workers(0))
    assert display.feed(0, OUT, b"a\n", 0.0) == [(OUT, b"[0] a\n")]


# --- bars of several workers


def test_the_bars_of_several_workers_are_told_after_a_second_then_every_ten_and_at_their_end() -> None:
    display = Display(mode="prefix", ranks=workers(0, 1))
    chunks: Chunks = []
    for tick in range(250):  # 25 seconds, ten states a second
        at = tick / 10
        while (due := display.deadline()) is not None and due <= at:
            chunks += display.flush(due)
        chunks += display.feed(1, ERR, b"\r%3d/250" % tick, at)
    chunks += display.feed(1, ERR, b"\r250/250\n", 25.0)
    assert text(chunks, ERR) == b"[1]   9/250\n[1] 109/250\n[1] 209/250\n[1] 250/250\n"
    assert display.deadline() is None


def test_a_bar_that_stands_still_is_told_once() -> None:
    display = Display(mode="prefix", ranks=workers(0, 1))
    display.feed(1, ERR, b"\r50%", 0.0)
    assert display.deadline() == 1.0
    assert display.flush(0.9) == []
    assert display.flush(1.0) == [(ERR, b"[1] 50%\n")]
    assert display.deadline() is None
    assert display.end_stream(1, ERR, 60.0) == []


def test_live_bars_are_shown_in_place_and_their_ends_as_lines() -> None:
    display = Display(mode="prefix", ranks=workers(0, 1), screen=Screen(live=frozenset({ERR})))
    assert display.feed(0, OUT, b"\r10%", 0.0) == []
    assert (display.bars_have_changed, display.bars()) == (False, [])
    display.feed(1, ERR, b"\r20%", 0.0)
    assert (display.bars_have_changed, display.bar_has_ended) == (True, False)
    assert [(bar.ranks, bar.text) for bar in display.bars()] == [((1,), "20%")]
    assert display.end_stream(1, ERR, 1.0) == [(ERR, b"[1] 20%\n")]
    assert (display.bar_has_ended, display.bars()) == (True, [])


@pytest.mark.parametrize("mode", ["raw", "rank0"])
def test_no_bar_is_live_in_raw_mode_or_of_rank_0_alone(mode: str) -> None:
    display = Display(mode=mode, ranks=workers(0, 1), screen=Screen(live=BOTH))
    assert text(display.feed(0, ERR, b"\r20%", 0.0), ERR).endswith(b"20%")
    assert not display.bars_have_changed


@pytest.mark.parametrize("live", [BOTH, frozenset()], ids=["in place", "step of Slurm"])
@pytest.mark.parametrize("mode", ["raw", "rank0"])
def test_above_rows_only_whole_lines_are_written_and_a_bar_is_live_where_bars_are(mode: str, live: frozenset[Stream]):
    display = Display(mode=mode, ranks=workers(0), screen=Screen(live=live, has_rows=True))
    assert display.feed(0, ERR, b"\r20%", 0.0) == []
    assert [bar.text for bar in display.bars()] == ["20%"] * bool(live)
    assert text(display.feed(0, OUT, b"half a", 0.0) + display.feed(0, OUT, b" line\n", 0.0)) == b"half a line\n"


def test_a_line_that_has_not_ended_is_shown_in_place_once_it_has_rested_and_is_written_when_it_ends() -> None:
    display = Display(mode="prefix", ranks=workers(0, 1), screen=Screen(live=BOTH))
    assert display.feed(0, OUT, b"start\nname? ", 1.0) == [(OUT, b"[0] start\n")]
    assert (display.bars_have_changed, display.deadline()) == (False, 1.5)
    assert display.flush(1.5) == []
    assert [(bar.ranks, bar.text) for bar in display.bars()] == [((0,), "name? ")]
    assert display.feed(1, OUT, b"a line\n", 2.0) == [(OUT, b"[1] a line\n")]
    assert [(bar.ranks, bar.text) for bar in display.bars()] == [((0,), "name? ")]
    display.feed(0, OUT, b".", 2.0)
    assert [bar.text for bar in display.bars()] == ["name? ."]
    assert display.feed(0, OUT, b"hello\nnext", 3.0) == [(OUT, b"[0] name? .hello\n")]
    assert (display.bar_has_ended, display.bars(), display.deadline()) == (True, [], 3.5)


def test_of_a_prompt_that_was_answered_the_rest_of_the_line_is_shown() -> None:
    display = Display(mode="prefix", ranks=workers(0, 1), screen=Screen(live=BOTH))
    display.feed(0, OUT, b"name? ", 1.0)
    assert not display.has_prompt(0)
    display.flush(1.5)
    assert (display.has_prompt(0), display.has_prompt(1)) == (True, False)
    display.answered(0)
    assert (display.has_prompt(0), display.bars(), display.deadline()) == (False, [], None)
    assert display.feed(0, OUT, b"hello\n", 2.0) == [(OUT, b"[0] hello\n")]


def test_a_line_in_pieces_is_not_shown_before_it_has_rested_and_a_bar_may_follow_it() -> None:
    display = Display(mode="prefix", ranks=workers(0, 1), screen=Screen(live=BOTH))
    for tick in range(10):
        assert display.flush(tick / 10) == []
        display.feed(0, OUT, b"half\nhalf", tick / 10)
    assert not display.bars_have_changed
    display.flush(1.4)
    assert [bar.text for bar in display.bars()] == ["half"]
    display.feed(0, OUT, b"\r50%", 1.5)
    assert [bar.text for bar in display.bars()] == ["50%"]


def test_bars_of_several_workers_in_raw_mode_are_shown_as_they_come() -> None:
    display = Display(mode="raw", ranks=workers(0, 1))
    assert display.feed(0, ERR, b"a li", 0.0) == []
    assert display.feed(1, ERR, b"\r 1%\r 2%\r 3%", 0.0) == [(ERR, b"\r 1%\r 2%\r 3%")]
    assert display.feed(0, ERR, b"ne\n", 0.0) == [(ERR, b"a line\n")]
    assert display.feed(1, ERR, b"\n", 0.0) == [(ERR, b"\n")]
