"""What an option is, and a value of it with its origin. Pure; the options themselves are in `table.py`."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any

from msgspec import Struct

from ddplaunch.errors import LaunchError, did_you_mean
from ddplaunch.options.parsers import BadValue

# set for workers, and so never read as a default: a job started inside a worker is another job
WORKER_VARIABLES = frozenset(f"DDPLAUNCH_{name}" for name in ("RUN_ID", "BACKEND", "DEVICE", "INIT_METHOD", "LOG_DIR"))


class Source(IntEnum):
    """Where a value was written; a higher one wins."""

    PYPROJECT = 1
    FILE = 2  # ddplaunch.toml
    FOREIGN = 3  # a variable that torch reads besides PET_*
    PET = 4
    VARIABLE = 5  # DDPLAUNCH_*
    COMMAND_LINE = 6
    CALL = 7  # a keyword of a call in Python


class Option(Struct, frozen=True, kw_only=True):
    """One option, declared once."""

    name: str  # its flag without "--", with underscores
    group: str  # heading in the help
    help: str
    parse: Callable[[str], Any]  # raises BadValue
    write: Callable[[Any], str] = str  # the inverse of `parse`
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


class Alias(Struct, frozen=True, kw_only=True):
    """A flag of another launcher that means the same as one of ours."""

    flag: str
    option: str  # the name of ours
    launcher: str
    of_all_nodes: bool = False  # it counts the workers of all nodes

    @property
    def key(self) -> str:
        """Its name among parsed arguments."""
        return self.flag.replace("-", "_")


class Given(Struct, frozen=True, kw_only=True):
    """A value of an option as it was written, with its origin."""

    option: Option
    text: str
    source: Source
    origin: str  # "--nproc-per-node", "PET_NPROC_PER_NODE", "ddplaunch.toml"
    quote: str = ""  # around the value in a file

    def __str__(self) -> str:
        return self.spelled(self.text) + (f" in {self.origin}" if self.source <= Source.FILE else "")

    def spelled(self, text: str) -> str:
        """This text as it is written at that origin."""
        if self.source <= Source.FILE:
            return f"{self.option.key} = {self.quote}{text}{self.quote}"
        if self.source is Source.CALL:
            if self.option.is_flag:
                return f"{self.option.name}={text == '1'}"
            return f"{self.option.name}={text}" if text.isdecimal() else f"{self.option.name}='{text}'"
        if self.source < Source.COMMAND_LINE:
            return f"{self.origin}={text}"
        return self.origin if self.option.is_flag else f"{self.origin} " + (text or '""')

    def value(self) -> Any:
        """Parse the text.

        Raises:
            LaunchError: it is not a valid value.
        """
        try:
            return self.option.parse(self.text)
        except BadValue as error:
            raise LaunchError(f"{self}: {error}", hint=error.hint or self._hint()) from None

    def _hint(self) -> str | None:
        if meant := did_you_mean(self.text.lower(), self.option.choices):
            return f"did you mean `{self.spelled(meant)}`?"
        return f"type for example `{self.spelled(self.option.example)}`" if self.option.example else None
