from signal import SIGTERM

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplaunch.system.words import count, duration, signal_name, size, these_ranks


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-1, "0 ms"),
        (0, "0 ms"),
        (0.0004, "0 ms"),
        (0.04, "40 ms"),
        (0.0994, "99 ms"),
        (0.0995, "0.1 s"),
        (0.1, "0.1 s"),
        (10.02, "10 s"),
        (12.34, "12.3 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min"),
        (724, "12 min 4 s"),
        (3599.4, "59 min 59 s"),
        (3599.6, "1 h"),
        (10920, "3 h 2 min"),
        (7200, "2 h"),
        (86400, "24 h"),
        (172800, "2 d"),
        (273600, "3 d 4 h"),
    ],
)
def test_a_duration_has_its_two_largest_units(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@given(st.floats(0, 1e7))
def test_a_duration_is_off_by_at_most_half_of_what_it_leaves_out(seconds: float) -> None:
    units = {"ms": 0.001, "s": 1, "min": 60, "h": 3600, "d": 86400}
    words = duration(seconds).split()
    written = sum(float(number) * units[unit] for number, unit in zip(words[::2], words[1::2], strict=True))
    assert written == pytest.approx(seconds, rel=0.011, abs=0.051)


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (1024**2 - 1, "1 MiB"), (int(61.25 * 1024**3), "61.2 GiB")],
)
def test_a_size_has_its_largest_unit(number: int, text: str) -> None:
    assert size(number) == text


def test_signals_without_a_name_keep_their_number() -> None:
    assert signal_name(SIGTERM) == "SIGTERM"
    assert signal_name(40) == "signal 40"


def test_one_and_many() -> None:
    assert (these_ranks([3]), these_ranks([0, 1, 3])) == ("rank 3", "ranks 0-1,3")
    assert (count(1, "worker"), count(0, "worker")) == ("1 worker", "0 workers")
