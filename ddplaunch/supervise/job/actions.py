"""What the coordinator is to do: the actions that `step` asks for."""

from __future__ import annotations

from ddplaunch.record import record


@record
class Begin:
    """Reserve a port and have these agents start their workers, in the order of their places."""

    generation: int
    order: tuple[int, ...]  # ids
    restarts: int


@record
class Stop:
    """Have these agents stop their workers."""

    ids: tuple[int, ...]
    signum: int


@record
class Kill:
    """Have these agents kill their workers."""

    ids: tuple[int, ...]


@record
class Refuse:
    """Tell this agent that it cannot take part, and let it go."""

    id: int
    reason: str
    status: int


@record
class Drop:
    """Close the connection with this agent."""

    id: int


@record
class Report:
    """Tell of a failed generation; another follows after `wait` seconds at the earliest."""

    wait: float


@record
class Say:
    """Tell the user."""

    text: str


@record
class Dismiss:
    """The job has ended: tell all agents, wait until they know."""

    status: int
    error: str = ""  # what was wrong, if it is not in the state
    requeue: int = 0  # the notice after which it should go back into the queue


Action = Begin | Stop | Kill | Refuse | Drop | Report | Say | Dismiss
