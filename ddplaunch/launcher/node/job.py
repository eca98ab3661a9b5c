"""What an agent (the process that supervises a node's workers) is started with: values that are made before it is forked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from msgspec import Struct

from ddplaunch.spec.outcome import ClusterQuestions

if TYPE_CHECKING:
    from typing import Protocol

    from ddplaunch.launcher.decide.node import Policy
    from ddplaunch.launcher.job.link import Link
    from ddplaunch.launcher.tell.reporter import Reporter
    from ddplaunch.launcher.workers.warm import Interpreter
    from ddplaunch.plan import Plan
    from ddplaunch.plan.cluster import Allocation
    from ddplaunch.plan.devices.node import Node
    from ddplaunch.spec.error_file import ErrorFiles
    from ddplaunch.spec.job import JobSpec
    from ddplaunch.spec.outcome import Intent
    from ddplaunch.system.console.streams import Screen
    from ddplaunch.system.loop.loop import Loop

    Connect = Callable[[Loop, Reporter], Link]  # gives the link to the coordinator

    class Requeue(Protocol):
        """What asks the cluster to queue the job again; each call may take seconds."""

        @property
        def job(self) -> str:
            """The job, by its id in the cluster."""

        @property
        def times_restarted(self) -> int:
            """How often the cluster has started the job again so far."""

        def decide(self, signum: int) -> Intent:
            """Find out whether the job is to be queued again after the notice `signum`."""

        def submit(self) -> str | None:
            """Queue the job again; give the reason in a sentence if that cannot be done."""

        def undecided(self, signum: int) -> Intent:
            """Return what `decide` comes to if the cluster has not answered."""

        @property
        def unsent(self) -> str | None:
            """What `submit` gives then."""

        def describe_wait(self) -> str:
            """Find out what the user is to be told while the cluster does not answer."""


class JobInputs(Struct, frozen=True, kw_only=True):
    """All that is known before the agent starts."""

    spec: JobSpec
    env: Mapping[str, str]  # of the caller
    allocation: Allocation
    node: Node
    draft: Plan  # complete for one node; with several, as if all were like this one
    screen: Screen
    error_files: ErrorFiles  # whose folder the command knows too: an agent that is killed leaves them
    reports_job: bool = True  # the whole of it, not only what happens here
    only_coordinates: bool = False  # this process has no workers: it coordinates agents that it has started
    reports_to_caller: bool = False  # how the job ended: to a caller in Python, in place of the user
    cluster: ClusterQuestions | None = None  # None: there is nobody to ask
    warm: Interpreter | None = None  # the interpreter that was kept, or is to be
    why_cold: str = ""  # why one that was asked for is not used, or another is; or that it is new


class FrontedJob(Struct, frozen=True, kw_only=True):
    """All that a loop behind a front needs to know, whether workers are its own or those of agents that it has started."""

    inputs: JobInputs
    signals: frozenset[int]  # that the front passes on, and that are taken as such when they come to us directly
    sent_again: frozenset[int] = frozenset()  # of which a second one does not escalate
    cluster_signals_all: bool = False  # whether the cluster may signal all processes of the job, see `SignalSource`
    requeue: Requeue | None = None  # if it is for this process to queue the job again


class AgentJob(FrontedJob, frozen=True, kw_only=True):
    """All that the agent of a node needs to know; made before it is forked."""

    policy: Policy
    link: Callable[[], Connect]  # prepares to reach the coordinator, or to be it, and imports what that takes
