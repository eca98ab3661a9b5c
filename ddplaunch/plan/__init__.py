"""PLAN: the decided job, as values. `make.py` makes it, `ddplaunch plan` shows it, the agent carries it out. Starts nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Annotated, Any

from msgspec import Meta, Struct

from ddplaunch.fields import MAX_RANKS, MAX_SEATS, Backend, Host, Line, Name, Number, Workers


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
    variables: Mapping[str, str]
    device: str = "cpu"  # right inside the worker: "cuda:2", "cuda:0", "cpu"
    devices: tuple[str, ...] = ()  # the node's devices that it owns, for people: "cuda:2", "GPU-8932..."
    cpus: tuple[int, ...] = ()  # CPUs it is bound to; empty: not bound
    terminal: bool = False  # it has the command's own stdin, stdout and stderr
    stdin: bool = False  # it reads the command's stdin; the others read /dev/null


HIDDEN = "..."  # in place of a value that is shown nowhere


class Seat(Struct, frozen=True):
    """A node as all others see it; where a command was started for each rank, one such command."""

    host: Host  # "" of another node that runs elsewhere
    workers: Workers


class SeatRun(Struct, frozen=True, array_like=True):
    """So many seats in a row with equally many workers each."""

    seats: Annotated[int, Meta(ge=1, le=MAX_SEATS)]
    workers: Workers


def seat_runs(seats: Iterable[Seat]) -> tuple[SeatRun, ...]:
    """Return the numbers of workers of these seats as runs of equal ones."""
    alike = groupby(seat.workers for seat in seats)
    return tuple(SeatRun(sum(1 for _ in each), workers) for workers, each in alike)


class Plan(Struct, frozen=True, kw_only=True):
    """The whole job, decided: nothing below it decides again."""

    run_id: str
    cluster: str
    nnodes: int
    node_rank: int  # the node this plan is carried out on
    seats: tuple[Seat, ...]  # of the whole job, in order of their ranks
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

    def shown(self, variables: Mapping[str, str]) -> dict[str, str]:
        """Return the variables of a worker as others may see them."""
        return {name: HIDDEN if name in self.secret else value for name, value in variables.items()}

    @property
    def world_size(self) -> int:
        """How many workers the job has on all nodes."""
        return sum(seat.workers for seat in self.seats)

    def data(self, origins: Mapping[str, str]) -> dict[str, Any]:
        """Return what plan.json holds and `ddplaunch plan --json` prints; docs/reference/run-folder.md has its schema."""
        return {
            "v": 1,
            "run_id": self.run_id,
            "cluster": self.cluster,
            "nnodes": self.nnodes,
            "world_size": self.world_size,
            "master_addr": self.master_addr,
            "master_port": self.master_port,
            "init_method": self.init_method,
            "backend": self.backend,
            "pin": self.pin,
            "reasons": dict(self.reasons),
            "origins": dict(origins),
            "notes": list(self.notes),
            "workers": [
                {
                    "rank": worker.rank,
                    "local_rank": worker.local_rank,
                    "node_rank": worker.node_rank,
                    "host": worker.host,
                    "device": worker.device,
                    "devices": list(worker.devices),
                    "cpus": list(worker.cpus),
                    "argv": list(worker.argv),
                    "variables": self.shown(worker.variables),
                }
                for worker in self.workers
            ],
        }


class Agreed(Struct, frozen=True, kw_only=True):
    """What the agents of several nodes have agreed on before a generation; the coordinator sends it to each of them."""

    run_id: Name
    place: Number  # which of the seats is this node's
    # by place; one by one, seats would be most of all that is sent
    seat_runs: Annotated[tuple[SeatRun, ...], Meta(max_length=MAX_SEATS)]
    address: Host  # MASTER_ADDR
    backend: Backend
    backend_reason: Line

    def __post_init__(self) -> None:
        if self.nnodes > MAX_SEATS or self.place >= self.nnodes:
            raise ValueError(f"place {self.place} of {self.nnodes} seats")
        if sum(run.seats * run.workers for run in self.seat_runs) > MAX_RANKS:
            raise ValueError("more ranks than there can be")

    @property
    def nnodes(self) -> int:
        """How many seats there are."""
        return sum(run.seats for run in self.seat_runs)

    @property
    def seats(self) -> tuple[Seat, ...]:
        """The seats, without the names of their hosts."""
        return tuple(Seat("", run.workers) for run in self.seat_runs for _ in range(run.seats))

    @property
    def ranks(self) -> range:
        """The ranks of this node: they are node-major, those of the seats before it come first."""
        first, before = 0, self.place
        for run in self.seat_runs:
            if before < run.seats:
                return range(first + before * run.workers, first + (before + 1) * run.workers)
            first, before = first + run.seats * run.workers, before - run.seats
        raise AssertionError("the place is one of the seats")
