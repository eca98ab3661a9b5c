"""What the coordinator is told: events, in their order. Times are CLOCK_MONOTONIC seconds of its own host."""

from __future__ import annotations

from ddplaunch.record import record
from ddplaunch.supervise.job.state import Member, StartFailed, Why
from ddplaunch.supervise.outcome import WorkerExit


@record
class Joined:
    """An agent is there."""

    member: Member
    at: float


@record
class Left:
    """An agent is gone."""

    id: int
    reason: str  # as in a sentence: "connection closed", "silent for 10 s"
    at: float


@record
class OneFewer:
    """A node has been given up by whoever starts the agents, and will not come."""

    at: float


@record
class NodeStopping:
    """An agent has begun to stop its workers."""

    id: int
    why: Why
    signum: int
    at: float


@record
class NodeNoticed:
    """A notice has come to an agent."""

    id: int
    signum: int


@record
class NodeKilling:
    """Somebody on this node does not want to wait for a stop."""

    id: int
    at: float


@record
class JobStopping:
    """Whoever has started all agents wants the end, or has ended itself."""

    why: Why
    signum: int
    at: float


@record
class NodeEnded:
    """Nothing of the generation is left on this node."""

    id: int
    exits: tuple[WorkerExit, ...]  # times of the coordinator's clock
    start_failure: StartFailed | None
    at: float


@record
class DeadlineReached:
    """The state's deadline may have come."""

    at: float


Event = Joined | Left | OneFewer | NodeStopping | NodeNoticed | NodeKilling | JobStopping | NodeEnded | DeadlineReached
