import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplaunch.system.words import compress


@pytest.mark.parametrize(
    ("ranks", "text"), [([], ""), ([0], "0"), ([0, 1], "0-1"), ([0, 1, 2, 4], "0-2,4"), ([9, 3, 10, 3, 8], "3,8-10")]
)
def test_ranks_are_written_as_ascending_ranges(ranks: list[int], text: str) -> None:
    assert compress(ranks) == text


@given(st.sets(st.integers(0, 60)))
def test_no_rank_is_lost_or_invented(ranks: set[int]) -> None:
    read: set[int] = set()
    for part in filter(None, compress(ranks).split(",")):
        low, _, high = part.partition("-")
        read |= set(range(int(low), int(high or low) + 1))
    assert read == ranks
