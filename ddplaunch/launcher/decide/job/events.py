"""What happened: the events that `step` gets, in their order. Times are seconds of the coordinator's clock of deadlines."""

from __future__ import annotations

from msgspec import Struct

from ddplaunch.launcher.decide.job.members import Member
from ddplaunch.spec.outcome import StartFailure, Why, WorkerExit


class Joined(Struct, frozen=True):
    """An agent has joined."""

    member: Member
    at: float


class AgentLost(Struct, frozen=True):
    """The connection of an agent has ended."""

    id: int
    reason: str  # as in a sentence: "connection closed", "silent for 10 s"
    at: float
    # nothing of a generation is left there, as it has said, or the command knows that has started it
    has_ended: bool = False
    renewed_at: float | None = None  # when the last renewal of its lease came; None: just now
    others_silent: int = 0  # how many other members have not answered lately either, if the workers were running


class OwnUnfit(Struct, frozen=True):
    """The node of this coordinator has failed its health check, and has not begun the generation that runs."""

    reason: str


class NodeGivenUp(Struct, frozen=True):
    """A node has been given up by the command that starts the agents, and will not join."""

    node_rank: int
    at: float


class Withdrawn(Struct, frozen=True):
    """A node that has not joined cannot take part, and says why."""

    node: str  # "node 1 (gpu02)"
    node_rank: int | None  # that its user gave it; None: any
    reason: str
    hint: str
    at: float


class ProgressKnown(Struct, frozen=True):
    """It is known how far the job came before it was requeued, in how many generations in a row without a new step."""

    best_step: int
    without_new_step: int


class NodeStopping(Struct, frozen=True):
    """An agent has begun to stop its workers."""

    id: int
    why: Why
    signum: int
    at: float
    by_cluster: bool = False  # which sends the signal to the workers of all nodes itself


class NodeNoticed(Struct, frozen=True):
    """An agent has received a notice, or the user has stopped the job there."""

    id: int
    signum: int


class NodeIdle(Struct, frozen=True):
    """No worker of this node has made progress from `since` to `at`."""

    id: int
    since: float
    at: float


class NodeStacksRead(Struct, frozen=True):
    """The stacks of this node's workers have been read, before the stop of all nodes."""

    id: int


class NodeEscalated(Struct, frozen=True):
    """The user of this node does not want to wait for the stop: a second signal came."""

    id: int
    signum: int
    at: float


class FirstNodeUnreached(Struct, frozen=True):
    """These nodes have not reached the first one, which is ready: the generation has not begun."""

    nodes: tuple[tuple[int, str], ...]  # ids, and why not
    at: float


class FirstNodeUnheard(Struct, frozen=True):
    """A node does not hear the first one any more."""

    id: int
    reason: str  # as in a sentence: "silent for 10 s"
    at: float


class StopRequested(Struct, frozen=True):
    """The command that has started all agents requests the end, or has ended itself."""

    why: Why
    signum: int
    at: float
    by_cluster: bool = False  # which sends the signal to the workers of all nodes itself


class Abandoned(Struct, frozen=True):
    """The command that started all agents says that the user is stopping the job for good, by whatever signal."""


class NodeEnded(Struct, frozen=True):
    """Nothing of the generation is left on this node."""

    id: int
    exits: tuple[WorkerExit, ...]  # times of the coordinator's clock
    start_failure: StartFailure | None
    at: float
    leftovers: tuple[str, ...] = ()  # processes that could not be ended, each as in a sentence


class BeginFailed(Struct, frozen=True):
    """The coordinator could not begin the generation: no port is free."""

    failure: StartFailure
    at: float


class PortTaken(Struct, frozen=True):
    """Another process has the port of the generation that was to begin."""

    at: float


class JobSuspended(Struct, frozen=True):
    """The job was suspended (Ctrl-Z): its time stands still."""

    at: float


class JobResumed(Struct, frozen=True):
    """The job goes on."""

    at: float


class LimitsPaused(Struct, frozen=True):
    """A debugger holds a worker of a node, or none does any more."""

    id: int
    paused: bool


class DeadlineReached(Struct, frozen=True):
    """The state's deadline may have come."""

    at: float
    is_first_silent: bool = False  # whether node 0 has not answered since nodes said that they do not hear it


_OfMembers = Joined | AgentLost | NodeGivenUp | OwnUnfit | Withdrawn
# that is dropped if nothing of the generation is left there
Report = NodeEnded | NodeIdle | NodeStacksRead | LimitsPaused
_OfNodes = Report | NodeStopping | NodeNoticed | NodeEscalated | FirstNodeUnreached | FirstNodeUnheard
Event = (
    _OfMembers
    | ProgressKnown
    | _OfNodes
    | StopRequested
    | Abandoned
    | BeginFailed
    | PortTaken
    | JobSuspended
    | JobResumed
    | DeadlineReached
)
