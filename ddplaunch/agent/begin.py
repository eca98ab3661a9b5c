"""The agent from its fork to its loop: what it knows by then, and what is made ready beside it.

The command imports only what it needs itself to find out all that an error could tell. What the agent alone needs is imported
in the agent: the command stays small, a fork of it is quick, and no page of those modules is copied. The process that writes
files is forked before that, and does its own imports meanwhile. A signal that asks for the end before all is imported has the
front kill the agent, see `child.claim`: nothing has been started.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from msgspec import Struct

from ddplaunch import exitcodes
from ddplaunch.agent import child
from ddplaunch.errors import own_imports
from ddplaunch.process.linux import become_subreaper
from ddplaunch.report.writer_start import start_writer

if TYPE_CHECKING:
    import selectors

    from ddplaunch.agent.pipes import FrontPipes
    from ddplaunch.agent.shutdown import Requeue
    from ddplaunch.cluster import Allocation
    from ddplaunch.coordinator.link import Link, LinkHandler
    from ddplaunch.devices.node import Node
    from ddplaunch.output.streams import Screen
    from ddplaunch.plan import Plan
    from ddplaunch.report.error_file import ErrorFiles
    from ddplaunch.report.reporter import Reporter
    from ddplaunch.spec import JobSpec
    from ddplaunch.supervise.node import Policy
    from ddplaunch.supervise.outcome import ClusterEnding
    from ddplaunch.warm.find import Place

    Connect = Callable[[LinkHandler, Reporter, selectors.BaseSelector], Link]  # gives the link to the coordinator


class JobInputs(Struct, frozen=True, kw_only=True):
    """All that is known before the agent starts."""

    spec: JobSpec
    env: Mapping[str, str]  # of the caller
    allocation: Allocation
    node: Node
    draft: Plan  # complete for one node; with several, as if all were like this one
    screen: Screen
    error_files: ErrorFiles  # whose place the command knows too: an agent that is killed leaves them
    reports_job: bool = True  # the whole of it, not only what happens here
    notifies_starter: bool = False  # of each worker's pid: the command that started this agent
    reports_to_caller: bool = False  # how the job ended: to a caller in Python, in place of the user
    why_ending: Callable[[], ClusterEnding] | None = None  # asks the cluster, which may take seconds
    warm: Place | None = None  # the interpreter that was kept, or is to be
    why_cold: str = ""  # why one that was asked for is not used, or another is


class AgentJob(Struct, frozen=True, kw_only=True):
    """All that the agent of a node needs to know; made before it is forked."""

    policy: Policy
    inputs: JobInputs
    link: Callable[[], Connect]  # prepares to reach the coordinator, or to be it, and imports what that takes
    signals: frozenset[int]  # that the front passes on, and that are taken as such when they come to us directly
    sent_again: frozenset[int]  # of which a second one does not escalate
    signals_all: bool = False  # whether the cluster may signal all processes of the job, see `SignalSource`
    requeue: Requeue | None = None  # if it is for this process to queue the job again


def run(job: AgentJob, pipes: FrontPipes) -> int:
    """Carry the job out and give its exit status. Runs in a process of its own, in which signals are still blocked.

    Raises:
        LaunchError: its modules cannot be imported, or it cannot prepare to meet the others.
    """
    become_subreaper()
    files = start_writer()
    try:
        connect = job.link()
        with own_imports():
            from ddplaunch.agent import loop  # from the claim on all is here
        if not child.claim(pipes):
            return exitcodes.BUG  # which nobody sees: the front ends this process
        return loop.run(job, connect, files, pipes)
    finally:
        job.inputs.error_files.remove()
