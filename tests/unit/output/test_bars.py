"""Many progress bars as few: which are equal, which is the slowest, and when they are passed on."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplaunch.launcher.output import bars
from ddplaunch.launcher.output.bars import Bar, BarFeed, condense, pack, unpack
from ddplaunch.system.process.clock import is_due
from ddplaunch.system.words import compress
from tests.written import KeptOutput


def shown(*texts: str) -> list[tuple[str, str]]:
    """What is left of the bars of ranks 0, 1, ...: ranks and text."""
    return [(compress(bar.ranks), bar.text) for bar in condense(Bar((rank,), text) for rank, text in enumerate(texts))]


TQDM = "train:  {percent}%|####      | {done}/200 [00:0{done}<00:14,  1.{done}it/s]"


@pytest.mark.parametrize(
    ("texts", "left"),
    [
        (["50%|# | 1/2 [00:09<00:14, 1.25it/s]", "50%|# | 1/2 [00:08<00:14, 1.26it/s]"], ["0-1"]),
        (["10%|  | 20/200", "11%|  | 22/200", "90%|##| 180/200"], ["0-1", "2"]),
        ([" 1/30", " 2/30", " 9/30"], ["0-1", "2"]),
        (["epochs: 0/3", "epochs: 1/3"], ["0", "1"]),
        (["7%", "60%", "30%", "31%", "90%"], ["0", "1-3", "4"]),
        (["Epoch 1:  5%|", "Epoch 0: 95%|"], ["1", "0"]),
        (["rank 0: 40%|", "rank 1: 40%|", "rank 2: 40%|"], ["0-2"]),
        (["worker 17: 40%|", "worker 30: 10%|"], ["1", "0"]),
        (["train: 40%|", "valid: 10%|"], ["0", "1"]),
        (["\x1b[31m40%\x1b[0m ━━━╸   0:00:14", "\x1b[32m41%\x1b[0m ━━━━╸  0:00:13"], ["0-1"]),
        (["12it [00:09, 1.25it/s]", "13it [00:09, 1.3it/s]", "99it [00:09, 9.3it/s]"], ["0-1", "2"]),
        (["loading |", "loading /"], ["0-1"]),
        (["99999999999999999999999/3 1000%", "0/0"], None),
    ],
    ids=[
        "times differ", "two percent", "a step", "a large step", "between", "epochs", "ranks named", "others named", "two kinds",
        "rich", "without an end", "no figures", "absurd figures",
    ],
)  # fmt: skip
def test_bars_that_are_as_far_are_one_and_the_slowest_comes_first(texts: list[str], left: list[str] | None) -> None:
    condensed = shown(*texts)
    assert left is None or [ranks for ranks, _ in condensed] == left
    assert all(text in texts for _, text in condensed)


def test_the_fastest_is_shown_as_it_draws_itself() -> None:
    assert shown("10%", "50%", "51%") == [("0", "10%"), ("1-2", "51%")]


def test_outer_bars_are_compared_with_outer_ones() -> None:
    drawn = [Bar((rank,), f"{10 * row + 40 * rank}%", row) for rank in range(2) for row in range(2)]
    assert [bar.text for bar in condense(drawn)] == ["0%", "40%", "10%", "50%"]


@given(st.lists(st.integers(0, 100), min_size=1, max_size=40), st.data())
def test_of_several_nodes_the_slowest_and_the_fastest_are_those_of_all(percents, data):
    drawn = [Bar((rank,), f"train: {percent}%") for rank, percent in enumerate(percents)]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(drawn)), max_size=3)))
    nodes = [drawn[low:high] for low, high in zip([0, *cuts], [*cuts, len(drawn)], strict=True)]
    left = condense(bar for node in nodes for bar in condense(node))
    assert len(left) <= 3
    assert sorted(rank for bar in left for rank in bar.ranks) == list(range(len(drawn)))
    assert left[0].text == f"train: {min(percents)}%"
    # a node shows those of its ranks that are as far as one another, which is within 2%, by the slowest of them
    assert len(left) == 1 or int(left[-1].text[len("train: ") : -1]) >= max(percents) - 2


BARS = st.lists(
    st.builds(
        Bar,
        st.sets(st.integers(0, 5000), min_size=1).map(lambda ranks: tuple(sorted(ranks))),
        st.text(),
        st.integers(0, 40),
    )
)


@given(BARS)
def test_a_message_says_all_and_fits(drawn: list[Bar]) -> None:
    message = pack(condense(drawn))
    assert len(message) < 1 << 16
    again = unpack(message)
    assert [(bar.ranks, bar.row) for bar in again] == [(bar.ranks, bar.row) for bar in condense(drawn)][: len(again)]
    assert pack(again) == message


@given(st.binary(max_size=60))
def test_what_is_no_message_is_refused(data: bytes) -> None:
    try:
        unpack(data)
    except ValueError:
        pass


@pytest.mark.parametrize(
    "message",
    [b"0 0\n", b"a 0 x\n", b"-1 0 x\n", b"0-99999999999 0 x\n", b"5-3 0 x\n", b"0 a x\n", b"0-1000000 0 x\n" * 2],
)
def test_no_ranks_and_too_many_are_refused(message: bytes) -> None:
    with pytest.raises(ValueError, match="no progress bars"):
        unpack(message)


def test_more_kinds_than_anybody_reads_are_dropped() -> None:
    drawn = [Bar((rank,), f"{chr(97 + rank) * 600} 5%") for rank in range(26)]
    assert len(unpack(pack(condense(drawn)))) == bars.MOST_KINDS


# --- when they are passed on


class Feed:
    def __init__(self) -> None:
        self.drawn = [Bar((0,), "1%")]
        self.front = KeptOutput()
        self.feed = BarFeed(self.front)

    def due(self) -> float | None:
        return self.feed.deadline

    def update(self, at: float) -> None:
        self.feed.update(self.drawn, at)

    def update_if_due(self, at: float) -> None:
        if is_due(self.feed.deadline, at):
            self.update(at)


def test_bars_are_passed_on_at_once_then_ten_times_a_second_and_only_if_they_move() -> None:
    one = Feed()
    one.feed.note_change(5.0)
    assert one.feed.deadline == 5.0
    one.update_if_due(5.0)
    assert one.front.messages == [b"0 0 1%\n"]
    one.drawn = [Bar((0,), "2%")]
    one.feed.note_change(5.01)
    one.feed.note_change(5.02)
    one.update_if_due(5.02)
    assert (len(one.front.messages), one.due()) == (1, 5.1)
    one.update_if_due(5.1)
    assert (len(one.front.messages), one.due()) == (2, None)
    one.feed.note_change(5.3)
    one.update_if_due(5.3)
    assert (len(one.front.messages), one.due()) == (2, None)


def test_many_bars_are_read_less_often() -> None:
    one = Feed()
    one.drawn = [Bar((rank,), f"{rank}%") for rank in range(512)]
    one.update(5.0)
    one.feed.note_change(5.1)
    assert one.due() == 5.4


def test_while_nothing_is_taken_the_last_state_waits() -> None:
    one = Feed()
    one.front.takes_bars = False
    one.feed.note_change(5.0)
    one.update_if_due(5.0)
    assert one.feed.deadline == 5.1
    one.front.takes_bars, one.drawn = True, [Bar((0,), "9%")]
    one.update_if_due(5.1)
    assert one.front.messages == [b"0 0 9%\n"]


def test_a_bar_that_ended_is_gone_at_once_and_a_new_size_shows_the_same_again() -> None:
    one = Feed()
    one.update(5.0)
    one.feed.repeat(5.0)
    one.update_if_due(6.0)
    one.drawn = []
    one.update(6.01)
    one.feed.repeat(6.02)
    assert one.front.messages == [b"0 0 1%\n", b"0 0 1%\n", b""]
    assert one.feed.deadline is None
