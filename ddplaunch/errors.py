"""What ddplaunch says when it cannot do what it was asked to. Raised anywhere, printed once, in `cli.py`."""

from __future__ import annotations

from ddplaunch.exitcodes import USAGE


class LaunchError(Exception):
    """A mistake of the user or a fact of the machine, said in one sentence; never a bug of ours.

    `message` is in lower case, has no final period and names the value and where it came from;
    `hint` says what to type instead; `status` is the exit status of the command.
    """

    def __init__(self, message: str, *, hint: str | None = None, status: int = USAGE) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.status = status

    def render(self) -> str:
        """The text as it stands on stderr."""
        text = f"error: {self.message}\n"
        return f"{text}\nhint: {self.hint}\n" if self.hint else text
