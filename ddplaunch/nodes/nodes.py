"""What an agent has to tell the other nodes of its job, and how they take part in its loop."""

from __future__ import annotations

from collections.abc import Sequence

from ddplaunch import supervise
from ddplaunch.control.messages import Ended, Killing, Noticed, StartFailure, Stopping
from ddplaunch.nodes import wire
from ddplaunch.nodes.link import Link
from ddplaunch.outcome import WorkerExit
from ddplaunch.record import replace
from ddplaunch.report.traces import Traces

_REASON = 1000  # characters, as control/messages.py allows


class Nodes:
    """The agent's view of the other nodes."""

    def __init__(self, link: Link) -> None:
        self._link = link

    # --- what is told

    def announce(self, why: supervise.Why, signum: int) -> None:
        """Say that this node's workers are being stopped."""
        self._link.send(Stopping(why.name, signum))

    def notice(self, signum: int) -> None:
        """Say that the end was announced here."""
        self._link.send(Noticed(signum))

    def hurry(self) -> None:
        """Say that nobody wants to wait for the stop."""
        self._link.send(Killing())

    def report(self, state: supervise.State, exits: Sequence[WorkerExit], traces: Traces) -> None:
        """Say how the workers of this node ended, after the last of them has."""
        raised = dict(state.raised)
        complete = [replace(end, error=end.error or raised.get(end.rank)) for end in exits]
        failed = state.start_failure
        self._link.send(
            Ended(
                generation=state.generation,
                exits=wire.sent(complete),
                start_failure=StartFailure(failed.rank, failed.reason[:_REASON], failed.status) if failed else None,
                oom_kills=traces.oom_kills,
                shm=traces.shm,
                log_folder=traces.log_folder,
            )
        )

    def leave(self) -> None:
        """Wait for the coordinator no longer."""
        self._link.leave()

    def expect_one_fewer(self) -> None:
        """Wait for one node less: whoever started the agents has given it up."""
        self._link.expect_one_fewer()

    # --- the loop

    @property
    def deadline(self) -> float | None:
        """When `expire` is to be called at the latest."""
        return self._link.deadline

    def expire(self, now: float) -> None:
        """Do what the time asks for."""
        self._link.expire(now)

    @property
    def is_over(self) -> bool:
        """Whether nobody expects anything of this node any more."""
        return self._link.is_over

    @property
    def pids(self) -> frozenset[int]:
        """Our own children that are no workers."""
        return self._link.pids

    def close(self) -> None:
        """Let go of all that is open."""
        self._link.close()
