"""DECIDE: what follows from what happened. Pure; the agent tells events, carries actions out and wakes at deadlines.

Time comes inside the events, so there is no clock to fake. The agent answers `Sweep` with `Swept`, and tells
`DeadlineReached` when `state.deadline` has come. With several nodes (`Policy.coordinated`) every generation begins and
ends with a word of the coordinator, and what happens here is announced to it; `coordinate` decides for the whole job.
"""

from __future__ import annotations

from ddplaunch.supervise.node.actions import (
    Action,
    Announce,
    Exit,
    Forward,
    Hurry,
    Kill,
    Report,
    Resume,
    Retry,
    Say,
    Start,
    Stop,
    Suspend,
    Sweep,
    TellNotice,
)
from ddplaunch.supervise.node.events import (
    Begun,
    DeadlineReached,
    Dismissed,
    Event,
    FrontLost,
    SignalReceived,
    StartFailed,
    Swept,
    ToldToKill,
    ToldToStop,
    WorkerExited,
    WorkerRaised,
    WorkerStarted,
)
from ddplaunch.supervise.node.state import Phase, Policy, State, Why
from ddplaunch.supervise.node.step import LINGER, SETTLE, begin, step
from ddplaunch.supervise.node.teardown import KILL_PATIENCE, SWEEP_GRACE, TIDY_PATIENCE, Result

__all__ = [
    "KILL_PATIENCE",
    "LINGER",
    "SETTLE",
    "SWEEP_GRACE",
    "TIDY_PATIENCE",
    "Action",
    "Announce",
    "Begun",
    "DeadlineReached",
    "Dismissed",
    "Event",
    "Exit",
    "Forward",
    "FrontLost",
    "Hurry",
    "Kill",
    "Phase",
    "Policy",
    "Report",
    "Result",
    "Resume",
    "Retry",
    "Say",
    "SignalReceived",
    "Start",
    "StartFailed",
    "State",
    "Stop",
    "Suspend",
    "Sweep",
    "Swept",
    "TellNotice",
    "ToldToKill",
    "ToldToStop",
    "Why",
    "WorkerExited",
    "WorkerRaised",
    "WorkerStarted",
    "begin",
    "step",
]
