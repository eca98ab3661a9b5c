"""Writes a JobSpec back to the arguments of a command line, for an agent on another host. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ddplaunch.options.option import Given, Source
from ddplaunch.options.table import BY_NAME, OPTIONS
from ddplaunch.spec import JobSpec, ProgramKind, default


def to_argv(spec: JobSpec, *, without: frozenset[str] = frozenset()) -> list[str]:
    """Write all that differs from the defaults or was given; options without effect are left out.

    So are the fields of JobSpec in `without`: those that concern only the host where the command was typed. Variables from files
    may be secret, and are never written: see `from_argv`.
    """
    arguments: list[str] = []
    for option in OPTIONS:
        if option.target in ("env", "verbosity") or option.name == "shutdown_timeout":
            continue  # written below; written as --grace-period
        value = getattr(spec, option.target, None)
        if value is None or option.target in without or not _is_needed(spec, option.target, value):
            continue
        if not option.is_flag:
            arguments.append(f"{option.flag}={option.write(value)}")
        elif value:
            arguments.append(option.flag)
    if "env" not in without:
        arguments += [f"--env={BY_NAME['env'].write(pair)}" for pair in spec.env if pair[0] not in spec.secret]
    if "verbosity" not in without:
        arguments += {-1: ["--quiet"], 0: [], 1: ["--verbose"]}[spec.verbosity]
    program = spec.program
    arguments += {ProgramKind.SCRIPT: [], ProgramKind.MODULE: ["--module"], ProgramKind.COMMAND: ["--no-python"]}[
        program.kind
    ]
    if program.python:
        arguments.append(f"--python={program.python}")
    # without "--" a script that is named like a verb or an option would be taken for one
    return [*arguments, "--", program.target, *program.args]


def _is_needed(spec: JobSpec, name: str, value: Any) -> bool:
    return name in spec.origins or value != default(name)


def from_argv(
    arguments: Sequence[str], from_files: Iterable[tuple[str, str, str]] = ()
) -> tuple[list[Given], tuple[str, ...]]:
    """Return the options of a command line as `to_argv` makes it, and the program with its arguments.

    `from_files` are the workers' variables that it does not hold: the name, the value and the origin of each.
    """
    by_flag = {option.flag: option for option in OPTIONS}
    end = arguments.index("--")
    given = []
    for argument in arguments[:end]:
        flag, _, text = argument.partition("=")
        option = by_flag[flag]
        given.append(
            Given(option=option, text="1" if option.is_flag else text, source=Source.COMMAND_LINE, origin=flag)
        )
    for name, value, origin in from_files:
        given.append(Given(option=BY_NAME["env"], text=f"{name}={value}", source=Source.FILE, origin=origin))
    return given, tuple(arguments[end + 1 :])
