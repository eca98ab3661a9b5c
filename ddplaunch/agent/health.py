"""--health-check: a command of the user says whether this node is fit for workers, before they start and before each restart."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from ddplaunch.fields import line
from ddplaunch.loop.loop import Loop, Pending
from ddplaunch.process.shell import run_in_shell

LIMIT = 60.0  # seconds that the command has
_MARGIN = 2.0  # seconds for the child that waits for it


def why_unfit(command: str, env: Mapping[str, str]) -> str:
    """Return why this node is not fit: how the command ended, and the last line that it printed; "" if it exits with 0."""
    code, output = run_in_shell(command, env, LIMIT)
    if code == 0:
        return ""
    how = f"killed after {LIMIT:g} s" if code is None else f"exit status {code}" if code > 0 else f"signal {-code}"
    said = output.strip().rpartition("\n")[2]
    return line(f"{how}: {said}" if said else how)


class HealthCheck:
    """Has a child run the command while the agent goes on; an order that cannot wait ends the check."""

    def __init__(self, loop: Loop, command: str, env: Mapping[str, str], done: Callable[[str], object]) -> None:
        """Run the command; `done` gets why this node is not fit, "" if it is, or if the check was ended."""
        self._done = done
        self._was_ended = False
        late = f"no answer after {LIMIT:g} s"
        question = partial(why_unfit, command, env)
        self._pending: Pending[str] = loop.ask(question, late, self._on_answer, within=LIMIT + _MARGIN)

    def end(self) -> None:
        """Go on without an answer, if there is none yet."""
        self._was_ended = True
        self._pending.give_up()

    def _on_answer(self, why: str) -> None:
        self._done("" if self._was_ended else why)
