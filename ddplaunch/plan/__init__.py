"""PLAN: where a job runs and with what, decided: clusters, devices, ranks, variables.

`make.py` makes the plan, `ddplaunch plan` shows it, the agent carries it out. Nothing here starts anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Annotated, Any

from msgspec import Meta, Struct

from ddplaunch.system.fields import MAX_AGENTS, MAX_RANKS, Backend, Host, Line, Name, Number, Workers
from ddplaunch.system.redaction import HIDDEN, Redactor


class WorkerPlan(Struct, frozen=True, kw_only=True):
    """One worker before it is started: who it is, what it runs and what it owns.

    `variables` is what ddplaunch sets for the whole job; `plan/variables.py` adds what each generation sets.
    Both override the caller's environment.
    """

    rank: int
    local_rank: int
    node_rank: int
    host: str
    argv: tuple[str, ...]
    wrap: tuple[str, ...] = ()  # a command that starts `argv`, with names in braces, see `wrapped`
    variables: Mapping[str, str]
    device: str = "cpu"  # right inside the worker: "cuda:2", "cuda:0", "cpu"
    devices: tuple[str, ...] = ()  # the node's devices that it owns, for people: "cuda:2", "GPU-8932..."
    cpus: tuple[int, ...] = ()  # CPUs it is bound to; empty: not bound
    terminal: bool = False  # it has the command's own stdin, stdout and stderr
    stdin: bool = False  # it reads the command's stdin; the others read /dev/null

    def wrapped(self, folder: str) -> tuple[str, ...]:
        """Return the command line of the worker's process, of a run with this folder."""
        if not self.wrap:
            return self.argv
        facts = {"rank": self.rank, "local_rank": self.local_rank, "node_rank": self.node_rank, "host": self.host}
        return (*(word.format(run=folder, **facts) for word in self.wrap), *self.argv)


# the fields in plan.json that need no change
_SHOWN = ("run_id", "cluster", "nnodes", "world_size", "master_addr", "master_port", "init_method", "backend", "pin")
_SHOWN_OF_WORKERS = ("rank", "local_rank", "node_rank", "host", "device", "devices", "cpus", "argv", "wrap")


class PlannedAgent(Struct, frozen=True):
    """An agent as all others know it: one for each node, or for each rank where the cluster starts a command for each."""

    host: Host  # "" of another node that runs elsewhere
    workers: Workers


class AgentRun(Struct, frozen=True, array_like=True):
    """So many agents in a row with equally many workers each."""

    agents: Annotated[int, Meta(ge=1, le=MAX_AGENTS)]
    workers: Workers


def agent_runs(agents: Iterable[PlannedAgent]) -> tuple[AgentRun, ...]:
    """Return the numbers of workers of these agents as runs of equal ones."""
    alike = groupby(agent.workers for agent in agents)
    return tuple(AgentRun(sum(1 for _ in each), workers) for workers, each in alike)


class Plan(Struct, frozen=True, kw_only=True):
    """The whole job, decided: nothing below it decides again."""

    run_id: str
    cluster: str
    nnodes: int
    node_rank: int  # the node this plan is carried out on
    agents: tuple[PlannedAgent, ...]  # of the whole job, in order of their ranks
    master_addr: str
    master_port: int | None  # None: reserved when the job starts
    init_method: str  # "env", "tcp", "file:PATH"
    backend: str
    pin: str
    interpreter: str | None  # that runs the program; None: it is no Python program
    workers: tuple[WorkerPlan, ...]  # of this node, by rank
    preload: tuple[str, ...] | None = None  # what a fork server imports before workers; None: they are fresh processes
    keep_warm: int | None = None  # seconds for which that stays, unused, for the next run; None: it ends with this one
    secret: frozenset[str] = frozenset()  # variables of workers whose values are shown nowhere
    preload_is_asked: bool = True  # --start-method says so
    authenticated: bool = True  # the agents share a secret, or do not talk
    requeues: int = 0  # how often the cluster has started this job again
    reasons: Mapping[str, str] = {}  # decided value -> why
    notes: tuple[str, ...] = ()  # what a reader of the plan should know

    @property
    def ranks(self) -> frozenset[int]:
        """The ranks of the workers of this node."""
        return frozenset(worker.rank for worker in self.workers)

    def shown(self, variables: Mapping[str, str], redactor: Redactor) -> dict[str, str]:
        """Return the variables of a worker as others may see them."""
        return {
            name: HIDDEN if name in self.secret else redactor.variable(name, value) for name, value in variables.items()
        }

    @property
    def world_size(self) -> int:
        """How many workers the job has on all nodes."""
        return sum(agent.workers for agent in self.agents)

    def data(self, origins: Mapping[str, str], known: Iterable[str] = ()) -> dict[str, Any]:
        """Return what plan.json holds and `ddplaunch plan --json` prints; docs/reference/run-folder.md has its schema.

        `known` are secrets that are hidden wherever they stand.
        """
        redactor = Redactor(known)
        return {
            "v": 1,
            **{name: getattr(self, name) for name in _SHOWN},
            **redactor.data({"reasons": self.reasons, "origins": dict(origins), "notes": self.notes}),
            "workers": [
                {name: getattr(worker, name) for name in _SHOWN_OF_WORKERS}
                | {"argv": redactor.argv(worker.argv), "wrap": redactor.argv(worker.wrap)}
                | {"variables": self.shown(worker.variables, redactor)}
                for worker in self.workers
            ],
        }


class Agreed(Struct, frozen=True, kw_only=True):
    """What the agents of several nodes have agreed on before a generation; the coordinator sends it to each of them."""

    run_id: Name
    index: Number  # of the agent that gets this, among all in order of their ranks
    # one by one, agents would be most of all that is sent
    agent_runs: Annotated[tuple[AgentRun, ...], Meta(max_length=MAX_AGENTS)]
    address: Host  # MASTER_ADDR
    backend: Backend
    backend_reason: Line

    def __post_init__(self) -> None:
        if self.nnodes > MAX_AGENTS or self.index >= self.nnodes:
            raise ValueError(f"agent {self.index} of {self.nnodes}")
        if sum(run.agents * run.workers for run in self.agent_runs) > MAX_RANKS:
            raise ValueError("more ranks than there can be")

    @property
    def nnodes(self) -> int:
        """How many agents there are."""
        return sum(run.agents for run in self.agent_runs)

    @property
    def agents(self) -> tuple[PlannedAgent, ...]:
        """The agents, without the names of their hosts."""
        return tuple(PlannedAgent("", run.workers) for run in self.agent_runs for _ in range(run.agents))

    @property
    def ranks(self) -> range:
        """The ranks of this node: they are node-major, those of the agents before it come first."""
        first, before = 0, self.index
        for run in self.agent_runs:
            if before < run.agents:
                return range(first + before * run.workers, first + (before + 1) * run.workers)
            first, before = first + run.agents * run.workers, before - run.agents
        raise AssertionError("the index is that of one of the agents")
