"""Finds, in the agent, workers whose script has ended long ago while their process goes on, and what Python waits for there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from ddplaunch.launcher.node.events import WorkersLinger
from ddplaunch.system.loop.loop import Loop
from ddplaunch.system.words import duration, these_ranks

if TYPE_CHECKING:
    from ddplaunch.record.seen import Sample
    from ddplaunch.system.process.child import RunningWorker

PATIENCE = 30.0  # seconds from the end of a script until its process is named
WITHIN = 2.0  # seconds to find out what it waits for
_IN_ONE_LINE_WITHIN = 1.0  # seconds between two ends of scripts that become one line


class EndedScripts:
    """The workers of one generation after another whose script has ended; it has no timer while none has."""

    def __init__(self, loop: Loop, running: Mapping[int, RunningWorker]) -> None:
        """`running` are the workers of the generation that there is, by rank. Each that lingers is posted once."""
        self._loop = loop
        self._running = running
        self._timer = loop.timer(None, self._look, may_come_late=True)
        self._ended_at: dict[int, float] = {}  # when the script of a rank was seen to have ended
        self._named: set[int] = set()

    def forget_generation(self) -> None:
        """Forget the last generation: another one begins."""
        self._timer.cancel()
        self._ended_at.clear()
        self._named.clear()

    def note(self, ranks: set[int]) -> None:
        """Take which scripts have ended so far."""
        now = self._loop.now()
        for rank in ranks - self._ended_at.keys():
            self._ended_at[rank] = now
        self._set_timer()

    def _set_timer(self) -> None:
        lasting = [self._ended_at[rank] for rank in self._lasting()]
        self._timer.set(min(lasting) + PATIENCE if lasting else None)

    def _lasting(self) -> list[int]:
        """Return the ranks whose script has ended, whose process has not, and which nobody has asked to end or has named."""
        return sorted(
            rank
            for rank in self._ended_at.keys() - self._named
            if rank in self._running and self._running[rank].stopped_with is None and self._running[rank].look() is None
        )

    def _look(self) -> None:
        """Post those whose scripts ended PATIENCE ago. Called by the loop."""
        now = self._loop.now()
        late = [rank for rank in self._lasting() if now + _IN_ONE_LINE_WITHIN >= self._ended_at[rank] + PATIENCE]
        self._named.update(late)
        self._set_timer()
        if late:
            self._loop.post(WorkersLinger(tuple(late)))


def describe_lingering(samples: Iterable[Sample], running: Mapping[int, RunningWorker]) -> list[str]:
    """Return lines that say what Python waits for in workers whose script has ended, one for all ranks that wait for the same.

    `samples` show where they were; workers that have ended or are being stopped meanwhile are left out.
    """
    from ddplaunch.record.seen.stack import ENDED  # most workers end with their scripts

    ranks_by_state: dict[str, list[int]] = {}
    for sample in samples:
        worker = running.get(sample.rank)
        is_left_alone = worker is not None and worker.stopped_with is None
        is_of_worker = not sample.child  # not of a process below it, as a data loader's
        if is_left_alone and is_of_worker and sample.state.startswith(ENDED):
            ranks_by_state.setdefault(sample.state, []).append(sample.rank)
    return [
        f"{these_ranks(ranks)} still {'runs' if len(ranks) == 1 else 'run'}, {duration(PATIENCE)} after the end of the script: "
        f"Python {state.removeprefix(ENDED)}"
        for state, ranks in ranks_by_state.items()
    ]
