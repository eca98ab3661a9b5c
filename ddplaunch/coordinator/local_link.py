"""The link of the coordinator's own agent: messages need no network."""

from __future__ import annotations

from collections.abc import Callable

from ddplaunch.control import messages
from ddplaunch.coordinator.coordinator import Coordinator
from ddplaunch.coordinator.link import Link, LinkHandler
from ddplaunch.supervise.job import OWN


class LocalLink(Link):
    """A link whose other end is in the same process."""

    def __init__(self, handler: LinkHandler, coordinator: Coordinator, clock: Callable[[], float]) -> None:
        super().__init__(handler, clock)
        self._coordinator = coordinator

    def send(self, message: messages.ToCoordinator) -> None:
        """Tell the coordinator."""
        self._coordinator.hear(OWN, message)

    def expect_one_fewer(self) -> None:
        """Have the coordinator wait for one node less."""
        self._coordinator.expect_one_fewer()

    @property
    def address(self) -> str | None:
        """The address of this node that most others reach."""
        return self._coordinator.reached_at

    @property
    def deadline(self) -> float | None:
        """When the coordinator wants to be called."""
        return self._coordinator.deadline

    def expire(self, now: float) -> None:
        """Have the coordinator do what the time asks for."""
        self._coordinator.expire(now)

    @property
    def is_over(self) -> bool:
        """Whether all other agents know that the job has ended."""
        return self._coordinator.is_over

    def close(self) -> None:
        """Close the coordinator."""
        self._coordinator.close()
