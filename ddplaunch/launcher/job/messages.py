"""All that agents and the coordinator send each other, and what each believes: reports and orders, and what the channel needs.

Pure: values to bytes and back. What does not fit its type exactly, or contradicts itself, is refused, whichever side has sent it.
A sender makes the texts of programs valid before that (`fitted`). Sizes are bounded twice: by the frame, and by the types.

An agent with the secret may lie about its own workers, and about no others: the bounds follow from how many workers it has and
how many the job has, and are checked before any work is done with what was sent. The coordinator may order an agent to do its own
part, and no other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from ddplaunch.launcher.decide import node
from ddplaunch.launcher.decide.first_failure import failed_at, failed_itself
from ddplaunch.launcher.job.orders import (
    MAX_LEFTOVERS,
    Generation,
    JobEnd,
    Lead,
    MeetAt,
    NodeEnd,
    SentOrder,
    SentReport,
)
from ddplaunch.reach.channel.streams import Chunk
from ddplaunch.record.seen import MAX_ENTRIES
from ddplaunch.record.window.questions import (
    Answer,
    Answered,
    Ask,
    Forget,
    NoAnswer,
    NodeArrivals,
    NodeStacks,
    NodeStatus,
    StacksAtEnd,
)
from ddplaunch.spec.outcome import Frame, WorkerError, WorkerExit
from ddplaunch.system import fields
from ddplaunch.system.errors import indented
from ddplaunch.system.fields import (
    Backend,
    Duration,
    Host,
    Line,
    Malformed,
    Name,
    Number,
    Piece,
    Seconds,
    SignalOrNone,
    Status,
    Workers,
    decoder,
    line,
    piece,
    text,
)

# characters of texts in the ends of workers, so that a message about thousands of them stays far below what the channel takes
_MOST_WHOLE_ENDS = 4  # ends of one node that are sent with their stderr output and exception
_LONGEST_TEXT = 20_000  # of each text of these
_LONGEST_SHORT_TEXT = 1000  # of a text of each other end,
_ALL_SHORT_TEXTS = 100_000  # and of all texts of other ends
_MOST_FRAMES = 100  # of an exception
_LONGEST_PART_OF_FRAME = 250  # of each part of a frame
_LATEST_TIME = 1e12  # seconds on a monotonic clock


class NodeFacts(Struct, frozen=True):
    """What should be equal on all nodes; "" where it is not known."""

    ddplaunch: Line
    python: Line
    torch: Line
    script: Line  # a digest of the program's file
    nnodes: Line  # as it was asked for


class Hello(Struct, frozen=True, tag="hello"):
    """An agent to the coordinator: its identity and its resources."""

    requested_rank: Number | None  # the node rank that its user gave it; None: any
    host: Host
    workers: Workers
    backend: Backend  # what it would choose on its own
    backend_reason: Line
    reached: Host  # the host name or address under which it reached the coordinator
    facts: NodeFacts
    last_generation: Annotated[
        int, Meta(ge=-1, le=2**31 - 1)
    ] = -1  # that it has begun under a coordinator that is gone
    last_term: Annotated[int, Meta(ge=-1, le=2**62)] = -1  # the term of that
    run_id: Name | None = None  # the run of that, which goes on
    was_left: bool = False  # a coordinator that this agent has reached is gone, and may have begun without this node
    at: Seconds = 0.0  # when it was sent, by the agent's clock, as in its pongs


class Withdrawal(Struct, frozen=True, tag="withdrawal"):
    """An agent to the coordinator, in place of its hello: it cannot take part, and why."""

    requested_rank: Number | None  # as in its hello
    host: Host
    reason: Piece
    hint: Piece


class Ping(Struct, frozen=True, tag="ping"):
    """The coordinator to an agent: a heartbeat, to be answered."""

    sent: Seconds
    host_limit: Duration  # of silence, after which each takes the host of the other for lost: see `silence.py`
    answered: Seconds = 0.0  # when the agent gave the last answer that has come, or said hello, by its clock


class Pong(Struct, frozen=True, tag="pong"):
    """An agent to the coordinator: the answer, at `at` by its clock."""

    sent: Seconds  # as it came
    at: Seconds


class GivenUp(Struct, frozen=True, tag="given_up"):
    """The coordinator to an agent: the job goes on without this node."""

    reason: Line
    may_return: bool = False  # whether the agent may come back as a new node: it was only silent


class Ending(Struct, frozen=True, tag="ending"):
    """The coordinator to all agents: the job is being stopped for good, and is to end with this status."""

    status: Status


class LeftByNode0(Struct, frozen=True, tag="left_by_node_0"):
    """The coordinator to all agents: it leaves the job, which waits until node 0 is started again."""

    signum: SignalOrNone  # by which it leaves; 0: it is unfit, or cut off from the command that started it
    why_unfit: Line = ""  # why its health check has failed


FirstMessage = Hello | Withdrawal
ToCoordinator = SentReport | Answered | StacksAtEnd | Chunk | Hello | Withdrawal | Pong
ToAgent = SentOrder | Ask | Forget | Chunk | Ping | GivenUp | Ending | LeftByNode0 | Lead | MeetAt

encode = msgspec.json.Encoder().encode
for_coordinator: Callable[[bytes], ToCoordinator] = decoder(ToCoordinator)
for_agent: Callable[[bytes], ToAgent] = decoder(ToAgent)

# --- what a job can do without


class _Expendable(Struct):
    """What is read of a malformed message that only tells of workers; `decoder` refuses any other."""

    type: Literal["answered", "stacks_at_end"]
    number: Number | None = None  # of an answer: that of its question


_expendable: Callable[[bytes], _Expendable] = decoder(_Expendable)


def stand_in_for_malformed(payload: bytes) -> Answered | None:
    """Return what stands in for a malformed message that only tells of workers: for an answer a `NoAnswer`, else None.

    Raises Malformed: it is another message, one that a job cannot do without.
    """
    message = _expendable(payload)
    if message.type == "stacks_at_end":
        return None
    if message.number is None:
        raise Malformed("an answer without a number")
    return Answered(message.number, NoAnswer("has sent a malformed answer"))


# --- before a message is sent: any receiver takes it, whatever workers and their programs wrote

_M = TypeVar("_M", bound="ToCoordinator | ToAgent")


def fitted(message: _M) -> _M:
    """Return a report or order with its texts made valid, and cut to what a message holds."""
    match message:
        case NodeEnd():
            failed, folder = message.start_failure, message.traces.log_folder
            return replace(
                message,
                exits=fitted_ends(message.exits),
                # the coordinator knows the host from the connection
                start_failure=failed and replace(failed, host="", reason=line(failed.reason)),
                leftovers=tuple(map(line, message.leftovers[:MAX_LEFTOVERS])),
                traces=replace(message.traces, log_folder=folder and line(folder)),
            )
        case JobEnd():
            return replace(message, text=text(message.text))
        case Generation(agreed=agreed) if agreed is not None:
            fitting = replace(agreed, address=fields.host(agreed.address), backend_reason=line(agreed.backend_reason))
            return replace(message, agreed=fitting)
    return message


def fitted_ends(exits: Iterable[WorkerExit]) -> tuple[WorkerExit, ...]:
    """Return the ends of a node's workers, the earliest failure first, cut to what a message holds.

    Only a few failures keep tracebacks and output: the first of workers that failed themselves, then of those that were stopped.
    """
    ends = sorted(exits, key=failed_at)
    bad = [end for end in ends if end.status != 0 or end.error is not None]
    by_worth = [end for end in bad if failed_itself(end)] + [end for end in bad if not failed_itself(end)]
    whole = {end.rank for end in by_worth[:_MOST_WHOLE_ENDS]}
    short = min(_LONGEST_SHORT_TEXT, _ALL_SHORT_TEXTS // max(1, len(ends)))
    return tuple(_fitted_end(end if end.rank in whole else _shortened_end(end, short)) for end in ends)


def _shortened_end(end: WorkerExit, length: int) -> WorkerExit:
    """Return the end of a worker with so many characters of each text: of the error, else of the output if it ended badly."""
    error = end.error
    # the type and the message say whether this failure only follows another
    kept = error and replace(error, type=error.type[:length], message=error.message[:length], traceback="", frames=())
    has_tail = length and end.status != 0 and not error  # [-0:] would be all
    return replace(end, stderr_tail=end.stderr_tail[-length:] if has_tail else "", error=kept)


def _fitted_end(end: WorkerExit) -> WorkerExit:
    """Return the end of a worker with its texts cut to what a message holds."""
    return replace(
        end,
        host="",  # the coordinator knows it from the connection
        device=line(end.device),
        error=end.error and _fitted_error(end.error),
        stderr_tail=text(end.stderr_tail[-_LONGEST_TEXT:]),
        log=end.log and line(end.log),
    )


def _fitted_error(error: WorkerError) -> WorkerError:
    """Return an exception with its texts cut to what a message holds."""
    return WorkerError(
        type=piece(error.type),
        message=text(error.message, _LONGEST_TEXT),
        traceback=text(error.traceback[-_LONGEST_TEXT:]),
        frames=tuple(
            Frame(
                file=piece(frame.file[-_LONGEST_PART_OF_FRAME:]),
                line=fields.bounded_number(frame.line),
                function=piece(frame.function, _LONGEST_PART_OF_FRAME),
                source=piece(frame.source, _LONGEST_PART_OF_FRAME),
            )
            for frame in error.frames[-_MOST_FRAMES:]
        ),
        at=error.at if error.at is None or abs(error.at) < _LATEST_TIME else None,  # no clock shows a later one
    )


# --- when it has arrived: hosts are those of the connections, times those of the receiver's clock

_O = TypeVar("_O", bound="SentOrder | Ask | Forget | Chunk")


def as_received(order: _O, at: float) -> _O:
    """Return an order of node 0 with the time of its arrival; in the text of a `JobEnd`, indent what could look like ours.

    Our messages begin at the left edge: only the first lines of the error and of its hint may do so.
    """
    match order:
        case node.StopOrdered() | node.AllStacksRead() | node.KillOrdered() | node.StoreOrdered():
            return replace(order, at=at)
        case JobEnd(text=text):
            error, separator, hint = text.partition("\n\nhint: ")
            return replace(order, text=f"{indented(error)}{separator}{indented(hint)}")
    return order


def on_our_clock(end: NodeEnd, host: str, offset: float) -> NodeEnd:
    """Return the end of the node on `host`, to whose times `offset` seconds are added: what its clock lacks to ours."""
    failed = end.start_failure

    def moved(exit: WorkerExit) -> WorkerExit:
        """Return the end of a worker of this node: with its `host`, and with `offset` added to each time."""
        error, stopped_at = exit.error, exit.stopped_at
        return replace(
            exit,
            host=host,
            at=exit.at + offset,
            stopped_at=None if stopped_at is None else stopped_at + offset,
            error=replace(error, at=error.at + offset) if error is not None and error.at is not None else error,
        )

    exits = tuple(map(moved, end.exits))
    return replace(end, exits=exits, start_failure=failed and replace(failed, host=host))


# --- reports: those of an agent are about its own workers, and no more than these can have


# of a worker: itself, and what `capture_stacks` looks at of its children: 64 that run, 64 that have ended
_MAX_PROCESSES = 129
_MAX_SERIES = 128  # of a worker: process groups, each with a series of calls
_NOT_ITS_OWN = "speaks of workers that are not its own"


def speaks_for_others(report: NodeEnd | StacksAtEnd, own: Sequence[int]) -> bool:
    """Whether what is said of the end of a generation names workers that are not the agent's own, or ends one of them twice."""
    if isinstance(report, StacksAtEnd):
        return not all(process.rank in own for process in report.stacks.processes)
    ranks = [end.rank for end in report.exits]
    named = [*ranks, *([report.start_failure.rank] if report.start_failure else [])]
    return len(set(ranks)) < len(ranks) or not all(rank in own for rank in named)


def why_refused(answer: Answer, own: Sequence[int], workers: int, world_size: int) -> str:
    """Return why an agent's answer is refused, as a predicate; "" if the answer is taken.

    `own` are the ranks of the agent, none if it takes no part in a generation. `workers` is how many workers it would start:
    without ranks it may say of so many that they wait, and have no pid yet.
    """
    match answer:
        case NodeStatus(found):
            ranks = [worker.rank for worker in found]
            is_own = all(rank in own for rank in ranks) if own else not any(worker.pid for worker in found)
            has_each_once = len(set(ranks)) == len(ranks) <= workers
            return "" if is_own and has_each_once else _NOT_ITS_OWN
        case NodeStacks(processes=processes):
            is_own = all(process.rank in own for process in processes)
            return why_too_much(answer, len(own), world_size) if is_own else _NOT_ITS_OWN
        case NodeArrivals(series=series):
            if not all(each.rank in own for each in series):
                return _NOT_ITS_OWN
            entries = sum(len(each.numbers) + len(each.times) for each in series)  # of both, one for each call
            if len(series) > _MAX_SERIES * len(own) or entries > 2 * MAX_ENTRIES * len(own):
                return "has more to say of collectives than its workers can have called"
    return ""


def why_too_much(found: NodeStacks, workers: int, world_size: int) -> str:
    """Return why these stacks cannot be those of so many workers of a job, as a predicate; "" if they can."""
    if len(found.processes) > _MAX_PROCESSES * workers:
        return "has more processes than its workers can have started"
    from ddplaunch.record.seen.recorder import last_rank  # few jobs are asked for their stacks

    # as ranges of ranks: "0-7"; "" where a group's members are not known
    members = {group.members for process in found.processes for group in process.groups or ()} - {""}
    if not all(0 <= last_rank(ranks) < world_size for ranks in members):  # -1 of a text that is no ranges
        return "has process groups of more ranks than the job has"
    return ""


# --- orders: those that fit what an agent has said of itself, in their order


class OrderSequence:
    """What an agent has said and was ordered on one connection to a coordinator, to tell which orders may come next."""

    def __init__(self, hello: FirstMessage) -> None:
        self._hello = hello
        # of the latest generation, which an earlier coordinator may have begun: its number and term, and the run; -1, None: none
        self.generation = hello.last_generation if isinstance(hello, Hello) else -1
        self.term = hello.last_term if isinstance(hello, Hello) else -1
        self.run_id = hello.run_id if isinstance(hello, Hello) else None
        self.generation_runs = False  # one has begun whose end was not reported yet
        self.has_begun_one = False  # since the hello

    def on_generation_ended(self) -> None:
        """Note that the end of the generation was reported."""
        self.generation_runs = False

    def check(self, message: ToAgent) -> None:
        """Take the next message. Raises Malformed: it begins what this agent cannot begin now, or not at all."""
        if isinstance(message, Lead | MeetAt) and self.generation_runs:
            raise Malformed(f"the next generation while {self.generation} runs")
        if isinstance(message, Generation):
            self._check_generation(message)

    def _check_generation(self, begun: Generation) -> None:
        """Take the order to begin a generation: a new one, with a part for this agent that fits its hello."""
        agreed, hello = begun.agreed, self._hello
        if agreed is None:
            raise Malformed("begins workers without saying which")
        if not isinstance(hello, Hello):  # but a withdrawal
            raise Malformed("begins workers where there are none")
        # `agreed.index` is the node rank that this agent is to have
        if len(agreed.ranks) != hello.workers:
            raise Malformed(f"agent {agreed.index} has another number of workers")
        wanted = hello.requested_rank
        # in a generation of fewer nodes it cannot have a rank beyond these
        if wanted is not None and wanted < agreed.nnodes and agreed.index != wanted:
            raise Malformed(f"agent {agreed.index} for node rank {wanted}")
        if self.generation_runs or begun.number <= self.generation:
            raise Malformed(f"generation {begun.number} after {self.generation}")
        if begun.term <= self.term:  # terms grow with each generation, also from one coordinator to the next
            raise Malformed(f"term {begun.term} after {self.term}")
        self.generation, self.term, self.run_id = begun.number, begun.term, agreed.run_id
        self.generation_runs = self.has_begun_one = True
