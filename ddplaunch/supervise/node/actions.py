"""What to do: the actions that `step` asks for. The agent carries them out, in their order."""

from __future__ import annotations

from ddplaunch.record import record
from ddplaunch.supervise.node.state import Why


@record
class Start:
    """Start all workers as this generation."""

    generation: int


@record
class Forward:
    """Pass a signal on to the groups of these workers; they go on."""

    signum: int
    ranks: frozenset[int]


@record
class Stop:
    """Ask these workers' groups to end, and the groups of those that have ended already."""

    signum: int
    ranks: frozenset[int]


@record
class Kill:
    """SIGKILL these workers' groups."""

    ranks: frozenset[int]


@record
class Sweep:
    """Look for processes that workers left behind, signal those found, answer `Swept` now and whenever one ends."""

    signum: int
    sparing: bool = True  # not those that tidy up behind others and then end by themselves


@record
class Retry:
    """All is gone, and another generation follows after `wait` seconds: tell of the failure, let go of what it held."""

    wait: float


@record
class Suspend:
    """SIGSTOP all workers' groups."""


@record
class Resume:
    """SIGCONT all workers' groups."""


@record
class Say:
    """Tell the user."""

    text: str


@record
class Exit:
    """All is gone: end with this status."""

    status: int


@record
class Announce:
    """Tell the coordinator that this node stops, and why."""

    why: Why
    signum: int


@record
class TellNotice:
    """Tell the coordinator that a notice came."""

    signum: int


@record
class Hurry:
    """Tell the coordinator that nobody wants to wait for the stop."""


@record
class Report:
    """All is gone: tell the coordinator how this node's workers ended, let go of what they held."""


Action = (
    Start
    | Forward
    | Stop
    | Kill
    | Sweep
    | Retry
    | Suspend
    | Resume
    | Say
    | Exit
    | Announce
    | TellNotice
    | Hurry
    | Report
)
