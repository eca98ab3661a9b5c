"""How a node answers what is asked about its workers. Looks at them, and changes nothing.

An answer may come later: the loop never waits for one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ddplaunch.agent.stack_taker import StackTaker
from ddplaunch.agent.workers import Workers
from ddplaunch.control.handshake import LIMIT
from ddplaunch.control.questions import (
    MAX_WORKERS,
    Answer,
    AskArrivals,
    AskStacks,
    AskStatus,
    NoAnswer,
    NodeArrivals,
    NodeStatus,
    Question,
    WorkerStatus,
)
from ddplaunch.control.requests import encode
from ddplaunch.fields import line
from ddplaunch.plan import Plan, WorkerPlan
from ddplaunch.process.child import RunningWorker
from ddplaunch.process.tree import usage
from ddplaunch.stacks import Sample
from ddplaunch.stacks.sent import sent

if TYPE_CHECKING:
    from ddplaunch.loop.loop import Asked

_ROOM = 4096  # bytes of a frame for what is around an answer
_NO_ROOM = NoAnswer("could not create the process that asks the workers")


def answer(
    question: Question,
    workers: Workers | None,
    plan: Plan,
    debugged: frozenset[int],
    taker: StackTaker,
    reply: Callable[[Answer], None],
) -> Asked[Any] | None:
    """Answer, now or later, by a call of `reply`; `plan` has the workers that there will be, or were, while there are none.

    `debugged` are the ranks that have a debugger. What is returned is the child that answers later, if one does.
    """
    match question:
        case AskStatus():
            reply(_bounded(_status(workers, plan, debugged)))
        case AskStacks(within, threads, native):
            running = workers.running.values() if workers is not None else ()
            return taker.take(
                running,
                within,
                lambda found: reply(found or _NO_ROOM),
                made=partial(_stacks, threads=threads),
                native=native,
                ras=True,
            )
        case AskArrivals(within, every):
            recorders = {} if workers is None else workers.recorders
            if recorders:
                return taker.read_arrivals(recorders, within, every, lambda found: reply(_bounded(found or _NO_ROOM)))
            reply(NodeArrivals(wall=0, members=(), series=()))
    return None


def _stacks(samples: Sequence[Sample], *, threads: bool) -> Answer:
    """Return the answer; runs in the child that has taken them."""
    answer = _bounded(sent(samples, threads=threads))
    # the main threads of all workers are worth more than all threads of none
    return _bounded(sent(samples, threads=False)) if isinstance(answer, NoAnswer) and threads else answer


def _bounded(answer: Answer) -> Answer:
    """The answer, if it is no longer than a frame may be."""
    size = len(encode(answer))
    return answer if size <= LIMIT - _ROOM else NoAnswer(f"has an answer of {size} bytes, more than a message holds")


def _status(workers: Workers | None, plan: Plan, debugged: frozenset[int]) -> NodeStatus:
    plans = (plan.workers if workers is None else workers.plans)[:MAX_WORKERS]
    running = workers.running if workers is not None else {}
    quiet = workers.quiet if workers is not None else {}
    now = time.monotonic()
    return NodeStatus(
        tuple(_worker(plan, running.get(plan.rank), quiet.get(plan.rank), plan.rank in debugged, now) for plan in plans)
    )


def _worker(
    plan: WorkerPlan, running: RunningWorker | None, quiet: float | None, debugged: bool, now: float
) -> WorkerStatus:
    used = usage(running.pid) if running is not None else None
    state, how = _state(running, used.state if used is not None else "", debugged)
    return WorkerStatus(
        rank=plan.rank,
        local_rank=plan.local_rank,
        pid=running.pid if running is not None else 0,
        device=line(plan.device),
        state=state,
        how=how,
        seconds=max(0.0, now - running.started_at) if running is not None else 0.0,
        cpu_seconds=used.cpu_seconds if used is not None else 0.0,
        rss=used.rss if used is not None else 0,
        quiet=quiet,
    )


def _state(running: RunningWorker | None, kernel: str, debugged: bool) -> tuple[str, str]:
    """The state of a worker in a word, and how it ended; `kernel` is the letter of proc(5)."""
    if running is None:
        return "waiting", ""
    if (end := running.look()) is not None:
        return "ended", line(str(end))
    if kernel in _STATES:
        return _STATES[kernel], ""
    if running.stopped_with is not None:
        return "stopping", ""
    return ("debugged" if debugged else "running"), ""


_STATES = {"D": "uninterruptible", "T": "suspended", "t": "traced"}
