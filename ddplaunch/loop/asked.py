"""A question that a child answers while the loop goes on: it may take long, or hang."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Generic, TypeVar

from ddplaunch.process.ask import LONGEST, AskedEnded, fork_asked, unpack
from ddplaunch.process.tree import ends_within

if TYPE_CHECKING:
    from ddplaunch.loop.loop import Loop

T = TypeVar("T")
KILL_TIMEOUT = 1.0  # seconds that the child has to end; it waits for no disk itself


class Asked(Generic[T]):
    """One question."""

    def __init__(
        self,
        loop: Loop,
        question: Callable[[], T],
        otherwise: T,
        answered: Callable[[T], object],
        descriptors: Sequence[int],
        within: float | None,
    ) -> None:
        """Ask; `answered` is called once, from the loop: with the answer, or with `otherwise` if there is none.

        Without room for a child that is at once. The child has no descriptors but these, from `process.ask.FIRST` on.
        After `within` seconds the kernel ends it; None: it has no time limit.
        """
        import pickle  # noqa: F401 - where that fails, it fails here, and not in the loop when the answer has come

        self._loop = loop
        self._answered = answered
        self.answer = otherwise  # until there is another
        self._received = bytearray()
        self.pid = 0  # of the child while it is asked: only this object may reap it
        try:
            self.pid, self._pipe = fork_asked(question, descriptors, within)
        except OSError:  # the machine has no room for it
            answered(otherwise)
        else:
            loop.watch(self._pipe, self._readable)

    def _readable(self) -> None:
        data = os.read(self._pipe, 1 << 16)
        self._received += data
        if not data:
            self._close(bytes(self._received))
        elif len(self._received) > LONGEST:
            self.give_up()

    def give_up(self) -> None:
        """Answer the question by `otherwise`, unless it is answered already: the loop is to wait no longer."""
        if self.pid:
            self._close(b"")

    def _close(self, received: bytes) -> None:
        pid, self.pid = self.pid, 0
        self._loop.unwatch(self._pipe)
        os.close(self._pipe)
        os.kill(pid, signal.SIGKILL)
        if ends_within(pid, KILL_TIMEOUT):
            os.waitpid(pid, 0)
        with suppress(AskedEnded):
            self.answer = unpack(received)
        self._answered(self.answer)
