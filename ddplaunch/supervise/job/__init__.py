"""DECIDE for the whole job: who takes part, when to start, what a failure on one node means for the others, the status.

Pure, as `node` is for the workers of one node: events come in with their time, actions go out. Every agent, the
coordinator's own included, is a member like any other; what a member reports has been checked and put on one clock before.
"""

from __future__ import annotations

from ddplaunch.supervise.job.actions import (
    Action,
    BeginGeneration,
    Drop,
    EndJob,
    KillNodes,
    NameStill,
    Print,
    Refuse,
    Release,
    ReportFailure,
    StopNodes,
)
from ddplaunch.supervise.job.ending import Result
from ddplaunch.supervise.job.events import (
    BeginFailed,
    DeadlineReached,
    Event,
    JobResumed,
    JobSuspended,
    Joined,
    Left,
    NodeEnded,
    NodeEscalated,
    NodeGivenUp,
    NodeNoticed,
    NodeStill,
    NodeStopping,
    PortTaken,
    StopRequested,
    TimeoutHeld,
    event_of,
)
from ddplaunch.supervise.job.state import OWN, Member, Phase, Policy, State
from ddplaunch.supervise.job.step import begin, step
