"""What the coordinator is to do: the actions that `step` asks for."""

from __future__ import annotations

from ddplaunch.record import record


@record
class BeginGeneration:
    """Reserve a port and have these agents start their workers, in the order of their places."""

    generation: int
    order: tuple[int, ...]  # ids
    restarts: int


@record
class StopNodes:
    """Have these agents stop their workers."""

    ids: tuple[int, ...]
    signum: int
    by_cluster: bool = False  # the cluster sends the signal to all workers itself


@record
class KillNodes:
    """Have these agents kill the workers that they stop."""

    ids: tuple[int, ...]


@record
class Refuse:
    """Report to this agent that it cannot take part."""

    id: int
    reason: str
    status: int
    hint: str = ""


@record
class Release:
    """Have this agent end, as the signal that came to it asked: the others go on."""

    id: int
    signum: int


@record
class Drop:
    """Close the connection with this agent."""

    id: int


@record
class ReportFailure:
    """Report a failed generation; another follows after `wait` seconds at the earliest."""

    wait: float


@record
class Print:
    """Print a line for the user."""

    text: str


@record
class NameStill:
    """Say that no worker of any node has moved for so many seconds."""

    seconds: float


@record
class EndJob:
    """The job has ended: report it to all agents, wait until they know."""

    status: int
    error: str = ""  # what was wrong, if it is not in the state
    requeue: int = 0  # the notice after which it should go back into the queue


Action = BeginGeneration | StopNodes | KillNodes | Refuse | Release | Drop | ReportFailure | Print | NameStill | EndJob
