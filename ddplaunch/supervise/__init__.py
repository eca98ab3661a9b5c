"""DECIDE: what follows from what happened. Pure; the agent tells events, carries actions out and wakes at deadlines.

Time comes inside the events, so there is no clock to fake. The agent answers `Sweep` with `Swept`, and tells
`DeadlineReached` when `state.deadline` has come. What other agents say will be further events of the same step.
"""

from __future__ import annotations

from ddplaunch.supervise.actions import Action, Exit, Forward, Kill, Resume, Retry, Say, Start, Stop, Suspend, Sweep
from ddplaunch.supervise.events import (
    DeadlineReached,
    Event,
    FrontLost,
    SignalReceived,
    StartFailed,
    Swept,
    WorkerExited,
    WorkerRaised,
    WorkerStarted,
)
from ddplaunch.supervise.state import Phase, Policy, State, Why
from ddplaunch.supervise.step import KILL_PATIENCE, LINGER, SETTLE, SWEEP_GRACE, Result, begin, step

__all__ = [
    "KILL_PATIENCE",
    "LINGER",
    "SETTLE",
    "SWEEP_GRACE",
    "Action",
    "DeadlineReached",
    "Event",
    "Exit",
    "Forward",
    "FrontLost",
    "Kill",
    "Phase",
    "Policy",
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
    "Why",
    "WorkerExited",
    "WorkerRaised",
    "WorkerStarted",
    "begin",
    "step",
]
