from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplaunch.plan.devices.sysfs import cpulist, names, read, read_cpulist


def ranges(cpus: set[int]) -> str:
    """As the kernel prints a set of CPUs."""
    ordered = sorted(cpus)
    starts = [cpu for cpu in ordered if cpu - 1 not in cpus]
    ends = [cpu for cpu in ordered if cpu + 1 not in cpus]
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in zip(starts, ends, strict=True))


@given(st.sets(st.integers(0, 300)))
def test_a_list_of_cpus_gives_back_the_set_that_was_printed(cpus: set[int]) -> None:
    assert cpulist(ranges(cpus) + "\n") == tuple(sorted(cpus))


@given(st.text(alphabet="0123456789-, x+_\n", max_size=20))
def test_any_text_is_a_list_of_cpus_or_nothing(text: str) -> None:
    found = cpulist(text)
    assert found == tuple(sorted(set(found)))


@pytest.mark.parametrize("text", ["0,3-1", "1,,2", "0,a", "-1", "0,1-", "1-2-3", "+1", "1_0", "0-3:1/2", "0,1000000"])
def test_what_is_no_list_of_cpus_is_nothing_even_where_a_part_is_right(text: str) -> None:
    assert cpulist(text) == ()


def test_a_file_that_is_missing_or_garbled_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "garbled").write_text("none\n")
    assert read(tmp_path, "/missing") is None
    assert read_cpulist(tmp_path, "/missing") == ()
    assert read_cpulist(tmp_path, "/garbled") == ()
    assert names(tmp_path, "/missing") == []


def test_names_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for name in ("node10", "node9", "node0", "possible"):
        (tmp_path / name).touch()
    assert names(tmp_path, "/", prefix="node") == ["node0", "node9", "node10"]
