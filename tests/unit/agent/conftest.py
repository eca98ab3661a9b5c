"""An agent whose workers are played."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

import pytest

from ddplaunch.launcher.node import leftovers
from ddplaunch.launcher.node.signals import SignalSource
from tests.unit.agent.bed import Bed, listen_to_the_front_alone


@pytest.fixture
def make_bed(monkeypatch):
    """Make an agent with so many workers; it takes no real signals, and no process of the test is a leftover of it."""
    monkeypatch.setattr(SignalSource, "listen", listen_to_the_front_alone)
    monkeypatch.setattr(leftovers, "descendants", lambda *_, **__: [])
    monkeypatch.setattr(leftovers, "reap", lambda _: None)
    with ExitStack() as opened:
        yield partial(Bed, opened)
