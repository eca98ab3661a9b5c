"""Reads options from the keyword arguments of a Python call, written as on a command line. Parses no value."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from ddplaunch.options.option import Option
from ddplaunch.options.table import BY_NAME
from ddplaunch.spec import Given, Source
from ddplaunch.words import did_you_mean


def from_keywords(keywords: Mapping[str, object], *, call: str) -> Iterator[Given]:
    """Read keyword arguments; None means that the option is not given. `call` is the name of the function.

    Raises:
        TypeError: there is no such option, or a value of this type is not one of the option's.
    """
    for name, value in keywords.items():
        option = BY_NAME.get(name)
        if option is None:
            meant = did_you_mean(name, BY_NAME)
            raise TypeError(
                f"{call} got an unexpected keyword argument {name!r}" + (f"; did you mean {meant!r}?" if meant else "")
            )
        if value is not None:
            for text in _texts(option, value, call):
                yield Given(name=name, text=text, source=Source.CALL, origin=call, form=f"{name}={{}}")


def _texts(option: Option, value: object, call: str) -> list[str]:
    """The value as it is written on a command line."""
    match value:
        case bool() if option.is_flag:
            return [str(value)]
        case bool() if option.optional is not None:
            return [option.optional] if value else []
        case bool():
            pass
        case _ if option.is_flag:
            pass
        case str():
            return [value]
        case int():
            return [str(value)]
        case float():
            return [_number(value)]
        case os.PathLike() if option.path:
            return [os.fsdecode(value)]
        case Mapping() if option.name == "env":
            return [f"{name}={content}" for name, content in value.items()]
        case list() | tuple() if option.repeatable:
            return [str(item) for item in value]
        case list() | tuple() | set() | frozenset() if option.listed:
            return [",".join(map(str, value))]
    raise TypeError(f"{call}: {option.name}={value!r}: expected {_types(option)}, not {type(value).__name__}")


def _number(value: float) -> str:
    """A number rounded to milliseconds, as times are; one that rounds to 0 as Python writes it."""
    rounded = round(value, 3)
    return f"{rounded:.3f}".rstrip("0").rstrip(".") if rounded or not value else repr(value)


def _types(option: Option) -> str:
    if option.is_flag:
        return "True or False"
    if option.name == "env":
        return "a dict of strings"
    if option.optional is not None:
        return "True, a string or a number"
    return "a string, a number or a list of them" if option.listed or option.repeatable else "a string or a number"
