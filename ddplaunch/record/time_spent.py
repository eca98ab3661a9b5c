"""Where the time of a job went: starts, steps, steps that were lost and done again, and the time between generations. Pure.

ETTR, the effective training time ratio, is the share of the time in which the job made steps that it kept. It is known where
the script says its steps (`ddplaunch.progress()`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import asdict

from ddplaunch.system.words import duration

if TYPE_CHECKING:
    from ddplaunch.record.run import Reached
    from ddplaunch.spec.outcome import Progress


class Attempt(Struct, frozen=True):
    """One generation, and the steps of the worker that came farthest in it; times are seconds of one clock."""

    began: float
    ended: float
    first_call: float | None = None  # when the worker said `first_step`; None: it said no step
    last_call: float = 0.0  # when it said `last_step`
    first_step: int = 0
    last_step: int = 0


def attempt(began: float, ended: float, worker_ended: float, reached: Progress | Reached) -> Attempt:
    """Return the generation, of which the worker that came farthest ended at `worker_ended`, and had `reached` a step before."""
    last_call = worker_ended - reached.age
    return Attempt(began, ended, last_call - reached.seconds, last_call, reached.first_step, reached.step)


class Spent(Struct, frozen=True):
    """The seconds of a job by what they were spent on; their sum is `total`."""

    total: float
    start: float  # before the first step
    steps: float  # that were kept
    again: float  # steps that a generation before had made already
    restarts: float  # from the last step of a generation to the first step of the next
    end: float  # after the last step
    queue: float = 0.0  # before the job began, as far as known

    @property
    def effective(self) -> float:
        """The share of the time in which steps were made that were kept."""
        return self.steps / self.total if self.total > 0 else 0.0

    def data(self) -> dict[str, float]:
        """Return what summary.json holds."""
        return {
            **{name: round(seconds, 3) for name, seconds in asdict(self).items()},
            "effective": round(self.effective, 4),
        }

    def __str__(self) -> str:
        """Say it: "effective 94%: queue 9 min, start 8 s, restarts 2 min, steps done again 40 s"."""
        parts = [("start", self.start), ("restarts", self.restarts), ("steps done again", self.again)]
        if self.queue:
            parts.insert(0, ("queue", self.queue))
        return f"effective {self.effective:.0%}: " + ", ".join(f"{name} {duration(seconds)}" for name, seconds in parts)


def time_spent(attempts: Sequence[Attempt], began: float, ended: float, queue: float = 0.0) -> Spent | None:
    """Return where the time from `began` to `ended`, and `queue` seconds before, went; None if no worker said a step.

    `attempts` are the generations in their order. What workers say of times is kept between what was known before and the end.
    """
    start = steps = again = restarts = 0.0
    last: float | None = None  # when the last step so far was said
    farthest = 0  # the farthest step so far
    for attempt in attempts:
        if attempt.first_call is None:  # it made no step: all of its time passed between two steps of others
            continue
        first_call = min(max(attempt.first_call, began if last is None else last), ended)
        last_call = min(max(attempt.last_call, first_call), ended)
        made = max(attempt.last_step - attempt.first_step, 0)
        repeated = 0  # steps that a generation before had made, but had lost with its end
        if last is None:
            start = first_call - began
        else:
            restarts += first_call - last
            repeated = min(max(farthest - attempt.first_step, 0), made)
        seconds = last_call - first_call
        seconds_again = seconds * repeated / made if made else 0.0
        again += seconds_again
        steps += seconds - seconds_again
        farthest = max(farthest, attempt.last_step)
        last = last_call
    if last is None:
        return None
    total = queue + ended - began
    return Spent(total=total, start=start, steps=steps, again=again, restarts=restarts, end=ended - last, queue=queue)
