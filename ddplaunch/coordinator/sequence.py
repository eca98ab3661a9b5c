"""Which orders an agent takes from a coordinator elsewhere: those that fit what it has said of itself, in their order. Pure."""

from __future__ import annotations

from ddplaunch.control.fields import Malformed
from ddplaunch.control.messages import Begin, Hello, ToAgent, Watch


class OrderSequence:
    """What has been said and ordered so far."""

    def __init__(self, hello: Hello | Watch) -> None:
        self._hello = hello
        self._generation = -1  # the latest
        self._runs = False  # its end was not reported yet

    def ended(self) -> None:
        """Note that the end of the generation was reported."""
        self._runs = False

    def check(self, message: ToAgent) -> None:
        """Take the next message.

        Raises:
            Malformed: it begins what this agent cannot begin.
        """
        if not isinstance(message, Begin):
            return
        hello = self._hello
        if not isinstance(hello, Hello):
            raise Malformed("begins workers where there are none")
        if message.counts[message.place] != hello.seat.workers:
            raise Malformed(f"place {message.place} has another number of workers")
        if hello.place is not None and hello.place < message.nnodes and message.place != hello.place:
            raise Malformed(f"place {message.place} for node rank {hello.place}")
        if self._runs or message.generation <= self._generation:
            raise Malformed(f"generation {message.generation} after {self._generation}")
        self._generation, self._runs = message.generation, True
