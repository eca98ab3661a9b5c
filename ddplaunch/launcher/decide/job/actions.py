"""What the coordinator is to do: the actions that `step` asks for."""

from __future__ import annotations

from msgspec import Struct

from ddplaunch.launcher.decide.job.members import Member


class LeaveJob(Struct, frozen=True):
    """Tell all other agents that node 0 leaves the job, which goes on once node 0 is started again."""

    signum: int  # by which it leaves; 0: it is unfit, or cut off from the command that started it
    unfit: str = ""  # why its health check has failed


class BeginGeneration(Struct, frozen=True):
    """Reserve a port and have these agents start their workers, in the order of their node ranks."""

    generation: int
    order: tuple[int, ...]  # ids
    restarts: int


class StopNodes(Struct, frozen=True):
    """Have these agents stop their workers."""

    ids: tuple[int, ...]
    signum: int
    by_cluster: bool = False  # the cluster sends the signal to all workers itself
    # said again to nodes that stop already: all workers of another node have ended since
    another_node_ended: bool = False
    # no worker of any node has made progress for long; said to nodes that stop already, too
    job_stands_still: bool = False


class TellAllStacksRead(Struct, frozen=True):
    """Tell agents that the stacks on all nodes are read: they have waited for that, and stop their workers now."""

    ids: tuple[int, ...]


class KillNodes(Struct, frozen=True):
    """Have these agents kill the workers that they are stopping."""

    ids: tuple[int, ...]


class Refuse(Struct, frozen=True):
    """Report to this agent that it cannot take part."""

    id: int
    reason: str
    status: int
    hint: str = ""
    unfit: Member | None = None  # what this agent was in the job, if its machine seems to be at fault


class Release(Struct, frozen=True):
    """Have this agent end by the signal that it received, while the others go on."""

    id: int
    signum: int


class LeaveBehind(Struct, frozen=True):
    """Have this agent end, whose node is in the smaller part of a partition; the nodes of the larger part go on."""

    id: int
    text: str  # in a sentence


class Drop(Struct, frozen=True):
    """Close the connection with this agent."""

    id: int


class ReportFailure(Struct, frozen=True):
    """Report a failed generation; another follows after `wait` seconds at the earliest."""

    wait: float


class Print(Struct, frozen=True):
    """Print a line for the user."""

    text: str


class PrintIdle(Struct, frozen=True):
    """Print that no worker of any node has made progress for this many seconds."""

    seconds: float


class PrintProgress(Struct, frozen=True):
    """Print that workers make progress again."""

    seconds: float  # since the line that no worker did


class EndJob(Struct, frozen=True):
    """End the job: report it to all agents, and wait until they know."""

    status: int
    error: str = ""  # what was wrong, if it is not in the state
    requeue: int = 0  # the notice after which it should go back into the queue
    hint: str = ""  # what to type where something was wrong; "": what a node needs to be met


_OnNodes = (
    LeaveJob | BeginGeneration | StopNodes | TellAllStacksRead | KillNodes | Refuse | Release | LeaveBehind | Drop
)
Action = _OnNodes | ReportFailure | Print | PrintIdle | PrintProgress | EndJob
