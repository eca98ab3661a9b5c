"""What was asked of `ddplaunch submit`: options of sbatch and of our own, and behind `--` the job. Data only."""

from __future__ import annotations

from msgspec import Struct

USAGE = "ddplaunch submit [SBATCH OPTIONS] -- [OPTIONS] SCRIPT [ARGS]..."


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

    options: tuple[SbatchOption, ...] = ()  # each name once
    print: bool = False
    wait: bool = False
    follow: bool = False
    parsable: bool = False
    job: tuple[str, ...] = ()  # options of ddplaunch, SCRIPT and its arguments

    def has(self, *names: str) -> bool:
        """Whether sbatch gets one of these."""
        return any(option.name in names for option in self.options)

    def value(self, name: str) -> str | None:
        """The value that sbatch gets for this."""
        return next((option.value for option in self.options if option.name == name), None)
