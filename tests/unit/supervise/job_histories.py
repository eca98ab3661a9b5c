"""What the histories of a job of several nodes are made of."""

from collections.abc import Iterable
from signal import SIGTERM
from typing import Any

from ddplaunch.launcher.decide import job
from ddplaunch.launcher.decide.job import (
    Action,
    EndJob,
    Event,
    Joined,
    Member,
    NodeEnded,
    NodeStopping,
    Policy,
    Print,
    State,
)
from ddplaunch.spec.outcome import StartFailure, Why, WorkerExit
from tests.unit.builders import worker_exit
from tests.unit.supervise.phases import job_step

THREE = Policy(min_nodes=3, max_nodes=3)
ELASTIC = Policy(min_nodes=2, max_nodes=3, last_call=30.0)
TOO_FEW = EndJob(
    122,
    "too few nodes are left, and the rendezvous timed out: 1 of 2 nodes joined (a); missing: 1 more",
    hint="type the same command on another node in time, or allow fewer nodes, as `--nnodes MIN:MAX` does",
)


def member(id: int, wanted: int | None = None, **fields: Any) -> Member:
    return Member(id=id, host="abcdef"[id], workers=1, requested_rank=wanted, **fields)


def end(rank: int, host: str, at: float, code: int | None = 0, **fields: Any) -> WorkerExit:
    return worker_exit(rank, code, **{"local_rank": 0, "host": host, "at": at, **fields})


def stopped(rank: int, host: str, at: float) -> WorkerExit:
    return end(rank, host, at, code=None, signal=SIGTERM, stopped_with=SIGTERM, stopped_at=at - 0.1)


def ended(id: int, at: float, *exits: WorkerExit, failed: StartFailure | None = None) -> NodeEnded:
    return NodeEnded(id, exits or (end(id, "abcdef"[id], at),), failed, at)


def failing(id: int, at: float, code: int = 7) -> list[Event]:
    """A worker of this node fails by itself, and the node ends."""
    return [NodeStopping(id, Why.FAILED, SIGTERM, at), ended(id, at + 0.1, end(id, "abcdef"[id], at, code))]


def stopping(id: int, at: float) -> NodeEnded:
    return ended(id, at, stopped(id, "abcdef"[id], at))


def history(policy: Policy, events: Iterable[Event], first_term: int = 1) -> tuple[State, list[Action]]:
    state = job.first_state(policy, 0.0, first_term)
    done: list[Action] = []
    for event in events:
        state, actions = job_step(state, event)
        done += actions
    return state, done


def met(number: int = 3) -> list[Event]:
    return [Joined(member(id), 0.1 * id) for id in range(number)]


def silent(actions: Iterable[Action]) -> list[Action]:
    return [action for action in actions if not isinstance(action, Print)]
