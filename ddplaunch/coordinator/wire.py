"""Reports and orders as messages, and back. Pure; the sockets are `control`'s."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Literal

from msgspec import structs

from ddplaunch.control import messages
from ddplaunch.control.fields import host as host_name
from ddplaunch.control.fields import line, text
from ddplaunch.control.frames import LIMIT
from ddplaunch.coordinator import exits
from ddplaunch.coordinator.link import Answered, Ask, Forget, ForwardToAll, Generation, JobEnd, NodeEnd, Order, Report
from ddplaunch.errors import below
from ddplaunch.plan import Agreed, Seat
from ddplaunch.plan.ranks import ranks_of
from ddplaunch.supervise import node
from ddplaunch.supervise.outcome import StartFailure, Traces, Why

if TYPE_CHECKING:
    from ddplaunch.control.stack_answers import NodeStacks
    from ddplaunch.stacks import Sample

_MOST_STACKS = 1 << 20  # bytes of a message for where workers were
_MOST_LEFT = 100  # processes that are named
_WHYS: dict[Literal["FAILED", "SIGNALLED", "FRONT_LOST"], Why] = {
    "FAILED": Why.FAILED,
    "SIGNALLED": Why.SIGNALLED,
    "FRONT_LOST": Why.FRONT_LOST,
}
_NAMES = {why: name for name, why in _WHYS.items()}  # the coordinator orders all other stops itself


def encode_report(report: Report) -> messages.ToCoordinator | None:
    """Return the message that a report is; None for what only the coordinator's own agent reports."""
    match report:
        case node.ReportStopping(why, signum, by_cluster):
            return messages.Stopping(_NAMES[why], signum, by_cluster)
        case node.ReportNotice(signum):
            return messages.Noticed(signum)
        case node.Escalate(signum):
            return messages.Escalate(signum)
        case node.ReportStill(seconds):
            return messages.Still(seconds)
        case node.HoldTimeout(held):
            return messages.Held(held)
        case node.RequestStore():
            return messages.RequestStore()
        case ForwardToAll(signum):
            return messages.Forward(signum)
        case Answered(number, answer):
            return messages.Answered(number, answer)
        case NodeEnd(generation, ends, failed, left, traces, samples):
            ended = messages.Ended(
                generation=generation,
                exits=exits.sent(ends),
                start_failure=_sent_failure(failed) if failed else None,
                left=tuple(map(line, left[:_MOST_LEFT])),
                oom_kills=traces.oom_kills,
                oom_kills_of_machine=traces.oom_kills_of_machine,
                shm=traces.shm,
                log_folder=None if traces.log_folder is None else line(traces.log_folder),
            )
            return _with_samples(ended, samples)
    return None


def decode_report(message: messages.ToCoordinator, host: str, offset: float) -> Report | None:
    """Return the report of an agent on `host`, whose clock lacks `offset` seconds to ours; None if it is none."""
    match message:
        case messages.Stopping(why, signum, by_cluster):
            return node.ReportStopping(_WHYS[why], signum, by_cluster)
        case messages.Noticed(signum):
            return node.ReportNotice(signum)
        case messages.Escalate(signum):
            return node.Escalate(signum)
        case messages.Still(seconds):
            return node.ReportStill(seconds)
        case messages.Held(held):
            return node.HoldTimeout(held)
        case messages.RequestStore():
            return node.RequestStore()
        case messages.Forward(signum):
            return ForwardToAll(signum)
        case messages.Answered(number, answer):
            return Answered(number, answer)
        case messages.Ended():
            failed = message.start_failure
            return NodeEnd(
                generation=message.generation,
                exits=exits.received(message.exits, host, offset),
                start_failure=StartFailure(failed.rank, host, failed.reason, failed.status, failed.errno)
                if failed
                else None,
                left=message.left,
                traces=Traces(
                    oom_kills=message.oom_kills,
                    oom_kills_of_machine=message.oom_kills_of_machine,
                    shm=message.shm,
                    log_folder=message.log_folder,
                ),
                samples=_received_samples(message.stacks, host),
            )
    return None


def encode_order(order: Order) -> messages.ToAgent:
    """Return the message that an order is."""
    match order:
        case Generation(agreed=Agreed() as agreed):
            return messages.Begin(
                generation=order.number,
                place=agreed.place,
                seats=_sent_seats(agreed.seats),
                run_id=agreed.run_id,
                address=host_name(agreed.address),
                port=order.port,
                backend=agreed.backend,
                backend_reason=line(agreed.backend_reason),
                restarts=order.restarts,
            )
        case JobEnd(status, why, words, requeue, is_watched):
            return messages.Quit(status, why, text(words), requeue, is_watched)
        case node.StopOrdered(signum, _, time_is_up, by_cluster):
            return messages.Stop(signum, time_is_up, by_cluster)
        case node.KillOrdered():
            return messages.Kill()
        case node.SignalReceived(signum):
            return messages.Forward(signum)
        case Ask(number, question):
            return messages.Ask(number, question)
        case Forget(number):
            return messages.Forget(number)
    raise AssertionError(f"{order!r} concerns no other node")


def decode_order(message: messages.ToAgent, at: float) -> Order | None:
    """Return the order that came at this time; None if it is none."""
    match message:
        case messages.Begin():
            seats = tuple(Seat("", workers) for workers in message.counts)
            return Generation(
                number=message.generation,
                restarts=message.restarts,
                port=message.port,
                ranks=frozenset(ranks_of(seats, message.place)),
                alone=len(seats) == 1,
                agreed=Agreed(
                    run_id=message.run_id,
                    place=message.place,
                    seats=seats,
                    address=message.address,
                    backend=message.backend,
                    backend_reason=message.backend_reason,
                ),
            )
        case messages.Quit(status, why, words, requeue, is_watched):
            # of an error and its hint only the first lines may look like ours
            said, hint, more = words.partition("\n\nhint: ")
            return JobEnd(
                status=status, why=why, text=f"{below(said)}{hint}{below(more)}", requeue=requeue, is_watched=is_watched
            )
        case messages.Stop(signum, time_is_up, by_cluster):
            return node.StopOrdered(signum, at, time_is_up, by_cluster)
        case messages.Kill():
            return node.KillOrdered(at)
        case messages.Forward(signum):
            return node.SignalReceived(signum, at, escalates=False)
        case messages.Ask(number, question):
            return Ask(number, question)
        case messages.Forget(number):
            return Forget(number)
    return None


def _sent_seats(seats: Sequence[Seat]) -> tuple[messages.Seats, ...]:
    alike = groupby(seat.workers for seat in seats)
    return tuple(messages.Seats(sum(1 for _ in each), workers) for workers, each in alike)


def _sent_failure(failed: StartFailure) -> messages.StartFailure:
    return messages.StartFailure(failed.rank, line(failed.reason), failed.status, failed.errno)


def _with_samples(ended: messages.Ended, samples: Sequence[Sample]) -> messages.Ended:
    """Return the message with where workers were, unless that is too much beside the ends of all workers."""
    if not samples:
        return ended
    from ddplaunch.stacks.sent import sent  # only failures need it

    found = sent(samples, threads=False)
    size = len(messages.encode(found))
    fits = size <= _MOST_STACKS and len(messages.encode(ended)) + size <= LIMIT
    return structs.replace(ended, stacks=found) if fits else ended


def _received_samples(found: NodeStacks | None, host: str) -> tuple[Sample, ...]:
    if found is None:
        return ()
    from ddplaunch.stacks.sent import received

    return tuple(received(found, host))
