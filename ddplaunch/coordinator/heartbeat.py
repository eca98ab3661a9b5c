"""Whether the other side of a connection is alive, and what its clock says. Pure; keeps no clock of its own."""

from __future__ import annotations

from collections import deque

_KEPT = 8  # answers: the quickest of the last ones counts, so that drifting clocks are followed


class Heartbeat:
    """Counts questions without an answer, and measures the offset between two clocks as NTP does."""

    def __init__(self) -> None:
        self.unanswered = 0
        self._samples: deque[tuple[float, float]] = deque(maxlen=_KEPT)  # (round trip, offset), seconds

    def ping_sent(self) -> None:
        """Note that a question goes out."""
        self.unanswered += 1

    def received(self) -> None:
        """Note a sign of life."""
        self.unanswered = 0

    def pong_received(self, sent: float, at: float, now: float) -> None:
        """Learn from an answer: asked at `sent`, answered when the other clock said `at`, here at `now`."""
        if sent <= now:
            self._samples.append((now - sent, (sent + now) / 2 - at))

    @property
    def offset(self) -> float:
        """What has to be added to the other clock's times to get ours, in seconds; right to half a round trip."""
        if not self._samples:
            return 0.0
        trip, offset = min(self._samples)
        return 0.0 if abs(offset) <= trip / 2 else offset  # if they may be one clock, as on one host, they are
