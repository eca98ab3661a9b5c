"""The input of discovery: the spec, the variables, the host's name, and files that variables name. Decides nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ddplaunch.errors import LaunchError
from ddplaunch.record import record
from ddplaunch.spec import JobSpec

_LARGEST = 2**32  # what Slurm counts its special steps down from


@record(kw_only=True)
class ClusterFacts:
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
        text = self.env[name]
        if not (text.isascii() and text.isdigit()) or len(text) > 10 or int(text) > _LARGEST:
            raise LaunchError(f"{name}={printable(text)} is not a number", hint=NOT_HERE)
        return int(text)

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
        except (OSError, UnicodeDecodeError) as error:
            reason = "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else error.strerror or str(error)
            raise LaunchError(f"{origin}: {reason[:1].lower()}{reason[1:]}") from None


def printable(text: str) -> str:
    """Write the value of a variable as messages show it."""
    return text if text.isprintable() else ascii(text)


NOT_HERE = "to ignore these variables: --cluster local, or unset them"
