"""What an option is. Pure; the options themselves are in `table.py`."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any

from msgspec import Struct

from ddplaunch.errors import LaunchError
from ddplaunch.options.parsers import BadValue
from ddplaunch.spec import Given, Source
from ddplaunch.words import did_you_mean

# set for workers, and so never read as a default: a job started inside a worker is another job
WORKER_VARIABLES = frozenset(f"DDPLAUNCH_{name}" for name in ("RUN_ID", "BACKEND", "DEVICE", "INIT_METHOD", "LOG_DIR"))


class Reach(IntEnum):
    """Which agents of a job get an option as it was given."""

    HERE = 0  # none: it concerns only the host where the command was typed
    STEP = 1  # those of a Slurm step; on other hosts the order to each has a field for it
    JOB = 2  # all


class Option(Struct, frozen=True, kw_only=True):
    """One option, declared once."""

    name: str  # its flag without "--", with underscores
    group: str  # heading in the help
    help: str
    parse: Callable[[str], Any]  # raises BadValue
    default: str = ""  # the text of its default, for the help
    example: str = ""  # a right value, for hints
    metavar: str = "N"
    short: str = ""
    field: str | None = None  # of JobSpec; None: of the same name
    is_flag: bool = False
    optional: str | None = None  # its value where none is given, as in `--debug SCRIPT`
    repeatable: bool = False  # every value counts, not only the last
    listed: bool = False  # values stand between commas; a file may hold an array
    choices: tuple[str, ...] = ()  # for completion and spelling hints
    path: str = ""  # "file" or "folder", "command" if a bare name is looked for on PATH
    may_be_empty: bool = False  # an empty text means that it is not given, as to torchrun
    verbatim: bool = False  # blanks around its text count
    pet: bool = False  # torchrun reads PET_NAME
    torchruns: bool = False  # one of torchrun's; said only of those without PET_NAME
    variable: bool = True  # DDPLAUNCH_NAME is read; not where that name has another meaning
    foreign: str = ""  # a variable of torch with the same meaning
    reach: Reach = Reach.JOB
    no_effect: str = ""  # accepted for torchrun's sake: why it does nothing here

    @property
    def flag(self) -> str:
        """The flag as it is written on the command line."""
        return f"--{self.key}"

    @property
    def key(self) -> str:
        """The key in a configuration file."""
        return self.name.replace("_", "-")

    @property
    def target(self) -> str:
        """The field of JobSpec that it sets."""
        return self.field or self.name

    @property
    def variables(self) -> tuple[tuple[str, Source], ...]:
        """The environment variables that give it a value."""
        upper = self.name.upper()
        candidates = (
            (self.foreign, Source.FOREIGN, bool(self.foreign)),
            (f"PET_{upper}", Source.PET, self.pet),
            (f"DDPLAUNCH_{upper}", Source.VARIABLE, self.variable and f"DDPLAUNCH_{upper}" not in WORKER_VARIABLES),
        )
        return tuple((name, source) for name, source, read in candidates if read)

    def words(self, text: str) -> list[str]:
        """Return the words of a command line for this value."""
        return [self.flag] if self.is_flag else [self.flag, text]

    def value(self, given: Given) -> Any:
        """Parse a given value of this option.

        Raises:
            LaunchError: it is not a valid one.
        """
        try:
            return self.parse(given.text)
        except BadValue as error:
            raise LaunchError(f"{given}: {error}", hint=error.hint or self._hint(given)) from None

    def _hint(self, given: Given) -> str | None:
        if meant := did_you_mean(given.text.lower(), self.choices):
            return f"did you mean `{given.spelled(meant)}`?"
        return f"type for example `{given.spelled(self.example)}`" if self.example else None


class Alias(Struct, frozen=True, kw_only=True):
    """A flag of another launcher that means the same as one of ours."""

    flag: str
    option: str  # the name of ours
    launcher: str
    of_all_nodes: bool = False  # it counts the workers of all nodes
