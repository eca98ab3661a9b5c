"""Reads the words that `write` has written, without click, whose import would be a good part of an agent's start. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ddplaunch.options.option import Given, Source
from ddplaunch.options.table import OPTIONS


def from_argv(words: Sequence[str]) -> tuple[list[Given], tuple[str, ...]]:
    """Give the options of a command line as `to_argv` makes it, and the program with its arguments."""
    by_flag = {option.flag: option for option in OPTIONS}
    end = words.index("--")
    given = []
    for word in words[:end]:
        flag, _, text = word.partition("=")
        option = by_flag[flag]
        given.append(
            Given(option=option, text="1" if option.is_flag else text, source=Source.COMMAND_LINE, origin=flag)
        )
    return given, tuple(words[end + 1 :])
