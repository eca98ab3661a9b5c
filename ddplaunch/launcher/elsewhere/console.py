"""Part of the dispatcher: the output of all hosts and its own messages, on their way to the front. Never blocks.

The front (the process that was typed) writes them to the terminal, and may take none for long, as after Ctrl-S.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable
from itertools import chain

from ddplaunch.launcher.output.bars import Bar, BarFeed, unpack
from ddplaunch.reach.connections import HostConnection
from ddplaunch.reach.pipes import BARS, FULL, OURS, STDERR, UNREAD_TIMEOUT, OutputQueue
from ddplaunch.system.errors import visible
from ddplaunch.system.loop.loop import Loop
from ddplaunch.system.loop.stream import FrameError
from ddplaunch.system.process.clock import is_due, soonest

REMEMBERED = 100  # messages of ours; hosts send equal ones at about the same time


class Console:
    """Has hosts hold output back while the front reads none; a stopped job waits UNREAD_TIMEOUT seconds for that at most."""

    def __init__(self, loop: Loop, queue: OutputQueue) -> None:
        """Show what hosts send through `queue`, which leads to the front; hosts hold their output back while it is full."""
        self._loop = loop
        self.queue = queue
        # by message that ddplaunch itself printed on a host, the host that sent it first: the others' are dropped
        self._first_sender: dict[bytes, HostConnection] = {}
        self._sent_before = 0  # bytes that the front had read at the last look
        self._last_read_at = 0.0  # by the loop's clock: when the front last read, or had nothing to read
        self._gives_up_front = False  # one that takes nothing for UNREAD_TIMEOUT: from when the job is being stopped
        self._wake_timer = loop.timer(None, lambda: None)  # ends the sleep when `update` has something to do
        self._bars: dict[HostConnection, tuple[Bar, ...]] = {}  # the progress bars that are shown of each host
        self._bar_feed = BarFeed(queue)

    def show(self, host: HostConnection, stream: bytes, data: bytes) -> None:
        """Show output of a host. A message of ddplaunch (OURS) that several hosts send is shown once.

        Raises FrameError: it is malformed.
        """
        if stream == BARS:
            self._show_bars(host, data)
        elif stream != OURS:
            self.queue.put(stream, data)
        else:
            sender = self._first_sender.setdefault(data, host)
            if sender is host:
                self.queue.put(STDERR, data)
            if len(self._first_sender) > REMEMBERED:
                oldest = next(iter(self._first_sender))
                del self._first_sender[oldest]

    def _show_bars(self, host: HostConnection, message: bytes) -> None:
        """Keep the progress bars of a host, and show them with those of all hosts. Raises FrameError: they are malformed."""
        try:
            bars = unpack(message)
        except ValueError as error:
            raise FrameError(f"sent what it should not: {error}") from None
        before = self._bars.get(host, ())
        self._bars[host] = bars
        if len(bars) < len(before):
            self._pass_bars_on()  # at once: a bar that has ended may follow as a line of output
        elif bars != before:
            self._bar_feed.note_change(self._loop.now())

    def forget_bars(self, host: HostConnection) -> None:
        """Show no progress bars of this host any more."""
        if self._bars.pop(host, ()):
            self._pass_bars_on()

    def _pass_bars_on(self) -> None:
        """Show the progress bars of all hosts now."""
        self._bar_feed.update([*chain.from_iterable(self._bars.values())], self._loop.now())

    def note_signal(self, signum: int) -> None:
        """Draw the progress bars again after SIGWINCH and SIGCONT: the terminal has another size, or the shell wrote to it."""
        if signum in (signal.SIGWINCH, signal.SIGCONT):
            self._bar_feed.repeat(self._loop.now())

    def write(self, text: str) -> None:
        """Write to stderr."""
        self.queue.put(STDERR, visible(text).encode(errors="replace"))

    def limit_wait(self) -> None:
        """From now on wait for the front only while the front takes output."""
        if not self._gives_up_front:
            self._gives_up_front = True
            self._sent_before, self._last_read_at = self.queue.sent, self._loop.now()

    def update(self, hosts: Iterable[HostConnection]) -> None:
        """Let hosts send output or not, by how full the queue is; give up a front that reads none. Called before each sleep."""
        queue, now = self.queue, self._loop.now()
        if is_due(self._bar_feed.deadline, now):
            self._pass_bars_on()
        reads = queue.sent != self._sent_before or not queue.size  # or has nothing to read
        if reads:
            self._sent_before, self._last_read_at = queue.sent, now
        elif self._gives_up_front and now >= self._last_read_at + UNREAD_TIMEOUT:
            queue.abandon()
        read_by = self._last_read_at + UNREAD_TIMEOUT if self._gives_up_front and queue.size else None
        self._wake_timer.set(soonest(read_by, self._bar_feed.deadline))
        # between half full and full hosts go on with what they do: else each message would change that
        if queue.full or queue.size < FULL // 2:
            for host in hosts:
                host.hold(queue.full)
