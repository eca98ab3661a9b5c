from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from ddplaunch.record import NOTHING, fields_of, record, replace


@record
class Point:
    x: int
    y: int = 0


@record
class Size:
    x: int
    y: int = 0


@record(kw_only=True)
class Named:
    name: str
    extra: tuple[int, ...] = ()

    @property
    def shout(self) -> str:
        return self.name.upper()


@record
class Spoken:
    pid: int

    def __repr__(self) -> str:
        return f"pid {self.pid}"


def test_fields_are_given_by_place_or_name() -> None:
    assert (Point(1, 2).x, Point(1, 2).y) == (1, 2)
    assert Point(y=2, x=1) == Point(1, 2)


def test_a_field_that_is_not_given_has_its_default() -> None:
    assert Point(1).y == 0
    assert Named(name="a").extra == ()


def test_methods_and_properties_work() -> None:
    assert Named(name="a").shout == "A"


MISTAKES: list[tuple[Callable[..., object], tuple[Any, ...], dict[str, Any], str]] = [
    (Point, (), {}, "Point needs x"),
    (Point, (1,), {"z": 2}, "Point has no field z"),
    (Point, (1, 2, 3), {}, "Point takes 2 fields without their names, not 3"),
    (Named, ("a",), {}, "Named takes 0 fields without their names, not 1"),
    (Named, (), {"extra": ()}, "Named needs name"),
]


@pytest.mark.parametrize(("make", "args", "given", "message"), MISTAKES)
def test_what_does_not_fit_the_fields_is_refused(
    make: Callable[..., object], args: tuple[Any, ...], given: dict[str, Any], message: str
) -> None:
    with pytest.raises(TypeError) as raised:
        make(*args, **given)
    assert str(raised.value) == message


def test_a_record_cannot_be_changed() -> None:
    point: Any = Point(1)
    with pytest.raises(AttributeError, match="Point is frozen: x cannot be changed"):
        point.x = 2
    with pytest.raises(AttributeError, match="Point is frozen: y cannot be changed"):
        del point.y
    with pytest.raises(AttributeError, match="Point is frozen: other cannot be changed"):
        point.other = 2
    assert point == Point(1)


def test_records_are_equal_if_class_and_fields_are() -> None:
    assert Point(1, 2) == Point(1, 2)
    assert Point(1, 2) != Point(1, 3)
    others: list[object] = [Size(1, 2), (1, 2)]
    assert all(Point(1, 2) != other for other in others)


def test_equal_records_are_one_key() -> None:
    assert len({Point(1), Point(1, 0), Point(2)}) == 2


def test_a_record_shows_its_fields_unless_it_says_how() -> None:
    assert repr(Named(name="a")) == "Named(name='a', extra=())"
    assert repr(Spoken(7)) == "pid 7"


def test_replace_makes_another_one_with_some_fields_changed() -> None:
    first = Point(1, 2)
    assert replace(first, y=5) == Point(1, 5)
    assert first == Point(1, 2)
    with pytest.raises(TypeError, match="Point has no field z"):
        replace(first, z=5)


def test_fields_can_be_matched() -> None:
    match Point(1, 2):
        case Point(1, y):
            assert y == 2
        case _:
            pytest.fail("the pattern did not match")
    match Named(name="a"):
        case Named(name=name):
            assert name == "a"


def test_a_copy_is_equal() -> None:
    assert copy.deepcopy(Named(name="a", extra=(1,))) == Named(name="a", extra=(1,))


def test_fields_and_their_defaults_can_be_asked_for() -> None:
    assert fields_of(Named) == {"name": None, "extra": ()}


def test_a_default_that_could_change_is_refused() -> None:
    with pytest.raises(TypeError, match=r"Bad\.items: every record would share this default"):

        @record
        class Bad:
            items: list[int] = []  # noqa: RUF012 - what is refused


def test_nothing_stays_nothing() -> None:
    nothing: Any = NOTHING
    with pytest.raises(TypeError):
        nothing["a"] = 1
