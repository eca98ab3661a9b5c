"""--health-check: a command of the user says whether this node is fit for workers, before they start and before each restart."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from ddplaunch.agent.events import HealthChecked
from ddplaunch.fields import line
from ddplaunch.loop.loop import Loop, Pending
from ddplaunch.process.shell import run_in_shell

LIMIT = 60.0  # seconds that the command has
_MARGIN = 2.0  # seconds for the child that waits for it


def why_unfit(command: str, env: Mapping[str, str]) -> str:
    """Return why the health check failed: "exit status 4: GPU 2 is off the bus". Return "" if the command exits with 0."""
    code, output = run_in_shell(command, env, LIMIT)
    if code == 0:
        return ""
    how = f"killed after {LIMIT:g} s" if code is None else f"exit status {code}" if code > 0 else f"signal {-code}"
    said = output.strip().rpartition("\n")[2]
    return line(f"{how}: {said}" if said else how)


def check_before(generation: int, loop: Loop, command: str, env: Mapping[str, str]) -> Pending[str]:
    """Have a child run the command while the agent goes on; post `HealthChecked` for this generation."""

    def answered(why: str) -> None:
        loop.post(HealthChecked(generation, why))

    return loop.ask(partial(why_unfit, command, env), f"no answer after {LIMIT:g} s", answered, within=LIMIT + _MARGIN)
