"""The ends of workers as messages and back: cut to what is worth sending, put on the coordinator's clock. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec.structs import asdict, replace

from ddplaunch.control.fields import line, number, piece, text
from ddplaunch.control.messages import Error, Exit, FrameSeen
from ddplaunch.supervise.first_failure import failed_at, failed_itself
from ddplaunch.supervise.outcome import Frame, WorkerError, WorkerExit

_MOST_WHOLE = 4  # ends of one node that are sent with their stderr output and exception
_SHORT = 1000  # characters of a text of each of the others,
_SHORT_TEXTS = 100_000  # and of all these texts, so that also the ends of thousands fit into a message
_TEXT = 20_000  # so that the whole message stays far below what a frame may hold
_FRAMES = 100
_PART = 250  # characters of each part of a frame
_LONGEST_AGO = 1e12


def sent(exits: Iterable[WorkerExit]) -> tuple[Exit, ...]:
    """Write the ends of a node's workers; the earliest failures whole, the others without their texts."""
    ends = sorted(exits, key=failed_at)
    failed = [end for end in ends if end.status != 0 or end.error is not None]
    whole = {end.rank for end in sorted(failed, key=lambda end: not failed_itself(end))[:_MOST_WHOLE]}
    short = min(_SHORT, _SHORT_TEXTS // max(1, len(ends)))
    return tuple(_sent(end if end.rank in whole else _without_text(end, short)) for end in ends)


def received(exits: Sequence[Exit], host: str, offset: float) -> tuple[WorkerExit, ...]:
    """Read the ends of a node's workers; `offset` is what its clock lacks to the reader's, in seconds."""
    return tuple(_received(end, host, offset) for end in exits)


def _without_text(end: WorkerExit, short: int) -> WorkerExit:
    error = end.error
    # the type and the message say whether this failure only follows another
    kept = error and replace(error, type=error.type[:short], message=error.message[:short], traceback="", frames=())
    tail = end.stderr_tail[-short:] if short and end.status != 0 and not error else ""
    return replace(end, stderr_tail=tail, error=kept)


def _sent(end: WorkerExit) -> Exit:
    fields = {name: value for name, value in asdict(end).items() if name != "host"}  # known from the connection
    fields["error"] = None if end.error is None else _sent_error(end.error)
    fields["device"] = line(end.device)
    fields["stderr_tail"] = text(end.stderr_tail[-_TEXT:])
    fields["log"] = None if end.log is None else line(end.log)
    return Exit(**fields)


def _sent_error(error: WorkerError) -> Error:
    return Error(
        type=piece(error.type),
        message=text(error.message, _TEXT),
        traceback=text(error.traceback[-_TEXT:]),
        frames=tuple(
            FrameSeen(
                piece(frame.file[-_PART:]), number(frame.line), piece(frame.function, _PART), piece(frame.source, _PART)
            )
            for frame in error.frames[-_FRAMES:]
        ),
        at=error.at if error.at is None or abs(error.at) < _LONGEST_AGO else None,
    )


def _received(end: Exit, host: str, offset: float) -> WorkerExit:
    fields = asdict(end)
    fields["at"] += offset
    if end.stopped_at is not None:
        fields["stopped_at"] += offset
    if end.error is not None:
        error = {**asdict(end.error), "frames": tuple(Frame(**asdict(frame)) for frame in end.error.frames)}
        if end.error.at is not None:
            error["at"] += offset
        fields["error"] = WorkerError(**error)
    return WorkerExit(host=host, **fields)
