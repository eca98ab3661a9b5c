"""A question that a child answers while the loop goes on: it may take long, or hang."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Generic, TypeVar

from ddplaunch.process.ask import AskedEnded, fork_asked, unpack
from ddplaunch.process.tree import ends_within

if TYPE_CHECKING:
    from ddplaunch.loop.loop import Loop

T = TypeVar("T")
KILL_TIMEOUT = 1.0  # seconds that the child has to end; it waits for no disk itself


class Asked(Generic[T]):
    """One question. It has no time limit: a question that may hang calls `process.ask.ask`, which has one."""

    def __init__(
        self,
        loop: Loop,
        question: Callable[[], T],
        otherwise: T,
        answered: Callable[[T], object],
        descriptors: Sequence[int],
    ) -> None:
        """Ask; `answered` is called once, from the loop: with the answer, or with `otherwise` if there is none.

        Without room for a child that is at once. The child has no descriptors but these, from `process.ask.FIRST` on.
        """
        import pickle  # noqa: F401 - where that fails, it fails here, and not in the loop when the answer has come

        self._loop = loop
        self._answered = answered
        self.answer = otherwise  # until there is another
        self._received = b""
        self.pid = 0  # of the child while it is asked: only this object may reap it
        try:
            self.pid, self._pipe = fork_asked(question, descriptors)
        except OSError:  # the machine has no room for it
            answered(otherwise)
        else:
            loop.watch(self._pipe, self._readable)

    def _readable(self) -> None:
        if data := os.read(self._pipe, 1 << 16):
            self._received += data
        else:
            self._close(self._received)

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
