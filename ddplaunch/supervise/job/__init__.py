"""DECIDE for the whole job: who takes part, when to start, what a failure on one node means for the others, the status.

Pure, as `node` is for the workers of one node: events come in with their time, actions go out. Every agent, the
coordinator's own included, is a member like any other; the times in its reports have been put on one clock before.
"""

from __future__ import annotations

from ddplaunch.supervise.job.actions import *
from ddplaunch.supervise.job.ending import Result
from ddplaunch.supervise.job.events import *
from ddplaunch.supervise.job.state import NO_MEMBER, SELF_ID, Member, Phase, Policy, State
from ddplaunch.supervise.job.step import begin, step
