"""A loop whose time a test sets: it never sleeps, real descriptors are served, and questions wait for the test's answer."""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable, Sequence
from math import inf
from typing import Any

from ddplaunch.system.loop.loop import Loop
from ddplaunch.system.process.clock import Clock


class _Sleepless(selectors.DefaultSelector):
    """Sleeps by moving the time."""

    time = 0.0
    slept = 0  # times
    patience = 0.0  # real seconds to wait for descriptors
    ready = 0  # descriptors, the last time

    def now(self) -> float:
        return self.time

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(self.patience)
        self.ready = len(ready)
        if not ready and timeout != 0:
            assert timeout is not None, "the loop would sleep for ever"
            self.slept += 1
            self.time += timeout
        return ready


class FakePending:
    """A question that no child is asked: the test answers it, with what it wants or with what the question gives."""

    def __init__(self, question: Callable[[], Any], otherwise: Any, answered: Callable[[Any], object]) -> None:
        self.question = question
        self.answer = otherwise
        self.pid = 1  # while it is asked
        self._answered = answered

    def answer_with(self, answer: Any) -> None:
        """Answer."""
        self.pid, self.answer = 0, answer
        self._answered(answer)

    def give_up(self) -> None:
        """Answer by what was to be taken without an answer."""
        if self.pid:
            self.answer_with(self.answer)


class FakeLoop(Loop):
    """See above; `events` are those that no handler has taken."""

    def __init__(self, at: float = 1000.0) -> None:
        self._sleepless = _Sleepless()
        self._sleepless.time = at
        super().__init__(Clock(lambda: self._sleepless.time), self._sleepless)
        self.events: list[Any] = []
        self.handle = self.events.append
        self.questions: list[FakePending] = []

    def ask(
        self,
        question: Callable[[], Any],
        otherwise: Any,
        answered: Callable[[Any], object] = lambda _: None,
        descriptors: Sequence[int] = (),
        within: float | None = None,
    ) -> Any:
        """Note a question."""
        asked = FakePending(question, otherwise, answered)
        self.questions.append(asked)
        return asked

    @property
    def is_idle(self) -> bool:
        """Whether nothing is watched and no timer is set."""
        return not self._watched and self.deadline is None

    @property
    def slept(self) -> int:
        """How often the loop has slept."""
        return self._sleepless.slept

    @property
    def deadline(self) -> float | None:
        """When the first timer is due."""
        first = min((timer.at for timer in self._timers), default=inf)
        return None if first == inf else first

    def serve(self) -> None:
        """Serve what is due now, until nothing is."""
        self.pass_time(0.0)

    def pass_time(self, seconds: float) -> None:
        """Serve all that becomes due in this time."""
        until = self.now() + seconds
        reached: list[bool] = []
        while not reached:
            ends = self.timer(until, lambda: reached.append(True))
            self.run_once()
            ends.cancel()

    def turn(self, patience: float = 0.005) -> int:
        """Serve what has come, after at most so many real seconds, while the time of the loop stands; return how much that is."""
        self._sleepless.patience = patience
        try:
            self.timer(self.now(), lambda: None)
            self.run_once()
        finally:
            self._sleepless.patience = 0
        return self._sleepless.ready

    def until(self, condition: Callable[[], object], what: Callable[[], object] = lambda: None) -> None:
        """Serve what comes until this is true, while the time of the loop stands."""
        give_up = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < give_up, what()
            self.turn()

    def advance(self, seconds: float) -> None:
        """Let the time pass at once; what has become due is served by what comes next."""
        self._sleepless.time += seconds
        self.clock._seen += seconds  # it was asleep, and not paused

    def pause(self, seconds: float) -> None:
        """Let the time pass without this process."""
        self._sleepless.time += seconds


class Warnings:
    """Takes, in place of the reporter, what the user is to be warned of."""

    def __init__(self) -> None:
        self.warned: list[str] = []

    def warn(self, what: str) -> None:
        """Keep it."""
        self.warned.append(what)
