"""DECIDE for the whole job: who takes part, when to start, what a failure on one node means for the others, the status.

Pure, as `node` is for the workers of one node: events come in with their time, actions go out. Every agent, the
coordinator's own included, is a member like any other; the times in its reports have been put on one clock before.

`step` is the table of events. It begins a generation in `starting`, by the `rendezvous`; decides in `node_loss` and `partition`
what the loss of nodes means, in `ending` what follows from the end of a generation, in `restarts` whether another one may help.
"""

from __future__ import annotations

from ddplaunch.launcher.decide.job.actions import *
from ddplaunch.launcher.decide.job.ending import Result, status_if_ending
from ddplaunch.launcher.decide.job.events import *
from ddplaunch.launcher.decide.job.members import KILLED_WITHIN, NO_MEMBER, SELF_ID, Member, Policy
from ddplaunch.launcher.decide.job.starting import first_state
from ddplaunch.launcher.decide.job.state import Phase, State
from ddplaunch.launcher.decide.job.step import step
