"""--health-check: a command of the user says whether this node is fit for workers, before they start and before each restart."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from signal import SIGCONT, SIGHUP, SIGINT, SIGKILL, SIGQUIT, SIGTERM

from ddplaunch.launcher.job.orders import HINT_WITHOUT_NODE_0, Generation, Goodbye, JobEnd
from ddplaunch.launcher.node.events import HealthChecked
from ddplaunch.launcher.node.job import JobInputs
from ddplaunch.plan.cluster import Allocation
from ddplaunch.spec.outcome import StartFailure
from ddplaunch.system import exitcodes
from ddplaunch.system.errors import LaunchError, own_imports
from ddplaunch.system.fields import line, piece
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
    """Run the health check in the agent, before it reaches the coordinator; if several nodes take part, tell them of a failure.

    As long as the command runs the agent serves no signals: the kernel kills it if the front ends, and the front kills it as soon
    as somebody wants the job to end.

    Raises LaunchError: this node is not fit.
    """
    tell = None
    if several:
        with own_imports():
            from ddplaunch.launcher.job import join  # only jobs of several nodes have it
        tell = join.how_to_tell_unfit(inputs.spec, inputs.allocation, inputs.draft, env)
    front = os.getppid()
    signal_at_end_of(front, SIGKILL)
    why = why_unfit(command, inputs.env)
    if not why:
        signal_at_end_of(front, SIGCONT)  # as before: from here on the loop sees the end of the front
        return
    text = _unfit_text(inputs, command, why)
    error = LaunchError(text, hint=_hint_without_node(inputs.allocation), status=exitcodes.NODE_LOST)
    if tell is not None:
        error.then = partial(tell, error, line(why))  # called once the error is printed
    raise error


def _unfit_text(inputs: JobInputs, command: str, why: str) -> str:
    asked = inputs.spec.typed("health_check", command)
    return f"{inputs.node.host} is not fit for the job: {asked}: {why}"


def _hint_without_node(allocation: Allocation) -> str | None:
    """Return a hint for the user: what becomes of a job that has not begun, without this node; None: it has no other node."""
    least, most = allocation.nnodes
    if most == 1:
        return None
    # a command that has started all agents makes any node the first
    is_first = allocation.node_rank == 0 and not allocation.has_front
    if is_first:
        return HINT_WITHOUT_NODE_0
    if least == most:
        return "with --spares or --nnodes MIN:MAX a job goes on without a node that is not fit"
    may_be_node_0 = allocation.node_rank is None
    unless = ", unless it is node 0," if may_be_node_0 else ""
    return f"the job begins without this node{unless} if enough others are fit"


class HealthGate:
    """Before a restart, has a generation wait in the agent until the node has passed its health check."""

    def __init__(self, loop: Loop, command: str, inputs: JobInputs) -> None:
        self._loop = loop
        self._inputs = inputs
        self._command = command
        self._question = partial(why_unfit, command, inputs.env)
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

    # --- what a node says that is not fit

    def goodbye(self, why: str) -> Goodbye:
        """Return the report to a coordinator elsewhere."""
        return Goodbye(piece(f"its health check failed: {why}"), has_ended=True)

    def end_of_node(self, why: str) -> JobEnd:
        """Return the end of the job for this node, which leaves the job."""
        return JobEnd(exitcodes.NODE_LOST, "unfit", f"error: {_unfit_text(self._inputs, self._command, why)}\n")

    def start_failure(self, generation: Generation, why: str) -> StartFailure:
        """Return the failure of a generation that cannot do without this node: none of its workers is started here."""
        text = f"its health check failed: {why}"
        return StartFailure(min(generation.ranks), self._inputs.node.host, text, exitcodes.NODE_LOST)
