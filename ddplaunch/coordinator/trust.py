"""What each side believes of the other. Pure.

An agent with the secret may lie about its own workers, and about no others. The bounds follow from how many workers it has and
how many the job has, and are checked before any work is done with what was sent. Node 0 may order an agent to do its own part,
and no other.
"""

from __future__ import annotations

from collections.abc import Sequence

from ddplaunch.control.questions import MAX_ENTRIES, Answer, NodeArrivals, NodeStacks, NodeStatus, StacksAtEnd
from ddplaunch.coordinator.link import Generation, NodeEnd
from ddplaunch.coordinator.messages import Hello, ToAgent, Watch, Withdrawal
from ddplaunch.fields import Malformed

# --- reports: those of an agent are about its own workers, and no more than these can have


_MAX_PROCESSES = 65  # of a worker: itself, and what `stacks.take` asks at most of what it has started
_MAX_SERIES = 128  # of a worker: process groups


def speaks_for_others(report: NodeEnd | StacksAtEnd, own: Sequence[int]) -> bool:
    """Whether what is said of the end of a generation names workers that are not the agent's own, or ends one of them twice."""
    if isinstance(report, StacksAtEnd):
        return not all(process.rank in own for process in report.stacks.processes)
    ranks = [end.rank for end in report.exits]
    named = [*ranks, *([report.start_failure.rank] if report.start_failure else [])]
    return len(set(ranks)) < len(ranks) or not all(rank in own for rank in named)


def why_refused(answer: Answer, own: Sequence[int], seats: int, world_size: int) -> str:
    """Say, as a predicate, why an answer is not to be taken; "" if it is.

    `own` are the ranks of the agent, none if it takes no part in a generation: then it may say of at most `seats` workers that
    they wait to be started.
    """
    match answer:
        case NodeStatus(workers):
            ranks = [worker.rank for worker in workers]
            is_own = all(rank in own for rank in ranks) if own else not any(worker.pid for worker in workers)
            if not is_own or len(set(ranks)) < len(ranks) or len(ranks) > seats:
                return "speaks of workers that are not its own"
        case NodeStacks(processes=processes):
            if not all(process.rank in own for process in processes):
                return "speaks of workers that are not its own"
            return why_too_much(answer, len(own), world_size)
        case NodeArrivals(series=series):
            if not all(each.rank in own for each in series):
                return "speaks of workers that are not its own"
            entries = sum(len(each.numbers) + len(each.times) for each in series)
            if len(series) > _MAX_SERIES * len(own) or entries > 2 * MAX_ENTRIES * len(own):
                return "has more to say of collectives than its workers can have called"
    return ""


def why_too_much(found: NodeStacks, workers: int, world_size: int) -> str:
    """Say, as a predicate, why these stacks cannot be those of so many workers of a job; "" if they can."""
    if len(found.processes) > _MAX_PROCESSES * workers:
        return "has more processes than its workers can have started"
    if any(len(ranks) > world_size or max(ranks, default=0) >= world_size for ranks in found.members):
        return "has process groups of more ranks than the job has"
    return ""


# --- orders: those that fit what an agent has said of itself, in their order


class OrderSequence:
    """What has been said and ordered so far."""

    def __init__(self, hello: Hello | Watch | Withdrawal) -> None:
        self._hello = hello
        self._generation = -1  # the latest
        self._runs = False  # its end was not reported yet

    def ended(self) -> None:
        """Note that the end of the generation was reported."""
        self._runs = False

    def check(self, message: ToAgent) -> None:
        """Take the next message.

        Raises:
            Malformed: it begins what this agent cannot begin.
        """
        if not isinstance(message, Generation):
            return
        agreed, hello = message.agreed, self._hello
        if agreed is None:
            raise Malformed("begins workers without saying which")
        if not isinstance(hello, Hello):
            raise Malformed("begins workers where there are none")
        if len(agreed.ranks) != hello.seat.workers:
            raise Malformed(f"place {agreed.place} has another number of workers")
        if hello.place is not None and hello.place < agreed.nnodes and agreed.place != hello.place:
            raise Malformed(f"place {agreed.place} for node rank {hello.place}")
        if self._runs or message.number <= self._generation:
            raise Malformed(f"generation {message.number} after {self._generation}")
        self._generation, self._runs = message.number, True
