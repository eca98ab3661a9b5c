"""What bars leave when they are complete: a line for all ranks that say the same, and every line of each rank in its order."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ddplaunch.launcher.output.bars import FinishedBars, is_complete, wording
from ddplaunch.launcher.output.display import Display
from ddplaunch.system.console.streams import Screen, Stream
from tests.unit.builders import shown_workers

OUT, ERR = Stream.OUT, Stream.ERR


def bars(*ranks: int) -> FinishedBars:
    made = FinishedBars()
    for rank in ranks:
        made.note_drawing(rank, ERR)
    return made


def test_equal_bars_are_one_line_as_soon_as_the_last_is_complete() -> None:
    finished = bars(0, 1, 2)
    assert finished.feed(2, ERR, b"a: 100%| 5/5 [00:01<00:00, 5it/s]\n", 1.0, drawn=True) == []
    assert finished.feed(0, ERR, b"a: 100%| 5/5 [00:01<00:00, 6it/s]\n", 1.1, drawn=True) == []
    assert finished.deadline == 1.5
    last = finished.feed(1, ERR, b"a: 100%| 5/5 [00:02<00:00, 7it/s]\n", 1.2, drawn=True)
    assert last == [((0, 1, 2), ERR, b"a: 100%| 5/5 [00:01<00:00, 5it/s]\n")]
    assert finished.deadline is None


def test_a_bar_waits_half_a_second_for_others_and_what_follows_it_waits_with_it() -> None:
    finished = bars(0, 1, 2)
    finished.feed(0, ERR, b"5/5\n", 1.0, drawn=True)
    finished.feed(1, ERR, b"5/5\n", 1.1, drawn=True)
    assert finished.feed(0, ERR, b"next\n", 1.2, drawn=False) == []
    assert finished.feed(0, OUT, b"elsewhere\n", 1.2, drawn=False) == [((0,), OUT, b"elsewhere\n")]
    assert finished.flush(1.5) == [((0, 1), ERR, b"5/5\n"), ((0,), ERR, b"next\n")]
    assert finished.feed(0, ERR, b"at once\n", 1.6, drawn=False) == [((0,), ERR, b"at once\n")]


def test_a_bar_does_not_wait_for_a_rank_that_has_ended_or_that_draws_none() -> None:
    finished = bars(0, 1)
    assert finished.feed(0, ERR, b"5/5\n", 1.0, drawn=True) == []
    assert finished.end_stream(1, ERR, 1.1) == [((0,), ERR, b"5/5\n")]
    assert finished.feed(0, ERR, b"6/6\n", 1.2, drawn=True) == [((0,), ERR, b"6/6\n")]


def test_a_bar_that_is_not_complete_and_one_that_says_another_loss_stay_apart() -> None:
    finished = bars(0, 1)
    assert finished.feed(0, ERR, b"4/5\n", 1.0, drawn=True) == [((0,), ERR, b"4/5\n")]
    finished.feed(0, ERR, b"5/5 [00:01<00:00, 5it/s, loss=1]\n", 1.0, drawn=True)
    finished.feed(1, ERR, b"5/5 [00:01<00:00, 5it/s, loss=2]\n", 1.0, drawn=True)
    assert [ranks for ranks, *_ in finished.flush(1.5)] == [(0,), (1,)]


def test_a_line_longer_than_any_bar_waits_for_nobody() -> None:
    line = b"x" * 2000 + b" 5/5\n"
    assert bars(0, 1).feed(0, ERR, line, 1.0, drawn=True) == [((0,), ERR, line)]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("a: 100%|█| 5/5 [00:01<00:00, 4.9it/s]", "a: 100%|█| 5/5 [01:00<00:00, 1.2s/it]"),
        (
            "Epoch 1/1 \x1b[31m━━\x1b[0m 30/30 0:00:10 • 0:00:00 181.03it/s",
            "Epoch 1/1 ━━ 30/30 0:00:09 • 0:00:00 9.1it/s",
        ),
        ("a: 100%|█| 1M/1M [00:01<00:00, 3.1MB/s]", "a: 100%|█| 1M/1M [00:01<00:00, 3.9MB/s]"),
    ],
    ids=["tqdm", "lightning", "bytes"],
)
def test_times_and_speeds_say_nothing(one: str, other: str) -> None:
    assert is_complete(one)
    assert wording(one) == wording(other)
    assert wording(one) != wording(one.replace("5/5", "6/6").replace("30/30", "31/31").replace("1M", "2M"))


WRITES = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from(["5/5", "6/6", "4/5", "text"]), st.booleans(), st.floats(0, 0.4)),
    max_size=30,
)


@example([(1, "6/6", True, 0.0), (1, "5/5", True, 0.0), (2, "5/5", True, 0.0), (2, "6/6", True, 0.0)])
@example([(0, "6/6", True, 0.0), (2, "5/5", True, 0.0), (2, "6/6", True, 0.0)])
@given(WRITES)
def test_every_line_of_each_rank_is_shown_once_in_its_order_and_none_waits_longer(writes) -> None:
    finished, at = bars(0, 1), 0.0
    shown: dict[int, list[bytes]] = {0: [], 1: [], 2: []}
    written: dict[int, list[bytes]] = {0: [], 1: [], 2: []}

    def take(blocks) -> None:
        for ranks, _, block in blocks:
            for rank in ranks:
                shown[rank] += block.splitlines()

    for rank, text, drawn, pause in writes:
        at += pause
        while (due := finished.deadline) is not None and due <= at:
            take(finished.flush(due))
        written[rank].append(text.encode())
        take(finished.feed(rank, ERR, text.encode() + b"\n", at, drawn=drawn))
    take(finished.flush(at + 0.5))
    assert shown == written
    assert finished.deadline is None


@pytest.mark.parametrize("live", [frozenset(), frozenset({ERR})])
@pytest.mark.parametrize("mode", ["prefix", "collapse"])
def test_the_console_shows_the_end_of_equal_bars_once(mode: str, live: frozenset[Stream]) -> None:
    display = Display(mode=mode, ranks=shown_workers(0, 1), screen=Screen(live=live))
    chunks = []
    for rank in (0, 1):
        chunks += display.feed(rank, ERR, b"\r1/2", 0.0)
    for rank in (0, 1):
        chunks += display.feed(rank, ERR, b"\r2/2 [00:0%d<00:00, 1it/s]\n" % rank, 0.1)
    chunks += display.end_stream(0, ERR, 0.2)
    chunks += display.end_stream(1, ERR, 0.2)
    assert chunks == [(ERR, b"[0-1] 2/2 [00:00<00:00, 1it/s]\n")]
