"""What workers do that have written nothing yet, in a row on the terminal that vanishes: "[0-3] importing torch, 12 s"."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddplaunch.loop.loop import Loop
from ddplaunch.output.sinks import Output
from ddplaunch.words import duration

if TYPE_CHECKING:
    from ddplaunch.agent.workers import CurrentWorkers

PATIENCE = 2.0  # seconds of silence before the first row
_OFTEN = 60.0  # seconds in which the row counts each of them; later it counts tens


class StartNotice:
    """From the start of a generation to its first output, process group or exit; it has no timer before and afterwards."""

    def __init__(self, loop: Loop, current: CurrentWorkers) -> None:
        self._loop = loop
        self._current = current
        self._timer = loop.timer(None, self._show, may_rest=True)
        self._began = 0.0
        self._first = ""
        self._importing = 0  # workers that have begun to import torch, and not finished
        self._given: tuple[Output, tuple[int, ...]] | None = None

    def begin(self, output: Output, ranks: tuple[int, ...], first: str) -> None:
        """Watch these ranks, whose output is shown on a terminal; `first` says what happens before they have processes."""
        self._first = first
        self._began = self._loop.now()
        self._importing = 0
        self._given = (output, ranks)
        self._timer.set(self._began + PATIENCE)

    def imports(self, begun: int, finished: int) -> None:
        """Note that so many more workers have begun and finished to import torch."""
        self._importing += begun - finished

    def end(self) -> None:
        """Take the row away, and show none until the next generation."""
        self._timer.cancel()
        if self._given is not None:
            self._given[0].show_status((), "", self._loop.now())
            self._given = None

    def _show(self) -> None:
        if self._given is None:
            return
        output, ranks = self._given
        now = self._loop.now()
        if any(at >= self._began for at in output.written_at.values()):
            self.end()
            return
        seconds = round(now - self._began)
        output.show_status(ranks, f"{self._doing()}, {duration(seconds)}", now)
        self._timer.set(now + (1.0 if seconds < _OFTEN else 10.0))

    def _doing(self) -> str:
        workers = self._current.workers
        if workers is None or workers.waiting:
            return self._first
        return "importing torch" if self._importing > 0 else "running, nothing printed yet"
