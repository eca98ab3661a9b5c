"""Writes a JobSpec back to the words of a command line, for an agent that is started elsewhere. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ddplaunch.options.option import Given, Source
from ddplaunch.options.table import BY_NAME, OPTIONS
from ddplaunch.spec import JobSpec, ProgramKind, default


def to_argv(spec: JobSpec, *, without: frozenset[str] = frozenset()) -> list[str]:
    """Write all that differs from the defaults or was given; what was without effect is left out.

    So are the fields of JobSpec in `without`: what concerns only the place where the command was typed.
    """
    words: list[str] = []
    for option in OPTIONS:
        if option.target in ("env", "verbosity") or option.name == "shutdown_timeout":
            continue  # written below; written as --grace-period
        value = getattr(spec, option.target, None)
        if value is None or option.target in without or not _is_worth(spec, option.target, value):
            continue
        if not option.is_flag:
            words.append(f"{option.flag}={option.write(value)}")
        elif value:
            words.append(option.flag)
    if "env" not in without:
        words += [f"--env={BY_NAME['env'].write(pair)}" for pair in spec.env]
    if "verbosity" not in without:
        words += {-1: ["--quiet"], 0: [], 1: ["--verbose"]}[spec.verbosity]
    program = spec.program
    words += {ProgramKind.SCRIPT: [], ProgramKind.MODULE: ["--module"], ProgramKind.COMMAND: ["--no-python"]}[
        program.kind
    ]
    if program.python:
        words.append(f"--python={program.python}")
    # the mark keeps a script that is called like a verb or an option from being taken for one
    return [*words, "--", program.target, *program.args]


def _is_worth(spec: JobSpec, name: str, value: Any) -> bool:
    return name in spec.origins or value != default(name)


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
