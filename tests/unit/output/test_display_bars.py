"""Progress bars of one worker among several: what tqdm 4.67 wrote to a pipe, and what is shown of it."""

import pytest

from ddplaunch.system.console.lines import Lines

SINGLE = (
    "\r  0%|    | 0/2 [00:00<?, ?it/s]\r 50%|██  | 1/2 [00:00<00:00, 9.1it/s]\r100%|████| 2/2 [00:00<00:00, 9.3it/s]\n"
)
ERASED = "\r0/2\r1/2\r2/2\r   \r"  # leave=False
NESTED = (  # for epoch in tqdm(2): for batch in tqdm(2, leave=False): tqdm.write(loss)
    "\repoch 0/2\n\rbatch 0/2\x1b[A\r         \r\n\r         \r\x1b[Aloss 0.0\n\repoch 0/2\n\rbatch 0/2\x1b[A\n"
    "\rbatch 1/2\x1b[A\r         \r\n\r         \r\x1b[Aloss 0.1\n\repoch 0/2\n\rbatch 1/2\x1b[A\n\rbatch 2/2\x1b[A\n"
    "\r         \x1b[A\repoch 1/2\n\rbatch 0/2\x1b[A\r         \r\n\r         \r\x1b[Aloss 1.0\n\repoch 1/2\n"
    "\rbatch 0/2\x1b[A\n\rbatch 1/2\x1b[A\r         \r\n\r         \r\x1b[Aloss 1.1\n\repoch 1/2\n\rbatch 1/2\x1b[A\n"
    "\rbatch 2/2\x1b[A\n\r         \x1b[A\repoch 2/2\repoch 2/2\n"
)
KEPT = (  # the same, leave=True, nothing written between
    "\repoch 0/2\n\rbatch 0/2\x1b[A\n\rbatch 1/2\x1b[A\n\rbatch 2/2\x1b[A\rbatch 2/2\n\repoch 1/2\n\rbatch 0/2\x1b[A\n"
    "\rbatch 1/2\x1b[A\n\rbatch 2/2\x1b[A\rbatch 2/2\n\repoch 2/2\repoch 2/2\n"
)
RICH = (  # rich.live: two rows, drawn three times, with the cursor hidden
    "\x1b[?25lepoch 1\nbatch 1\r\x1b[2K\x1b[1A\x1b[2Kepoch 1\nbatch 2\r\x1b[2K\x1b[1A\x1b[2Kepoch 2\nbatch 3\n\x1b[?25h"
)

KERAS = (  # its Progbar goes back by backspaces and a return
    "Epoch 1/2\n\r1/2 ━━── 1s 9ms/step - loss: 0.5" + "\b" * 33 + "\r2/2 ━━━━ 0s 9ms/step - loss: 0.25\n"
)


@pytest.mark.parametrize("size", [1, 7, 4096])
@pytest.mark.parametrize(
    ("written", "shown"),
    [
        (SINGLE, "100%|████| 2/2 [00:00<00:00, 9.3it/s]\n"),
        (ERASED, ""),
        (NESTED, "epoch 0/2\nloss 0.0\nloss 0.1\nloss 1.0\nloss 1.1\nepoch 2/2\n"),
        (KEPT, "epoch 0/2\nbatch 2/2\nbatch 2/2\nepoch 2/2\n"),
        (RICH, "epoch 2\nbatch 3\n"),
        (KERAS, "Epoch 1/2\n2/2 ━━━━ 0s 9ms/step - loss: 0.25\n"),
        ("windows\r\nlines\r\r\n", "windows\nlines\n"),
        ("\r50%\x1b[K\x1b[1mbold\x1b[0m\n", "50%\x1b[1mbold\x1b[0m\n"),
        ("\r50%\r", "50%\n"),
        ("a long state\r\x1b[Kshort\n", "short\n"),
        ("\rbar, no newline", "bar, no newline\n"),
        ("cut escape\x1b[3", "cut escape\x1b[3\n"),
        ("a\x1b[99999999999999999999Ab\n", "a\x1b[99999999999999999999Ab\n"),
        ("\n\n", "\n\n"),
        ("before\x1b[2Jafter\n", "before\nafter\n"),
        ("above\nbefore\x1b[H\x1b[2J\x1b[3Jafter", "above\nbefore\nafter\n"),
        ("\r50%\x1b[2Jafter\n", "after\n"),
        ("before\x1b[J\n", "before\n"),
    ],
    ids=[
        "one bar", "erased bar", "nested bars and lines between", "nested bars that stay", "rich", "keras", "crlf",
        "colours stay, erasing goes", "state before a last return", "erased to the end", "open bar", "cut escape",
        "no escape sequence", "empty lines", "new screen", "clear", "new screen after a bar", "erased below",
    ],
)  # fmt: skip
def test_a_bar_leaves_its_last_state_and_other_lines_stay(written: str, shown: str, size: int) -> None:
    lines, data = Lines(), written.encode()
    out = b"".join(lines.feed(data[start : start + size], 0.0) for start in range(0, len(data), size))
    assert (out + lines.end()).decode() == shown


@pytest.mark.parametrize("end", ["", "\n"])
@pytest.mark.parametrize("live", [False, True])
def test_an_unfinished_line_with_a_return_that_was_shown_is_shown_again_only_if_it_goes_on(
    live: bool, end: str
) -> None:
    for more, last in (("", ""), (", then done", "\n")):
        lines = Lines(live=live)
        lines.feed(b"\rhalf", 0.0)
        assert lines.deadline is not None
        assert lines.flush(lines.deadline) == b"half\n"
        out = lines.feed((more + end).encode(), 40.0) + lines.flush(50.0) + lines.end()
        assert out.decode() == (f"half{more}{last}" if more else "")


@pytest.mark.parametrize("live", [False, True])
def test_of_a_long_unfinished_line_with_a_return_only_the_end_is_shown(live: bool) -> None:
    lines, long = Lines(live=live), b"x" * 5000
    assert lines.feed(b"\r" + long, 0.0) + lines.flush(50.0) == b""
    assert lines.is_bar == live
    assert lines.end() == long + b"\n"


def test_a_line_after_nested_bars_is_held_for_a_moment_only() -> None:
    lines = Lines()
    lines.feed(NESTED.encode(), 1.0)
    assert lines.feed(b"done\n", 1.1) == b"epoch 2/2\n"
    assert lines.deadline == 1.25
    assert lines.flush(1.25) == b"done\n"
    assert lines.deadline is None
    assert lines.feed(b"at once\n", 3.0) == b"at once\n"


def test_the_update_of_nested_bars_is_one_line() -> None:
    lines = Lines()
    lines.feed(b"\repoch 0\n\rbatch 0\x1b[A", 0.0)
    lines.feed(b"\repoch 1\n\rbatch 7\x1b[A", 5.0)
    assert lines.flush(10.0) == b"batch 7\n"


def test_a_cursor_that_goes_far_up_holds_few_lines_back() -> None:
    lines = Lines()
    out = lines.feed(b"\x1b[999999A" + b"line\n" * 1000, 0.0)
    assert out == b"line\n" * 968
    assert lines.flush(0.25) == b"line\n" * 32


def test_no_update_is_made_of_a_line_that_is_being_written() -> None:
    lines = Lines()
    lines.feed(b"\r100%\nyour name? ", 0.0)
    assert lines.deadline is None


@pytest.mark.parametrize("live", [False, True])
def test_rows_that_are_redrawn_with_the_cursor_below_them_are_held_however_long_that_lasts(live: bool) -> None:
    """As rich does, whose cursor rests on the last row."""
    lines = Lines(live=live)
    lines.feed(b"a 0%\nb 0%\r\x1b[2K\x1b[1A\x1b[2Ka 1%\nb 1%", 0.0)
    for tick in range(1, 9):
        assert lines.flush(tick / 10) == b""
        assert lines.feed(b"\r\x1b[2K\x1b[1A\x1b[2Ka %d%%\nb %d%%" % (tick, tick), tick / 10) == b""
    assert lines.feed(b"\n", 1.0) + lines.end() == b"a 8%\nb 8%\n"


# --- shown in place


def test_a_live_bar_is_no_line_before_its_end() -> None:
    lines = Lines(live=True)
    assert lines.feed(b"\r 1%", 0.0) == b""
    assert (lines.is_bar, lines.rows) == (True, [b" 1%"])
    assert lines.flush(20.0) == b""
    assert lines.feed(b"\r100%\n", 20.0) + lines.flush(20.5) == b"100%\n"
    assert not lines.is_bar
    assert lines.deadline is None


def test_a_live_bar_that_stands_still_becomes_a_line_until_it_moves() -> None:
    lines = Lines(live=True)
    lines.feed(b"\r 1%", 0.0)
    lines.feed(b"\r 2%", 10.0)
    assert lines.deadline == 40.0
    assert lines.flush(40.0) == b" 2%\n"
    assert not lines.is_bar
    lines.feed(b"\r 3%", 60.0)
    assert lines.is_bar


@pytest.mark.parametrize("size", [1, 4096])
def test_an_outer_live_bar_is_no_line_before_the_inner_one_is_known(size: int) -> None:
    lines, data = Lines(live=True), KEPT.partition("\rbatch 1/2")[0].encode()
    assert b"".join(lines.feed(data[at : at + size], 0.0) for at in range(0, len(data), size)) == b""
    assert lines.rows == [b"epoch 0/2", b"batch 0/2"]


def test_lines_between_live_bars_are_no_rows_of_theirs() -> None:
    """The first bar of three in each other is known to be one before the last is drawn."""
    lines = Lines(live=True)
    drawn = b"\ra 0%\n\rb 0%\x1b[A\n\n\rc 0%\x1b[A\x1b[A"
    assert lines.feed(drawn, 0.0) == b""
    assert lines.rows == [b"a 0%", b"b 0%", b"c 0%"]
    assert lines.feed(b"\r    \r\n\r   \r\x1b[A\rsaved\n" + drawn + b"\ra 1%", 0.1) == b"saved\n"
    assert lines.rows == [b"a 1%", b"b 0%", b"c 0%"]


@pytest.mark.parametrize("written", [SINGLE, ERASED, NESTED, KEPT, RICH])
def test_of_live_bars_the_same_lines_are_left(written: str) -> None:
    one, other = Lines(), Lines(live=True)
    left = other.feed(written.encode(), 0.0) + other.end()
    # rows that are known to be bars from the start are no lines before they end
    assert set(left.splitlines()) <= set((one.feed(written.encode(), 0.0) + one.end()).splitlines())
    assert b"loss" not in written.encode() or left.count(b"loss") == 4
