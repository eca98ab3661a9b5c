"""What the agent works with."""

from __future__ import annotations

import time

from ddplaunch.agent.setup import _time_of_day
from ddplaunch.process import clock


def test_the_time_before_a_line_is_right_after_a_pause(monkeypatch):
    paused = clock.Clock()
    paused._seen -= 3600.0  # the last look was an hour ago
    monkeypatch.setattr(clock, "now", paused.now)
    before = time.time()
    stamp = _time_of_day(clock.now()).decode()
    after = time.time()
    possible = {time.strftime("%H:%M:%S", time.localtime(at)) for at in (before, after)}
    assert stamp.partition(".")[0] in possible
