"""DECIDE for the workers of one node: what follows from what happened. Pure; the agent feeds events and carries actions out.

Time comes inside the events, so there is no clock to fake. The agent answers `Sweep` with `Swept`, and feeds
`DeadlineReached` when `state.deadline` has come. The coordinator (`job`) begins every generation and decides what follows
from its end; what happens here is reported to it. A job of one node is no exception: its agent coordinates itself.
"""

from __future__ import annotations

from ddplaunch.launcher.decide.node.actions import *
from ddplaunch.launcher.decide.node.events import *
from ddplaunch.launcher.decide.node.state import END_TIMEOUT, Phase, Policy, State
from ddplaunch.launcher.decide.node.step import CAUSE_TIMEOUT, EARLY_EXIT_WARNING, LIKEWISE_TIMEOUT, step
from ddplaunch.launcher.decide.node.teardown import HANG_GRACE, KILL_TIMEOUT, SWEEP_GRACE, TIDY_TIMEOUT, Result
