"""--health-check: a command of the user says whether this node is fit for workers, before they start and before each restart."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from signal import SIGCONT, SIGHUP, SIGINT, SIGKILL, SIGQUIT, SIGTERM

from ddplaunch.launcher.job.orders import Generation
from ddplaunch.launcher.node.events import HealthChecked
from ddplaunch.launcher.node.job import JobInputs
from ddplaunch.plan.cluster import Allocation
from ddplaunch.system import exitcodes
from ddplaunch.system.errors import LaunchError, own_imports
from ddplaunch.system.fields import line
from ddplaunch.system.loop.loop import Loop, Pending
from ddplaunch.system.process.command import run_in_shell
from ddplaunch.system.process.linux import signal_at_end_of

LIMIT = 60.0  # seconds that the command has
# signals that Slurm, a terminal or a user sends to all processes of a job, which say nothing of the machine
_OF_ALL = (SIGHUP, SIGINT, SIGQUIT, SIGTERM)
_MARGIN = 2.0  # seconds for the child that waits for it


def why_unfit(command: str, env: Mapping[str, str]) -> str:
    """Return why the health check failed: "exit status 4: GPU 2 is off the bus"; "" if it exits with 0, or is stopped."""
    code, output = run_in_shell(command, env, LIMIT)
    if code == 0 or (code is not None and -code in _OF_ALL):
        return ""
    how = f"killed after {LIMIT:g} s" if code is None else f"exit status {code}" if code > 0 else f"signal {-code}"
    said = output.strip().rpartition("\n")[2]
    return line(f"{how}: {said}" if said else how)


def check(command: str, inputs: JobInputs, env: Mapping[str, str], *, several: bool) -> None:
    """Find out whether this node is fit; if it is not, tell a coordinator elsewhere.

    Until then the front ends this process, the agent, as soon as somebody wants the job to end.

    Raises LaunchError: it is unfit.
    """
    with own_imports():
        from ddplaunch.launcher.job.join import withdraw  # only jobs of several nodes have it

    front = os.getppid()
    signal_at_end_of(front, SIGKILL)
    why = why_unfit(command, inputs.env)
    signal_at_end_of(front, SIGCONT)
    if not why:
        return
    asked = inputs.spec.typed("health_check", command)
    text = f"{inputs.node.host} is not fit for the job: {asked}: {why}"
    error = LaunchError(text, hint=_without_this_node(inputs.allocation), status=exitcodes.NODE_LOST)
    if several:
        withdraw(inputs.spec, inputs.allocation, env, error)
    raise error


def _without_this_node(allocation: Allocation) -> str | None:
    """Return what becomes of the job without this node, before it has begun; None: it has no other."""
    least, most = allocation.nnodes
    if most == 1:
        return None
    if least == most:
        return "with --spares or --nnodes MIN:MAX a job goes on without a node that is not fit"
    if allocation.node_rank == 0 and not allocation.has_front:
        return "no job begins without node 0: make another node the first one"
    unless = ", unless it is node 0," if allocation.node_rank is None else ""
    return f"the job begins without this node{unless} if enough others are fit"


class HealthGate:
    """Has a generation wait until the node has passed its health check."""

    def __init__(self, loop: Loop, command: str, env: Mapping[str, str]) -> None:
        self._loop = loop
        self._question = partial(why_unfit, command, env)
        self._waits: Generation | None = None
        self._asked: Pending[str] | None = None  # the last check

    def check(self, generation: Generation) -> None:
        """Have a child run the command while the agent goes on; post `HealthChecked` for this generation."""
        self._waits = generation

        def answered(why: str) -> None:
            self._loop.post(HealthChecked(generation.number, why))

        no_answer = "the process that runs it was killed, or hangs"
        self._asked = self._loop.ask(self._question, no_answer, answered, within=LIMIT + _MARGIN)

    def release(self, number: int) -> Generation | None:
        """Return the generation of this number if that still waits; it waits no longer."""
        if self._waits is None or self._waits.number != number:
            return None
        found, self._waits = self._waits, None
        return found

    def give_up(self) -> Generation | None:
        """Return the generation that waits, if one does; its check is given up."""
        found, self._waits = self._waits, None
        if found is not None and self._asked is not None:
            self._asked.give_up()
        return found
