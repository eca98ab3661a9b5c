"""A lease: for how long the workers of a node may live without a word that the coordinator still hears this node. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from math import inf

from ddplaunch.system.fields import Malformed


class Lease:
    """Runs from when this node sent the last renewal that the coordinator has echoed; its first renewal needs no echo.

    The coordinator takes it to run from when that renewal arrived, which is later, and begins no generation without this node
    before it is over. A renewal's number is the time of its sending, by a clock that only this node reads.
    """

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        """`seconds` may be inf, for a job that never goes on without a node; `clock` is that by which the lease runs.

        The coordinator may set fewer, with a generation: `seconds` is what was typed on this node.
        """
        self.seconds = seconds
        self._clock = clock
        # renewals that were not echoed: the number, and when it was sent
        self._sent: deque[tuple[float, float]] = deque()
        self._echoed = 0.0  # the number of the last one that was; 0.0: none
        self._runs_from = inf  # when the last renewal that counts was sent

    def begin(self) -> None:
        """Forget the coordinator that was followed before; the lease begins with the next renewal."""
        self._sent.clear()
        self._echoed = 0.0
        self._runs_from = inf

    def renew(self, number: float) -> None:
        """Note that a renewal is sent now."""
        now = self._clock()
        self._sent.append((number, now))
        if self._runs_from == inf:
            self._runs_from = now

    def extend(self, number: float) -> None:
        """Extend the lease, since the coordinator has echoed the renewal of this number. Raises Malformed: it was never sent."""
        if number == self._echoed:  # no other has come since
            return
        while self._sent and self._sent[0][0] < number:
            self._sent.popleft()
        if not self._sent or self._sent[0][0] != number:
            raise Malformed("echoes a renewal that was not sent")
        self._echoed, self._runs_from = self._sent.popleft()

    @property
    def is_over(self) -> bool:
        """Whether no worker of this node may live any more."""
        return self.left == 0

    @property
    def left(self) -> float:
        """The seconds until the lease is over, at least 0.0."""
        return max(0.0, self._runs_from + self.seconds - self._clock())
