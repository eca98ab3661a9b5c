"""Which orders an agent takes from a coordinator elsewhere: those that fit what it has said of itself, in their order. Pure."""

from __future__ import annotations

from ddplaunch.coordinator.link import Generation
from ddplaunch.coordinator.messages import Hello, ToAgent, Watch
from ddplaunch.fields import Malformed


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
        if not isinstance(message, Generation):
            return
        agreed, hello = message.agreed, self._hello
        if agreed is None:
            raise Malformed("begins workers without saying which")
        if not isinstance(hello, Hello):
            raise Malformed("begins workers where there are none")
        if len(agreed.ranks) != hello.seat.workers:
            raise Malformed(f"place {agreed.place} has another number of workers")
        if hello.place is not None and hello.place < agreed.nnodes and agreed.place != hello.place:
            raise Malformed(f"place {agreed.place} for node rank {hello.place}")
        if self._runs or message.number <= self._generation:
            raise Malformed(f"generation {message.number} after {self._generation}")
        self._generation, self._runs = message.number, True
