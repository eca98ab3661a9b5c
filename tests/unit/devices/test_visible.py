import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplaunch.plan.devices.choose import listed

NAMES = [("GPU-8932f937",), ("GPU-8932aaaa",), ("GPU-12345678",), ("MIG-55555555", "MIG-GPU-12345678/1/0")]


@pytest.mark.parametrize(
    ("value", "positions"),
    [
        ("0,1", (0, 1)),
        ("2,1", (2, 1)),
        (" 1 , 0 ", (1, 0)),
        ("1gpu2,2ampere", (1, 2)),
        ("+1", (1,)),
        ("0,2,-1,1", (0, 2)),
        ("0,9,1", (0,)),
        ("0,,1", (0,)),
        ("3", ()),
        ("1,0,1", ()),
        ("01,1", ()),
        ("", ()),
        ("  ", ()),
        ("-1", ()),
        ("NoDevFiles", ()),
        ("all", ()),
        ("GPU-8932f937", (0,)),
        ("GPU-1,GPU-8932f", (2, 0)),
        ("GPU-8932", ()),
        ("GPU-1,GPU-8932,GPU-8932f", (2,)),
        ("GPU-7", ()),
        ("GPU-1,0", (2,)),
        ("0,GPU-1", (0,)),
        ("GPU-1,GPU-12", ()),
        ("MIG-5", (3,)),
        ("MIG-GPU-12345678/1/0", (3,)),
        ("gpu-1", ()),
    ],
)
def test_a_list_is_read_by_the_rules_of_cuda(value: str, positions: tuple[int, ...]) -> None:
    assert listed(value, NAMES, count=3).positions == positions


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("0,9", "there is no device 9 here, so it and what follows it is ignored"),
        ("0,,1", "there is no device (empty) here, so it and what follows it is ignored"),
        ("GPU-8932", "GPU-8932 names 2 devices, so it and what follows it is ignored"),
        ("0,0", "it names 0 twice, which hides every device"),
        ("0,-1,1", None),
        ("-1", None),
        ("0,1", None),
    ],
)
def test_what_is_ignored_is_said_unless_it_was_meant(value: str, problem: str | None) -> None:
    assert listed(value, NAMES, count=3).problem == problem


def test_a_whole_uuid_wins_over_one_that_it_begins() -> None:
    assert listed("GPU-1", [("GPU-12",), ("GPU-1",)], count=2).positions == (1,)


@given(st.text(alphabet="0123456789,-+ GPUMIG/af", max_size=30))
def test_any_text_gives_known_devices_once_each(value: str) -> None:
    found = listed(value, NAMES, count=3)
    assert len(set(found.positions)) == len(found.positions) == len(found.entries)
    assert all(0 <= position < len(NAMES) for position in found.positions)


@given(st.permutations(range(8)).flatmap(lambda order: st.integers(1, 8).map(lambda length: order[:length])))
def test_a_list_of_indices_keeps_its_order(order: list[int]) -> None:
    assert listed(",".join(map(str, order)), [()] * 8, count=8).positions == tuple(order)
