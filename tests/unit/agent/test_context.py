"""What the parts of an agent work with."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

from ddplaunch.launcher.node.context import AgentContext
from ddplaunch.system.process.clock import Clock


def test_the_time_before_a_line_is_right_after_a_pause():
    paused = Clock()
    paused._seen -= 3600.0  # the last look was an hour ago
    context: Any = SimpleNamespace(_loop=paused)
    before = time.time()
    stamp = AgentContext.time_of_day(context, paused.now()).decode()
    after = time.time()
    possible = {time.strftime("%H:%M:%S", time.localtime(at)) for at in (before, after)}
    assert stamp.partition(".")[0] in possible
