"""What the loop shows: the output of all hosts and its own few words, on their way to the front. Never blocks."""

from __future__ import annotations

import selectors
import time
from collections.abc import Iterable

from ddplaunch.agent.pipes import CONTROL, FULL, HASTE, STDERR, OutputQueue
from ddplaunch.remote import messages
from ddplaunch.remote.connection import HostConnection

_OURS = (b"ddplaunch: ", b"error: ")


class Console:
    """Holds the hosts' output back while nobody reads ours; who stops a job does not want to wait for that."""

    def __init__(
        self, queue: OutputQueue, selector: selectors.BaseSelector, *, quiet: bool, answers: bool = False
    ) -> None:
        self._queue = queue
        self._selector = selector
        self._quiet = quiet
        self._answers = answers
        self._told: dict[bytes, HostConnection] = {}  # what agents said in ddplaunch's name, and who was the first
        self._sent = 0  # bytes
        self._sent_at = 0.0  # when that was last new, CLOCK_MONOTONIC seconds
        self._hurries = False

    @property
    def is_empty(self) -> bool:
        """Whether the front has taken everything."""
        return not self._queue.size

    @property
    def is_full(self) -> bool:
        """Whether the hosts are left alone."""
        return self._queue.full

    @property
    def deadline(self) -> float | None:
        """When `mind` is to be called at the latest."""
        return self._sent_at + HASTE if self._hurries and self._queue.size else None

    def show(self, branch: HostConnection, stream: bytes, data: bytes) -> None:
        """Show what a host shows; what several of them say alike in our own name, once."""
        is_ours = stream == STDERR and data.startswith(_OURS)
        if not is_ours or self._told.setdefault(data, branch) is branch:
            self._queue.put(stream, data)

    def pass_on(self, data: bytes) -> None:
        """Hand on what is for whoever called for the job."""
        self._queue.put(CONTROL, data)

    def say(self, text: str) -> None:
        """Tell the user, unless nothing is to be told."""
        if not self._quiet:
            self.write(f"ddplaunch: {text}\n")

    def report(self, text: str) -> None:
        """Tell why the job failed; "": nothing to tell."""
        if not self._answers:
            self.write(text)
        elif text:
            self.pass_on(messages.encode(messages.Said(text=text)))

    def write(self, text: str) -> None:
        """Write to stderr."""
        self._queue.put(STDERR, text.encode(errors="replace"))

    def hurry(self) -> None:
        """Wait for a reader only while there is one, from now on."""
        if not self._hurries:
            self._hurries = True
            self._sent, self._sent_at = self._queue.sent, time.monotonic()

    def abandon(self) -> None:
        """Show nothing any more."""
        self._queue.abandon()

    def mind(self, branches: Iterable[HostConnection]) -> None:
        """Adapt to how full the way to the front is."""
        queue, now = self._queue, time.monotonic()
        if queue.sent != self._sent or not queue.size:
            self._sent, self._sent_at = queue.sent, now
        elif self._hurries and now >= self._sent_at + HASTE:
            queue.abandon()
        is_watched = queue.fileno() in self._selector.get_map()
        if queue.size and not is_watched:
            self._selector.register(queue, selectors.EVENT_WRITE, queue.flush)
        elif is_watched and not queue.size:
            self._selector.unregister(queue)
        if queue.full or queue.size < FULL // 2:
            for branch in branches:
                branch.pause(queue.full)
