"""DECIDE for the whole job: who takes part, when to start, what a failure on one node means for the others.

Pure, as `supervise` is for the workers of one node: events come in with their time, actions go out. Every agent, the
coordinator's own included, is a member like any other; what a member says has been checked and put on one clock before.
"""

from __future__ import annotations

from ddplaunch.supervise.job.actions import Action, Begin, Dismiss, Drop, Kill, Refuse, Report, Say, Stop
from ddplaunch.supervise.job.events import (
    DeadlineReached,
    Event,
    JobStopping,
    Joined,
    Left,
    NodeEnded,
    NodeKilling,
    NodeNoticed,
    NodeStopping,
    OneFewer,
)
from ddplaunch.supervise.job.state import OWN, Member, Phase, Policy, StartFailed, State, Why
from ddplaunch.supervise.job.step import Result, begin, step

__all__ = [
    "OWN",
    "Action",
    "Begin",
    "DeadlineReached",
    "Dismiss",
    "Drop",
    "Event",
    "JobStopping",
    "Joined",
    "Kill",
    "Left",
    "Member",
    "NodeEnded",
    "NodeKilling",
    "NodeNoticed",
    "NodeStopping",
    "OneFewer",
    "Phase",
    "Policy",
    "Refuse",
    "Report",
    "Result",
    "Say",
    "StartFailed",
    "State",
    "Stop",
    "Why",
    "begin",
    "step",
]
