"""DECIDE: whether the workers of a job have left after a notice of its end, or whether one of them failed. Pure.

A notice is a signal by which a scheduler, or a user, announces that the job's time is up: the workers save and exit.
"""

from __future__ import annotations

from collections.abc import Iterable
from signal import SIGTERM

from ddplaunch.exitcodes import of_signal
from ddplaunch.supervise.first_failure import ended_otherwise, failed_itself, follows
from ddplaunch.supervise.outcome import WorkerExit

_BY_A_SIGNAL = ("KeyboardInterrupt", "SystemExit")


def all_left(exits: Iterable[WorkerExit], *signals: int) -> bool:
    """Whether all of these workers have left after one of these signals or SIGTERM, and none has failed by itself."""
    by = {SIGTERM, *signals} - {0}
    return not any(_failed(end, by) for end in exits)


def _failed(end: WorkerExit, by: set[int]) -> bool:
    if end.status == 0 or follows(end):
        return False
    # a program without a handler is ended by it; shells and many handlers exit with 128 + its number
    took_it = end.signal in by or end.code in {of_signal(signum) for signum in by}
    if took_it and (end.error is None or end.error.type in _BY_A_SIGNAL):
        return False
    return failed_itself(end) or ended_otherwise(end)
