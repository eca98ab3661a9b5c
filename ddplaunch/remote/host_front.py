"""The front of an agent that was started from elsewhere: frames from there become signals, what the agent shows becomes frames.

It is to the agent what `front` is where the command was typed, but it blocks on nothing. When the way back is lost, or silent
for too long, the agent is told that its front is gone, and ends its workers.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Collection, Iterable
from functools import partial

from ddplaunch.agent import child
from ddplaunch.agent.front import passed_on
from ddplaunch.agent.pipes import CONTROL, HASTE, MESSAGE, ONE_FEWER, STDERR, FrontPipes
from ddplaunch.remote import messages
from ddplaunch.remote.messages import Report
from ddplaunch.remote.protocol import BEAT, FEWER, NUDGE, SIGNAL, FrameError
from ddplaunch.remote.stdio import InputPipe, OutputPipe

_FULL = 1 << 20  # bytes waiting for the way back from which the agent's output is left alone


class HostFront:
    """Serves one agent."""

    def __init__(self, inlet: InputPipe, outlet: OutputPipe, silence: float, host: str) -> None:
        """Prepare to serve; `silence` is the seconds without a frame after which nobody is there any more.

        `host` is this one, as it was called.
        """
        self._inlet = inlet
        self._outlet = outlet
        self._silence = silence
        self._host = host
        self._silent_at = time.monotonic() + silence
        self._selector = selectors.DefaultSelector()
        self._selector.register(inlet, selectors.EVENT_READ, self._readable)
        self._agent: int | None = None
        self._pipes: FrontPipes | None = None
        self._stops: Collection[int] = ()
        self._stopped = False
        self._lost = False
        self._flushes = False
        self._reads = False

    def report(self, what: Report) -> None:
        """Tell whoever started us."""
        self._outlet.put(CONTROL, messages.encode(what))

    def serve(
        self,
        agent: Callable[[FrontPipes], int],
        signals: Iterable[int],
        stops: Collection[int],
        meanwhile: Callable[[], None],
    ) -> int:
        """Do as `front.run` does.

        Raises:
            LaunchError: the machine has no room for the agent.
        """
        self._silent_at = time.monotonic() + self._silence  # nobody has listened until now
        passed = passed_on(signals)
        self._stops = stops
        pid, self._pipes = child.start(partial(self._as_agent, agent), passed)
        self._agent = pid
        for signum in passed:  # those that come to this process itself
            signal.signal(signum, self._nudge)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, passed)
        pidfd = os.pidfd_open(pid)
        self._selector.register(pidfd, selectors.EVENT_READ, lambda: None)
        meanwhile()
        while not child.has_ended(pid):
            self._wait(None)
        self._selector.unregister(pidfd)
        os.close(pidfd)
        wait_status = child.reap_agent(pid)
        self._agent = None
        self._watch_agent(False)
        while self._pass_on():
            pass
        status, words = child.status_of(pid, wait_status, self._host)
        if words:
            self._outlet.put(STDERR, words.encode())
        return status

    def finish(self, what: Report) -> None:
        """Send the last word, and wait until all has been taken; of a job that was told to stop, only while any is."""
        self.report(what)
        self._silent_at = time.monotonic() + self._silence
        while self._outlet.size and not self._lost:
            before = self._outlet.sent
            at = time.monotonic()
            self._wait(HASTE)
            if self._stopped and self._outlet.sent == before and time.monotonic() >= at + HASTE:
                return

    def _as_agent(self, agent: Callable[[FrontPipes], int], pipes: FrontPipes) -> int:
        self._inlet.close()
        self._outlet.close()
        return agent(pipes)

    # --- the loop

    def _wait(self, patience: float | None) -> None:
        if self._outlet.broken:
            self._lose()
        self._watch_outlet(bool(self._outlet.size))
        self._watch_agent(self._agent is not None and self._outlet.size < _FULL)
        if not self._lost:
            left = max(0.0, self._silent_at - time.monotonic())
            patience = left if patience is None else min(patience, left)
        for key, _ in self._selector.select(patience):
            key.data()
        if time.monotonic() >= self._silent_at:
            self._lose()

    def _watch_outlet(self, wanted: bool) -> None:
        if wanted and not self._flushes:
            self._selector.register(self._outlet, selectors.EVENT_WRITE, self._outlet.flush)
        elif self._flushes and not wanted:
            self._selector.unregister(self._outlet)
        self._flushes = wanted

    def _watch_agent(self, wanted: bool) -> None:
        if self._pipes is None or wanted is self._reads:
            return
        if wanted:
            self._selector.register(self._pipes.output[0], selectors.EVENT_READ, self._pass_on)
        else:
            self._selector.unregister(self._pipes.output[0])
        self._reads = wanted

    def _pass_on(self) -> bool:
        """Make a frame of what the agent shows; say whether there was anything."""
        assert self._pipes is not None
        try:
            message = self._pipes.output[0].recv(MESSAGE + 1, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        if not message:
            self._watch_agent(False)
            return False
        self._outlet.put(message[:1], message[1:])
        return True

    # --- from there

    def _readable(self) -> None:
        more = self._inlet.read()
        try:
            while (frame := self._inlet.take()) is not None:
                self._silent_at = time.monotonic() + self._silence
                self._heard(*frame)
        except FrameError:
            more = False
        if not more:
            self._lose()

    def _heard(self, tag: bytes, data: bytes) -> None:
        if tag == BEAT and not self._outlet.size:  # else what waits says as well that we are there
            self._outlet.put(BEAT, b"")
        elif tag in (SIGNAL, NUDGE) and data:
            self._stopped = self._stopped or data[0] in self._stops
            if tag == NUDGE:
                self._nudge(data[0], None)
            else:
                self._tell_agent(data[0])
        elif tag == FEWER:
            self._tell_agent(ONE_FEWER)

    def _tell_agent(self, number: int) -> None:
        if self._pipes is not None:
            try:
                os.write(self._pipes.signals[1], bytes([number]))
            except OSError:  # it has ended, or so many wait that one more makes no difference
                pass

    def _nudge(self, signum: int, _frame: object) -> None:
        """Send the agent a signal that is no reason to hurry, even if it has had one."""
        if self._agent is not None:
            os.kill(self._agent, signum)

    def _lose(self) -> None:
        """Take note that nobody is there any more."""
        if self._lost:
            return
        self._lost = True
        self._silent_at = float("inf")
        self._selector.unregister(self._inlet)
        self._outlet.abandon()
        if self._pipes is not None:
            os.close(self._pipes.signals[1])
