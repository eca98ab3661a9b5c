"""The ends of workers as messages and back: cut to what is worth sending, put on the coordinator's clock. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ddplaunch.control.messages import Error, Exit, FrameSeen
from ddplaunch.record import replace
from ddplaunch.supervise.first_failure import failed_at, failed_itself
from ddplaunch.supervise.outcome import Frame, WorkerError, WorkerExit

_MOST_WHOLE = 4  # ends of one node that travel with their last words and exception
_LINE = 1000  # characters, as control/messages.py allows
_TEXT = 20_000  # so that the whole message stays far below what a frame may hold
_FRAMES = 100
_PART = 250  # characters of each part of a frame
_LONGEST_AGO = 1e12


def sent(exits: Iterable[WorkerExit]) -> tuple[Exit, ...]:
    """Write the ends of a node's workers; the earliest failures whole, the others without what they said."""
    ends = sorted(exits, key=failed_at)
    failed = [end for end in ends if end.status != 0 or end.error is not None]
    whole = {end.rank for end in sorted(failed, key=lambda end: not failed_itself(end))[:_MOST_WHOLE]}
    return tuple(_sent(end if end.rank in whole else _without_text(end)) for end in ends)


def received(exits: Sequence[Exit], host: str, offset: float) -> tuple[WorkerExit, ...]:
    """Read the ends of a node's workers; `offset` is what its clock lacks to the reader's, in seconds."""
    return tuple(_received(end, host, offset) for end in exits)


def _without_text(end: WorkerExit) -> WorkerExit:
    error = end.error
    # the type and the message say whether this failure only follows another
    kept = error and replace(error, message=error.message[:_LINE], traceback="", frames=())
    return replace(end, stderr_tail=end.stderr_tail[-_LINE:] if end.status != 0 and not error else "", error=kept)


def _sent(end: WorkerExit) -> Exit:
    return Exit(
        rank=end.rank,
        local_rank=end.local_rank,
        pid=end.pid,
        device=end.device,
        code=end.code,
        signal=end.signal,
        at=end.at,
        seconds=end.seconds,
        stopped_with=end.stopped_with,
        stopped_at=end.stopped_at,
        core_dumped=end.core_dumped,
        peak_rss=end.peak_rss,
        cpu_seconds=end.cpu_seconds,
        error=None if end.error is None else _sent_error(end.error),
        stderr_tail=_text(end.stderr_tail[-_TEXT:]),
        log=None if end.log is None else _line(end.log),
    )


def _sent_error(error: WorkerError) -> Error:
    frames = error.frames[-_FRAMES:]
    return Error(
        type=_line(error.type),
        message=_text(error.message[:_TEXT]),
        traceback=_text(error.traceback[-_TEXT:]),
        frames=tuple(FrameSeen(_part(f.file[-_PART:]), f.line, _part(f.function), _part(f.source)) for f in frames),
        at=error.at if error.at is None or abs(error.at) < _LONGEST_AGO else None,
    )


def _received(end: Exit, host: str, offset: float) -> WorkerExit:
    error = end.error
    return WorkerExit(
        rank=end.rank,
        local_rank=end.local_rank,
        host=host,
        pid=end.pid,
        device=end.device,
        code=end.code,
        signal=end.signal,
        at=end.at + offset,
        seconds=end.seconds,
        stopped_with=end.stopped_with,
        stopped_at=None if end.stopped_at is None else end.stopped_at + offset,
        core_dumped=end.core_dumped,
        peak_rss=end.peak_rss,
        cpu_seconds=end.cpu_seconds,
        error=None
        if error is None
        else WorkerError(
            type=error.type,
            message=error.message,
            traceback=error.traceback,
            frames=tuple(Frame(file=f.file, line=f.line, function=f.function, source=f.source) for f in error.frames),
            at=None if error.at is None else error.at + offset,
        ),
        stderr_tail=end.stderr_tail,
        log=end.log,
    )


def _part(text: str) -> str:
    return _text(text[:_PART])


def _line(text: str) -> str:
    return _text(text[:_LINE])


def _text(text: str) -> str:
    """What a worker wrote may hold lone surrogates, which JSON in UTF-8 cannot carry."""
    return text.encode(errors="replace").decode()
