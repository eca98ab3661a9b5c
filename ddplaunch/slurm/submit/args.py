"""The words behind `ddplaunch submit`: options of sbatch, ours among them, and behind `--` the job. Pure; asks nobody.

sbatch reads its options by getopt_long, and so do we, but for two things: a value that begins with `--` is taken for a
forgotten one, and an option that is not in our table has the next word for its value unless that begins with `-`.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from ddplaunch.errors import LaunchError
from ddplaunch.options.table import OPTIONS
from ddplaunch.record import record
from ddplaunch.slurm.submit.sbatch_options import FLAGS, KNOWN, SHORT, VALUED

USAGE = "ddplaunch submit [SBATCH OPTIONS] -- [OPTIONS] SCRIPT [ARGS]..."
MARK = "--"

# not sbatch's, or not for sbatch: what is done here
_OURS = ("print", "wait", "follow", "parsable", "help", "version")
_REFUSED = {
    "usage": "`sbatch --usage` shows it",
    "wrap": "the script is written by ddplaunch: what it runs stands behind --",
}
_OF_DDPLAUNCH = frozenset(option.flag.removeprefix("--") for option in OPTIONS)


@record
class SbatchOption:
    """One option, with its full name if that is known, as it stands in a script."""

    name: str  # "partition"; "Z" of a short one that is not known
    value: str | None = None

    @property
    def word(self) -> str:
        """The one word that means it; of a short one that is not known, with its value behind it."""
        dashes = "-" if len(self.name) == 1 else "--"
        between = "" if len(self.name) == 1 else "="
        return f"{dashes}{self.name}" if self.value is None else f"{dashes}{self.name}{between}{self.value}"


@record(kw_only=True)
class Request:
    """What is to be submitted, and what of it is to be shown."""

    options: tuple[SbatchOption, ...] = ()
    print: bool = False
    wait: bool = False
    follow: bool = False
    parsable: bool = False
    help: bool = False
    version: bool = False
    job: tuple[str, ...] = ()  # options of ddplaunch, SCRIPT and its arguments

    def has(self, *names: str) -> bool:
        """Whether sbatch is given one of these."""
        return any(option.name in names for option in self.options)

    def value(self, name: str) -> str | None:
        """The value that sbatch is given for this; the last one wins."""
        return next((option.value for option in reversed(self.options) if option.name == name), None)


def split(words: Sequence[str]) -> Request:
    """Tell the options of sbatch, ours and the job apart.

    Raises:
        LaunchError: `--` is missing, a value is missing, or an option cannot be meant.
    """
    found: list[SbatchOption] = []
    at = 0
    while at < len(words) and words[at] != MARK:
        if not words[at].startswith("-") or words[at] == "-":
            raise _no_mark(words, at)
        options, taken = _long(words, at) if words[at].startswith("--") else _short(words, at)
        for option in options:
            _check(option)
        found += options
        at += taken
    ours = {option.name for option in found} & set(_OURS)
    if at == len(words) and not ours & {"help", "version"}:
        raise _no_mark(words, None)
    return Request(
        options=tuple(option for option in found if option.name not in _OURS),
        job=tuple(words[at + 1 :]),
        **dict.fromkeys(ours, True),
    )


def _long(words: Sequence[str], at: int) -> tuple[list[SbatchOption], int]:
    """The option of a word that begins with --, and how many words it takes."""
    typed, equals, value = words[at].removeprefix("--").partition("=")
    name = typed if typed in _OURS else _whole(typed)
    if name in _OF_DDPLAUNCH and name not in KNOWN:
        raise LaunchError(
            f"--{name} is an option of ddplaunch, but stands among those of sbatch", hint=f"type it behind --: {USAGE}"
        )
    if equals:
        if name in FLAGS or name in _OURS:
            raise LaunchError(f"--{name} takes no value", hint=f"type `--{name}`")
        return [SbatchOption(name, value)], 1
    return _with_next(name, words, at)


def _short(words: Sequence[str], at: int) -> tuple[list[SbatchOption], int]:
    """The options of a word that begins with one -: letters may stand together, up to one that takes a value."""
    options: list[SbatchOption] = []
    letters = words[at][1:]
    for index, letter in enumerate(letters):
        name, rest = SHORT.get(letter, letter), letters[index + 1 :]
        if name in FLAGS:
            options.append(SbatchOption(name))
        elif rest:
            return [*options, SbatchOption(name, rest)], 1
        else:
            last, taken = _with_next(name, words, at)
            return [*options, *last], taken
    return options, 1


def _with_next(name: str, words: Sequence[str], at: int) -> tuple[list[SbatchOption], int]:
    """This option with the next word for its value, if it takes one."""
    following = words[at + 1] if at + 1 < len(words) else None
    if name in VALUED:
        if following is None or following.startswith("--"):
            raise LaunchError(
                f"{words[at]} needs a value" + (f", but {following} follows" if following else ""),
                hint=f"if {following} is its value, type `--{name}={following}`"
                if following not in (None, MARK)
                else None,
            )
        return [SbatchOption(name, following)], 2
    if name in KNOWN or name in _OURS or following is None or following.startswith("-"):
        return [SbatchOption(name)], 1
    return [SbatchOption(name, following)], 2


def _whole(typed: str) -> str:
    """The name that was abbreviated, if only one begins so."""
    if typed in KNOWN or typed in _OF_DDPLAUNCH:
        return typed
    longer = [name for name in KNOWN if name.startswith(typed)]
    return longer[0] if len(longer) == 1 and typed else typed


def _check(option: SbatchOption) -> None:
    if option.name in _REFUSED:
        raise LaunchError(f"--{option.name} cannot be given to `ddplaunch submit`", hint=_REFUSED[option.name])
    if option.name in ("output", "error") and not option.value:
        raise LaunchError(f"--{option.name} names no file", hint=f"leave it out, or type --{option.name}=%x-%j.out")
    # a line that begins with #SBATCH ends where the line ends
    if option.value is not None and any(not character.isprintable() for character in option.value if character != "\t"):
        raise LaunchError(
            f"the value of --{option.name}, {option.value!r}, has a character in it that no #SBATCH line can hold",
            hint="leave line breaks and control characters out",
        )


def _no_mark(words: Sequence[str], at: int | None) -> LaunchError:
    """The error if a word at `at` is no option, or if all words were taken for options and their values."""
    if at is None:
        return LaunchError("there is no job to submit: nothing stands behind --", hint=USAGE)
    if MARK in words[at:]:
        return LaunchError(f"{words[at]} stands before --, but is no option of sbatch and no value of one", hint=USAGE)
    told = shlex.join(["ddplaunch", "submit", *words[:at], MARK, *words[at:]])
    return LaunchError("-- is missing between the options of sbatch and the job", hint=f"type `{told}`")
