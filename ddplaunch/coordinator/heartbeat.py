"""Whether the other side of a connection is alive, and the offset of its clock. Pure; reads no clock."""

from __future__ import annotations

from collections import deque

_KEPT = 8  # pongs: the quickest of the last ones counts, so that drifting clocks are followed


class Heartbeat:
    """Counts pings without an answer, and measures the offset between two clocks as NTP does."""

    def __init__(self) -> None:
        self.unanswered = 0
        self._samples: deque[tuple[float, float]] = deque(maxlen=_KEPT)  # (round trip, offset), seconds

    def ping_sent(self) -> None:
        """Note that a ping is sent."""
        self.unanswered += 1

    def received(self) -> None:
        """Note that a message has arrived."""
        self.unanswered = 0

    def pong_received(self, sent: float, at: float, now: float) -> None:
        """Take a pong: the ping was sent at `sent` and answered at `at` by the other clock, the pong arrived at `now`."""
        if sent <= now:
            self._samples.append((now - sent, (sent + now) / 2 - at))

    @property
    def offset(self) -> float:
        """What has to be added to the other clock's times to get ours, in seconds; right to half a round trip."""
        if not self._samples:
            return 0.0
        trip, offset = min(self._samples)
        return 0.0 if abs(offset) <= trip / 2 else offset  # if they may be one clock, as on one host, they are

    @property
    def error(self) -> float:
        """How many seconds the offset may be wrong by; 0.0 if it is taken for one clock."""
        return min(self._samples)[0] / 2 if self._samples and self.offset else 0.0
