"""The error of a command that cannot be carried out: raised anywhere, printed once, in `cli/main.py`; and words for messages."""

from __future__ import annotations

from collections.abc import Iterable

from ddplaunch.exitcodes import USAGE


class LaunchError(Exception):
    """A mistake of the user or a fact of the machine, in one sentence; never a bug of ours.

    `message` is in lower case, has no final period and names the value and where it came from;
    `hint` is what to type instead; `status` is the exit status of the command.
    """

    def __init__(self, message: str, *, hint: str | None = None, status: int = USAGE) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.status = status

    def render(self) -> str:
        """The text for stderr."""
        text = f"error: {self.message}\n"
        return f"{text}\nhint: {self.hint}\n" if self.hint else text


def count(number: int, noun: str) -> str:
    """Count things: "1 worker", "4 workers"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def did_you_mean(word: str, words: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """Give the word that was probably meant, None if none is similar; `cutoff` is difflib's, 1 means equal."""
    from difflib import get_close_matches  # only mistakes need it

    known = list(words)
    longer = [candidate for candidate in known if len(word) > 3 and candidate.startswith(word)]
    return next(iter(longer or get_close_matches(word, known, n=1, cutoff=cutoff)), None)
