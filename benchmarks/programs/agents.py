"""Plays many agents without workers on loopback: joins them to one coordinator, says when what reached them.

agents.py PORT FIRST NUMBER [FAIL_AFTER]: the agents have the places FIRST to FIRST + NUMBER - 1. FAIL_AFTER seconds after the
start one of them announces a failure. Prints one JSON object.
"""

from __future__ import annotations

import json
import resource
import selectors
import socket
import sys
import time
from math import inf

from ddplaunch.launcher.decide.node import ReportStopping, StopOrdered
from ddplaunch.launcher.job import messages
from ddplaunch.launcher.job.orders import Generation, JobEnd, NodeEnd
from ddplaunch.reach.channel.dialer import Dialer
from ddplaunch.reach.channel.handshake import key
from ddplaunch.reach.channel.peer import Peer
from ddplaunch.spec.outcome import Traces, Why, WorkerExit
from ddplaunch.system.loop import loop
from ddplaunch.system.process.clock import Clock

FACTS = messages.NodeFacts(ddplaunch="", python="", torch="", script="", nnodes="")

TRACES = Traces(oom_kills=0, shm=None, log_folder=None)


class Agent:
    """One of them."""

    def __init__(self, place: int, port: int, played: Loop) -> None:
        self.place = place
        self.loop = played
        self.peer: Peer | None = None
        secret = key(None, f"\0\0{port}")
        self.dialer = Dialer(played.loop, secret, self, tcp_user_timeout=60.0)
        self.dialer.set_targets([(socket.AF_INET, ("127.0.0.1", port))])

    def on_refused(self, who: str, reason: str) -> None:
        """Try again."""

    def on_opened(self, peer: Peer) -> None:
        """Say hello."""
        self.peer = peer
        peer.received, peer.closed = self.received, self.closed
        hello = messages.Hello(self.place, f"host{self.place}", 1, "gloo", "no accelerator", "127.0.0.1", FACTS)
        peer.send(messages.encode(hello))

    def received(self, payload: bytes) -> None:
        """Answer as an agent whose workers do what they are told."""
        now = time.monotonic()
        assert self.peer is not None
        match messages.for_agent(payload):
            case messages.Ping(sent):
                self.peer.send(messages.encode(messages.Pong(sent, now)))
            case Generation():
                self.loop.begun.append(now)
            case StopOrdered():
                self.loop.stopped.append(now)
                self.end()
            case JobEnd():
                self.loop.quit.append(now)

    def end(self) -> None:
        """Have no workers any more."""
        assert self.peer is not None
        self.peer.send(messages.encode(NodeEnd(0, (), None, (), TRACES)))

    def fail(self) -> None:
        """Have a worker that failed by itself."""
        assert self.peer is not None
        now = time.monotonic()
        exit = WorkerExit(
            rank=self.place, local_rank=0, host="", pid=1, device="cpu", code=7, signal=None, at=now, seconds=1.0,
            stopped_with=None, stopped_at=None, core_dumped=False, peak_rss=0, cpu_seconds=0.0, error=None,
            stderr_tail="", log=None,
        )  # fmt: skip
        self.peer.send(messages.encode(ReportStopping(Why.FAILED, 15)))
        self.peer.send(messages.encode(NodeEnd(0, (exit,), None, (), TRACES)))

    def closed(self, _reason: str) -> None:
        """Be done."""
        self.loop.gone += 1


class Patience(Clock):
    """Time passes only while nothing arrives: who plays thousands is late itself, and nobody else is."""

    at = 0.0

    def now(self) -> float:
        """Return the time in seconds."""
        return self.at

    def select(
        self, selector: selectors.BaseSelector, deadline: float, lenient_deadline: float = inf
    ) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait for events."""
        began = time.monotonic()
        ready = selector.select(min(0.1, max(0.0, deadline - self.at)))
        if not ready:
            self.at += time.monotonic() - began
        return ready


class Loop:
    """All of them in one process."""

    def __init__(self, port: int, first: int, number: int) -> None:
        self.loop = loop.Loop(Patience())
        self.begun: list[float] = []
        self.stopped: list[float] = []
        self.quit: list[float] = []
        self.gone = 0
        self.agents = [Agent(place, port, self) for place in range(first, first + number)]

    def run(self, fail_after: float | None) -> dict[str, float]:
        """Go on until the coordinator has closed all connections."""
        began = time.monotonic()
        failed = None
        joining = True
        while self.gone < len(self.agents):
            self.loop.run_once()
            now = time.monotonic()
            joining = joining and len(self.begun) < len(self.agents)
            if failed is None and fail_after is not None and not joining and now - max(self.begun) > fail_after:
                failed = time.monotonic()
                self.agents[-1].fail()
        return {
            "began": began,
            "all_begun": max(self.begun, default=0.0),
            "failed": failed or 0.0,
            "all_stopped": max(self.stopped, default=0.0),
        }


def main() -> None:
    """Play them."""
    port, first, number, *rest = sys.argv[1:]
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    print(json.dumps(Loop(int(port), int(first), int(number)).run(float(rest[0]) if rest else None)))


if __name__ == "__main__":
    main()
