"""Writes a JobSpec back to the arguments of a command line, for an agent on another host. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ddplaunch.options.option import Given, Source
from ddplaunch.options.table import BY_NAME, OPTIONS
from ddplaunch.options.token import OF_WORKERS
from ddplaunch.record import NOTHING
from ddplaunch.spec import JobSpec, ProgramKind, default

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def to_argv(spec: JobSpec, *, without: frozenset[str] = frozenset()) -> list[str]:
    """Write all that differs from the defaults or was given; options without effect are left out.

    So are the fields of JobSpec in `without`: those that concern only the host where the command was typed.
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
        arguments += [f"--env={BY_NAME['env'].write(pair)}" for pair in spec.env]
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


def from_argv(arguments: Sequence[str], variables: Mapping[str, str] = NOTHING) -> tuple[list[Given], tuple[str, ...]]:
    """Give the options of a command line as `to_argv` makes it, and the program with its arguments.

    `variables` hold those of `token.hidden`.
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
    for name in (name for name in variables if name.startswith(OF_WORKERS)):
        text = f"{name.removeprefix(OF_WORKERS)}={variables[name]}"
        given.append(Given(option=BY_NAME["env"], text=text, source=Source.COMMAND_LINE, origin="--env-file"))
    return given, tuple(arguments[end + 1 :])
