"""The input of discovery: the spec, the variables, the host's name, and files that variables name. Decides nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec import Struct

from ddplaunch.errors import LaunchError
from ddplaunch.options.parsers import digits
from ddplaunch.spec import JobSpec
from ddplaunch.words import why_failed

_LARGEST = 2**32  # what Slurm counts its special steps down from


class ClusterFacts(Struct, frozen=True, kw_only=True):
    """What discovery reads on the host where the command was started."""

    spec: JobSpec
    env: Mapping[str, str]
    hostname: str
    read: Callable[[str], str]  # gives the text of a file; raises OSError

    def value(self, *names: str) -> str | None:
        """The first of these variables that is set to something."""
        return next((self.env[name] for name in names if self.env.get(name)), None)

    def number(self, *names: str) -> int | None:
        """The number that the first of these variables holds, None if none is set.

        Raises:
            LaunchError: it holds something else.
        """
        name = next((name for name in names if self.env.get(name)), None)
        if name is None:
            return None
        value = digits(self.env[name])
        if value is None or value > _LARGEST:
            raise LaunchError(f"{name}={printable(self.env[name])} is not a number", hint=NOT_HERE)
        return value

    def needed(self, *names: str) -> int:
        """The number that the first of these variables holds.

        Raises:
            LaunchError: none is set, or it holds something else.
        """
        found = self.number(*names)
        if found is None:
            raise LaunchError(f"{names[0]} is not set, although other variables of the same cluster are", hint=NOT_HERE)
        return found

    def text_of(self, path: str, origin: str) -> str:
        """The text of a file.

        Raises:
            LaunchError: it cannot be read.
        """
        try:
            return self.read(path)
        except OSError as error:
            raise LaunchError(f"{origin}: {why_failed(error)}") from None
        except UnicodeDecodeError:
            raise LaunchError(f"{origin}: it is not UTF-8 text") from None


def printable(text: str) -> str:
    """Write the value of a variable as messages show it."""
    return text if text.isprintable() else ascii(text)


NOT_HERE = "to ignore these variables: --cluster local, or unset them"
