"""What the histories of a node's workers, and those of a job of one node, are made of."""

from signal import SIGHUP, SIGINT, SIGQUIT, SIGTERM
from typing import Any

from msgspec.structs import replace

from ddplaunch.launcher.decide import job, node
from ddplaunch.launcher.decide.job import SELF_ID, Member
from ddplaunch.launcher.decide.node import Policy, SignalReceived, Swept, WorkerExited, WorkerStarted
from ddplaunch.spec.outcome import Why, WorkerError
from tests.unit.builders import worker_exit
from tests.unit.supervise.phases import job_step, node_step

ALL = frozenset(range(3))
POLICY = Policy(ranks=ALL, stop_signals=frozenset({SIGINT, SIGTERM, SIGHUP, SIGQUIT}), grace_period=10.0)
LOST = WorkerError(
    type="RuntimeError", message="[x/gloo/transport/tcp/pair.cc:1] Connection closed by peer", traceback=""
)
OWN_ERROR = WorkerError(type="ValueError", message="boom", traceback="", at=0.9)


def ended(
    rank: int, at: float = 1.0, *, code: int | None = 0, signal: int | None = None, **more: object
) -> WorkerExited:
    return WorkerExited(worker_exit(rank, code, signal, host="here", at=at, **more), at)


def calm(signum: int, at: float) -> SignalReceived:
    """A signal that shows no impatience."""
    return SignalReceived(signum, at, is_request=False)


STARTED = tuple(WorkerStarted(rank, 0.1) for rank in ALL)
NOTHING_LEFT = Swept((), 5.0)
LEFT = Swept(("pid 7 (sleep)",), 5.0)


class OneNode:
    """A job of one node: its workers' state and the job's, between which reports and orders pass as in one process."""

    def __init__(self, policy: Policy = POLICY, *, max_nodes: int = 1, **of_job: Any) -> None:
        self.node = node.State(policy=policy)
        self.job = job.first_state(job.Policy(min_nodes=1, max_nodes=max_nodes, last_call=0.0, **of_job), 0.0, 1)
        self._ranks = policy.ranks
        self._asked: list[node.Action | job.Action] = []
        self._decide(job.Joined(Member(id=SELF_ID, host="here", workers=len(policy.ranks), requested_rank=0), 0.0), 0.0)
        if max_nodes > 1:
            self._decide(job.DeadlineReached(0.0), 0.0)  # nobody else comes

    def take(self, event: node.Event) -> list[node.Action | job.Action]:
        """Return what the event asks of the operating system, and what the user is told."""
        self._asked = []
        self._act(event, event.at)
        if isinstance(event, node.DeadlineReached):
            self._decide(job.DeadlineReached(event.at), event.at)
        return self._asked

    @property
    def deadline(self) -> float | None:
        """When the agent would wake at the latest."""
        deadlines = (self.node.deadline, self.job.deadline)
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.node, name)

    def _decide(self, event: job.Event, at: float) -> None:
        self.job, actions = job_step(self.job, event)
        for action in actions:
            match action:
                case job.BeginGeneration(number):
                    self._act(node.GenerationBegun(number, self._ranks, at, is_only_node=True), at)
                case job.StopNodes(ids, signum, job_stands_still=stands_still) if SELF_ID in ids:
                    self._act(
                        node.StopOrdered(signum, at, self.job.why or Why.COORDINATOR, job_stands_still=stands_still), at
                    )
                case job.KillNodes(ids) if SELF_ID in ids:
                    self._act(node.KillOrdered(at), at)
                case job.EndJob(status):
                    self._act(node.JobEnded(status, at), at)
                case job.ReportFailure() | job.Print() | job.PrintIdle() | job.PrintProgress():
                    self._asked.append(action)

    def _act(self, event: node.Event, at: float) -> None:
        if self.node.phase is node.Phase.ENDED:
            return
        self.node, actions = node_step(self.node, event)
        for action in actions:
            match action:
                case node.ReportStopping(why, signum):
                    self._decide(job.NodeStopping(SELF_ID, why, signum, at), at)
                case node.ReportNotice(signum):
                    self._decide(job.NodeNoticed(SELF_ID, signum), at)
                case node.ReportIdle(seconds):
                    self._decide(job.NodeIdle(SELF_ID, at - seconds, at), at)
                case node.Escalate(signum):
                    self._decide(job.NodeEscalated(SELF_ID, signum, at), at)
                case node.ReportEnded():
                    raised = dict(self.node.raised.errors)
                    exits = tuple(replace(end, error=end.error or raised.get(end.rank)) for end in self.node.exits)
                    self._decide(
                        job.NodeEnded(SELF_ID, exits, self.node.start_failure, at, self.node.teardown.leftovers), at
                    )
                case node.PauseLimits(paused):
                    self._decide(job.LimitsPaused(SELF_ID, paused), at)
                case node.Suspend():
                    self._asked.append(action)
                    self._decide(job.JobSuspended(at), at)
                case node.Resume():
                    self._asked.append(action)
                    self._decide(job.JobResumed(at), at)
                case _:
                    self._asked.append(action)


def one_node(
    *events: node.Event, policy: Policy = POLICY, **of_job: Any
) -> tuple[OneNode, list[node.Action | job.Action]]:
    """The states after these events, and what the last one asked for; with none, what the start did."""
    whole = OneNode(policy, **of_job)
    asked = whole._asked
    for event in events:
        asked = whole.take(event)
    return whole, asked
