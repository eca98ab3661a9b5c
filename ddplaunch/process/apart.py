"""Has children asked what may take long, while a loop goes on, and knows which of them have not answered yet."""

from __future__ import annotations

import selectors
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from ddplaunch.process.ask import Asked

T = TypeVar("T")


class AskApart:
    """What a loop asks by; see `Asked`."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._asked: list[Asked[Any]] = []

    def __call__(
        self,
        question: Callable[[], T],
        otherwise: T,
        answered: Callable[[T], None] = lambda _: None,
        descriptors: Sequence[int] = (),
        within: float | None = None,
    ) -> Asked[T]:
        """Ask; after `within` seconds there is no answer any more."""
        from ddplaunch.process.ask import Asked  # few jobs need it

        asked = Asked(question, otherwise, self._selector, answered, descriptors, within)
        self._asked = [*(one for one in self._asked if one.pid), asked]
        return asked

    @property
    def pids(self) -> frozenset[int]:
        """The children that have not answered."""
        return frozenset(asked.pid for asked in self._asked if asked.pid)

    def give_up(self) -> None:
        """Wait for no answer any more."""
        for asked in self._asked:
            asked.give_up()
