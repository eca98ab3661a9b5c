"""What a coordinator answers to an agent that comes late."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from ddplaunch.control.handshake import Key
from ddplaunch.coordinator.connections import Terms
from ddplaunch.coordinator.incoming import Incoming
from ddplaunch.coordinator.messages import Hello, NodeFacts
from ddplaunch.coordinator.orders import JobEnd
from ddplaunch.supervise import job
from ddplaunch.supervise.electorate import Vote
from tests.loops import FakeLoop

HELLO = Hello(
    requested_rank=None,
    host="c",
    workers=1,
    backend="gloo",
    backend_reason="",
    reached="b",
    facts=NodeFacts(ddplaunch="1", python="3", torch="2", script="", nnodes="1:3"),
    votes=(Vote(1, 2),),
)


def test_who_has_lost_node_0_and_comes_when_the_job_has_ended_learns_how_it_has_ended() -> None:
    loop, sent = FakeLoop(), list[Any]()
    terms = Terms(
        max_nodes=3,
        run_id="run-1",
        address=None,
        key=Key(b"key"),
        listen="127.0.0.1",
        ports=(0,),
        has_front=False,
        heartbeat_timeout=10.0,
    )
    coordinator = SimpleNamespace(state=job.State(policy=job.Policy(min_nodes=1, max_nodes=3)), feed=sent.append)
    incoming = Incoming(loop, terms, cast(Any, coordinator), print)
    end = JobEnd(status=130, why="signalled")
    incoming.agents.end(end, ())
    incoming.agents.send = lambda ids, order: sent.append((ids, order))  # type: ignore[method-assign]  # no connection is there
    incoming._on_message(3, HELLO)
    incoming.agents.close()
    assert sent == [((3,), end)]
