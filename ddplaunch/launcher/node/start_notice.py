"""A row on the terminal that says for how long workers have been starting, as long as they have printed nothing. In the agent."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddplaunch.system.loop.loop import Loop
from ddplaunch.system.words import duration

if TYPE_CHECKING:
    from ddplaunch.launcher.node.workers import Workers
    from ddplaunch.launcher.output.sinks import Output

PATIENCE = 2.0  # seconds of silence before the row is shown
_COUNTS_SECONDS_UNTIL = 60.0  # seconds in which the row counts each of them; later it counts tens


class StartNotice:
    """That row: from PATIENCE seconds after a generation begins to its first output, process group or exit.

    It has no timer before and afterwards.
    """

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._timer = loop.timer(None, self._show_row, may_come_late=True)
        self._began = 0.0  # when the generation did, on the loop's clock
        self._before_processes = ""  # what the row says until all workers are processes
        self._importing = 0  # workers that have begun to import torch, and not finished
        self._output: Output | None = None  # None: no row is to be shown
        self._workers: Workers  # set by `begin`
        self._ranks: tuple[int, ...] = ()

    def begin(self, workers: Workers, output: Output, ranks: tuple[int, ...], before_processes: str) -> None:
        """Watch those `ranks` of the workers that a terminal shows; the text says what happens before all are processes."""
        self._workers, self._output, self._ranks = workers, output, ranks
        self._before_processes = before_processes
        self._began = self._loop.now()
        self._importing = 0
        self._timer.set(self._began + PATIENCE)

    def note_imports(self, begun: int, finished: int) -> None:
        """Note that so many more workers have begun and finished to import torch."""
        self._importing += begun - finished

    def end(self) -> None:
        """Take the row away, and show none until the next generation."""
        self._timer.cancel()
        if self._output is not None:
            self._output.show_status((), "", self._loop.now())
            self._output = None

    def _show_row(self) -> None:
        """Show the row, or take it away if a worker has written something since the start. Called by the loop."""
        output, now = self._output, self._loop.now()
        if output is None:
            return
        if any(at >= self._began for at in output.written_at.values()):
            self.end()
            return
        seconds = round(now - self._began)
        output.show_status(self._ranks, f"{self._what_goes_on()}, {duration(seconds)}", now)
        self._timer.set(now + (1.0 if seconds < _COUNTS_SECONDS_UNTIL else 10.0))

    def _what_goes_on(self) -> str:
        if self._workers.waiting:
            return self._before_processes
        return "importing torch" if self._importing > 0 else "running, nothing printed yet"
