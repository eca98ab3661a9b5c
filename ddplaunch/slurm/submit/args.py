"""The arguments of `ddplaunch submit`: options of sbatch and of our own, and behind `--` the job. Pure; runs no sbatch.

sbatch reads its options by getopt_long, and so do we, but for two things: a value that begins with `--` is taken for a
missing one, and an option that is not in our table takes the next argument as its value unless that begins with `-`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from msgspec import Struct

from ddplaunch.errors import LaunchError
from ddplaunch.options.table import OPTIONS
from ddplaunch.slurm.submit.sbatch_options import FLAGS, KNOWN, SHORT, VALUED

USAGE = "ddplaunch submit [SBATCH OPTIONS] -- [OPTIONS] SCRIPT [ARGS]..."
SEPARATOR = "--"

# our own, not passed to sbatch
_OURS = ("print", "wait", "follow", "parsable", "help", "version")
_REFUSED = {
    "usage": "`sbatch --usage` shows it",
    "wrap": "ddplaunch writes the script: type the job after --",
}
_OF_DDPLAUNCH = frozenset(option.flag.removeprefix("--") for option in OPTIONS)


class SbatchOption(Struct, frozen=True):
    """One option, with its full name if that is known."""

    name: str  # "partition"; "Z" for an unknown short one
    value: str | None = None

    @property
    def argument(self) -> str:
        """The option as one argument of sbatch."""
        dashes = "-" if len(self.name) == 1 else "--"
        between = "" if len(self.name) == 1 else "="
        return f"{dashes}{self.name}" if self.value is None else f"{dashes}{self.name}{between}{self.value}"


class SubmitRequest(Struct, frozen=True, kw_only=True):
    """The parsed command line."""

    options: tuple[SbatchOption, ...] = ()
    print: bool = False
    wait: bool = False
    follow: bool = False
    parsable: bool = False
    help: bool = False
    version: bool = False
    job: tuple[str, ...] = ()  # options of ddplaunch, SCRIPT and its arguments

    def has(self, *names: str) -> bool:
        """Whether sbatch gets one of these."""
        return any(option.name in names for option in self.options)

    def value(self, name: str) -> str | None:
        """The value that sbatch gets for this; the last one wins."""
        return next((option.value for option in reversed(self.options) if option.name == name), None)


def split(argv: Sequence[str]) -> SubmitRequest:
    """Split the command line into options of sbatch, our own, and the job.

    Raises:
        LaunchError: `--` is missing, a value is missing, or an option is not allowed here.
    """
    found: list[SbatchOption] = []
    at = 0
    while at < len(argv) and argv[at] != SEPARATOR:
        if not argv[at].startswith("-") or argv[at] == "-":
            raise _no_separator(argv, at)
        options, taken = _long(argv, at) if argv[at].startswith("--") else _short(argv, at)
        for option in options:
            _check(option)
        found += options
        at += taken
    ours = {option.name for option in found} & set(_OURS)
    if at == len(argv) and not ours & {"help", "version"}:
        raise _no_separator(argv, None)
    return SubmitRequest(
        options=tuple(option for option in found if option.name not in _OURS),
        job=tuple(argv[at + 1 :]),
        **dict.fromkeys(ours, True),
    )


def _long(argv: Sequence[str], at: int) -> tuple[list[SbatchOption], int]:
    """The option at an argument with --, and how many arguments it takes."""
    typed, equals, value = argv[at].removeprefix("--").partition("=")
    name = typed if typed in _OURS else _full_name(typed)
    if name in _OF_DDPLAUNCH and name not in KNOWN:
        raise LaunchError(f"--{name} is an option of ddplaunch, not of sbatch", hint=f"type it after --: {USAGE}")
    if equals:
        if name in FLAGS or name in _OURS:
            raise LaunchError(f"--{name} takes no value", hint=f"type `--{name}`")
        return [SbatchOption(name, value)], 1
    return _with_next(name, argv, at)


def _short(argv: Sequence[str], at: int) -> tuple[list[SbatchOption], int]:
    """The options at an argument with one -: letters may be grouped, up to one that takes a value."""
    options: list[SbatchOption] = []
    letters = argv[at][1:]
    for index, letter in enumerate(letters):
        name, rest = SHORT.get(letter, letter), letters[index + 1 :]
        if name in FLAGS:
            options.append(SbatchOption(name))
        elif rest:
            return [*options, SbatchOption(name, rest)], 1
        else:
            last, taken = _with_next(name, argv, at)
            return [*options, *last], taken
    return options, 1


def _with_next(name: str, argv: Sequence[str], at: int) -> tuple[list[SbatchOption], int]:
    """This option, with the next argument as its value if it takes one."""
    following = argv[at + 1] if at + 1 < len(argv) else None
    if name in VALUED:
        if following is None or following.startswith("--"):
            raise LaunchError(
                f"{argv[at]} needs a value" + (f", but {following} follows" if following else ""),
                hint=f"if {following} is its value, type `--{name}={following}`"
                if following not in (None, SEPARATOR)
                else None,
            )
        return [SbatchOption(name, following)], 2
    if name in KNOWN or name in _OURS or following is None or following.startswith("-"):
        return [SbatchOption(name)], 1
    return [SbatchOption(name, following)], 2


def _full_name(typed: str) -> str:
    """The full name of an abbreviated option, if only one begins so."""
    if typed in KNOWN or typed in _OF_DDPLAUNCH:
        return typed
    longer = [name for name in KNOWN if name.startswith(typed)]
    return longer[0] if len(longer) == 1 and typed else typed


def _check(option: SbatchOption) -> None:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", option.name):
        raise LaunchError(f"{option.argument.partition('=')[0]!a} is not an option of sbatch", hint=USAGE)
    if option.name in _REFUSED:
        raise LaunchError(f"--{option.name} cannot be given to `ddplaunch submit`", hint=_REFUSED[option.name])
    if option.name in ("output", "error") and not option.value:
        raise LaunchError(f"--{option.name} names no file", hint=f"leave it out, or type --{option.name}=%x-%j.out")
    # a line that begins with #SBATCH ends where the line ends
    if option.value is not None and any(not character.isprintable() for character in option.value if character != "\t"):
        raise LaunchError(
            f"the value of --{option.name}, {option.value!r}, contains a character that an #SBATCH line cannot hold",
            hint="leave line breaks and control characters out",
        )


def _no_separator(argv: Sequence[str], at: int | None) -> LaunchError:
    """The error for an argument at `at` that is no option; None: all were options and their values."""
    if at is None:
        return LaunchError("no job to submit: nothing follows --", hint=USAGE)
    if SEPARATOR in argv[at:]:
        return LaunchError(f"{argv[at]} before -- is neither an option of sbatch nor a value of one", hint=USAGE)
    meant = shlex.join(["ddplaunch", "submit", *argv[:at], SEPARATOR, *argv[at:]])
    return LaunchError("-- is missing between the options of sbatch and the job", hint=f"type `{meant}`")
