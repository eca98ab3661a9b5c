"""What an agent says of a node 0 that it has not reached."""

from __future__ import annotations

from typing import Any

import pytest

from ddplaunch.launcher.job.orders import LookingForCoordinator
from ddplaunch.launcher.job.remote_link import CONNECTION_REFUSED, RemoteLink
from ddplaunch.reach.channel.handshake import Key
from ddplaunch.reach.channel.peer import CLOSED
from tests.loops import FakeLoop

TOKEN = "wrong token, or another job"
PROTOCOL = "protocol 2, here 1: install the same ddplaunch on all nodes"
SILENT = "no answer in 2 s"


@pytest.mark.parametrize(
    ("reasons", "said"),
    [
        ([], "it has not answered"),
        ([CONNECTION_REFUSED, CONNECTION_REFUSED], "a:0: connection refused"),
        ([CONNECTION_REFUSED, SILENT, CONNECTION_REFUSED], "a:1: no answer in 2 s"),
        ([SILENT, CLOSED], "a:1: connection closed"),
        ([TOKEN, CONNECTION_REFUSED, CLOSED, SILENT], f"a:0: {TOKEN}"),
        ([SILENT, PROTOCOL, SILENT], f"a:1: {PROTOCOL}"),
        ([PROTOCOL, TOKEN], f"a:1: {TOKEN}"),
    ],
)
def test_of_all_that_went_wrong_what_tells_most_is_said(reasons: list[str], said: str) -> None:
    hello: Any = None  # nobody is reached
    loop = FakeLoop()
    link = RemoteLink(loop, key=Key(b"key"), hello=hello, source=None, heartbeat_timeout=30.0, rdzv_timeout=10.0)
    link._queries = (("a", 29501),)
    for port, reason in enumerate(reasons):
        link._on_refused(f"a:{port}", reason)
    loop.pass_time(10.0)
    link.close()
    *looking, end = loop.events
    assert [type(event) for event in looking] == [LookingForCoordinator]
    assert f" at a, port 29501 ({said})\n" in end.text
    assert link.end == end
    assert loop.deadline is None
