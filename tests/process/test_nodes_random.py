"""A coordinator and agents in one loop, one of which sends whatever it likes: it is expelled or ignored, and the others go on."""

from __future__ import annotations

import json
import random
import resource
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ddplaunch.cli.job import parse, resolve
from ddplaunch.launcher.decide import job, node
from ddplaunch.launcher.job import messages
from ddplaunch.launcher.job.connections import Terms
from ddplaunch.launcher.job.coordinator import Coordinator
from ddplaunch.launcher.job.incoming import Incoming
from ddplaunch.launcher.job.messages import Hello, NodeFacts
from ddplaunch.launcher.job.orders import Generation, JobEnd, NodeEnd
from ddplaunch.launcher.tell.job_reporter import JobReporter
from ddplaunch.launcher.tell.reporter import Reporter, Stderr
from ddplaunch.plan.cluster.checks import ClusterFacts
from ddplaunch.plan.cluster.discover import discover
from ddplaunch.plan.devices.node import inspect
from ddplaunch.plan.make import make_plan
from ddplaunch.reach.channel.dialer import Dialer
from ddplaunch.reach.channel.handshake import key
from ddplaunch.reach.channel.peer import Peer
from ddplaunch.reach.silence import Keepalive
from ddplaunch.record.window.questions import AskStacks, AskStatus
from ddplaunch.spec.outcome import Traces
from tests.loops import FakeLoop
from tests.peers import PeerRecorder
from tests.process.speaker import hello
from tests.unit.builders import Host
from tests.unit.coordinator.played import PlayedAsker
from tests.unit.coordinator.test_messages import TO_AGENT, TO_COORDINATOR
from tests.unit.hostile import HOSTILE, places, with_value
from tests.written import KeptLines

KEY = key("a long secret", "job-1")
SLOWEST = 2.0  # seconds for one turn of the loop, on a machine that is busy
MESSAGES = 400  # of each agent that has lost its mind
# by which any agent may stop the job, as its user may on its node
STOPS = ("stopping", "noticed", "escalate")
FACTS = NodeFacts(ddplaunch="", python="", torch="", script="", nnodes="")


class Bed:
    """A job of two nodes or three, of which node 0 and one more do as they are told."""

    def __init__(self) -> None:
        self.loop = FakeLoop()
        self.lines = KeptLines()
        self.honest: list[Any] = []
        self.slowest = 0.0
        self.generation = -1  # of the other agent
        self.dialers: list[Dialer] = []
        self.dialed: list[PeerRecorder] = []
        spec = resolve(parse(["--nnodes=2:3", "--node-rank=0", "--max-restarts=1000000", "train.py"]), {}, None)
        here = inspect(spec, {})
        facts = ClusterFacts(spec=spec, env={}, hostname=here.host, here=Host())
        draft = make_plan(spec, discover(facts), here, run_id="job-1")
        policy = job.Policy(min_nodes=2, max_nodes=3, max_restarts=1_000_000, last_call=1.0, nodes_are_replaceable=True)
        terms = Terms(
            keepalive=Keepalive(max_nodes=3, timeout=60.0),
            run_id="job-1", address="127.0.0.1", key=KEY, listen="127.0.0.1", ports=(0,),
        )  # fmt: skip
        reporter = Reporter(spec, Stderr(writer=self.lines), time.time)
        self.coordinator = Coordinator(
            self.loop, job.first_state(policy, self.loop.now(), 1), draft, JobReporter(reporter)
        )
        self.agents = Incoming(self.loop, terms, self.coordinator).agents
        own = self.agents.add_own(Hello(0, "here", 1, "gloo", "", "127.0.0.1", FACTS))
        self.coordinator.add_own_agent(self.take, own, self.agents)
        self.dial(self.opened)

    def dial(self, opened: Any) -> None:
        """Connect once more to the coordinator."""
        self.dialed.append(PeerRecorder(opened))
        dialer = Dialer(self.loop, KEY, self.dialed[-1], tcp_user_timeout=60)
        self.dialers.append(dialer)
        dialer.set_targets([(socket.AF_INET, ("127.0.0.1", self.agents.port))])

    def close(self) -> None:
        self.coordinator.close()
        for dialer in self.dialers:
            dialer.stop()
        for peer in (peer for dialed in self.dialed for peer in dialed.peers):
            peer.close()

    # --- who does as told

    def take(self, order: Any) -> None:
        """Do what node 0's own agent is told."""
        if isinstance(order, node.StopOrdered):
            end = node_end(self.coordinator.state.generation.number)
            self.loop.timer(self.loop.now(), lambda: self.coordinator.on_report(job.SELF_ID, end))

    def opened(self, peer: Peer) -> None:
        self.peer = peer
        peer.received = self.received
        peer.closed = self.honest.append
        peer.send(json.dumps(hello(None, "honest")).encode())

    def received(self, payload: bytes) -> None:
        """Do what an agent is told."""
        match messages.for_agent(payload):
            case messages.Ping(sent):
                self.peer.send(messages.encode(messages.Pong(sent, sent)))
            case node.StopOrdered():
                self.peer.send(messages.encode(node_end(self.generation)))
            case Generation(number=number) as order:
                self.generation = number
                self.honest.append(order)
            case JobEnd() as order:
                self.honest.append(order)

    # ---

    def turn(self) -> None:
        """Serve what has come, let some time pass, and note how long that took."""
        began = time.thread_time()
        self.loop.turn(0.001)
        self.slowest = max(self.slowest, time.thread_time() - began)
        self.loop.advance(0.05)

    def until(self, condition: Callable[[], object]) -> None:
        """Let time pass until this is true."""
        for _ in range(2000):
            if condition():
                return
            self.turn()
        pytest.fail(f"{self.coordinator.state} {self.lines.said[-5:]}")


def node_end(generation: int) -> NodeEnd:
    traces = Traces(oom_kills=0, shm=None, log_folder=None)
    return NodeEnd(generation, exits=(), start_failure=None, leftovers=(), traces=traces)


@pytest.fixture
def bed() -> Iterator[Bed]:
    bed = Bed()
    yield bed
    bed.close()


class Mad:
    """An agent that says hello, and then anything; it comes back as often as it is shown out."""

    def __init__(self, bed: Bed, seed: int, known: list[dict[str, Any]]) -> None:
        self._bed = bed
        self._random = random.Random(seed)
        self._known = known
        self._peer: Peer | None = None
        self.lost: list[str] = []
        bed.dial(self.opened)

    def opened(self, peer: Peer) -> None:
        self._peer = peer
        peer.closed = self.closed
        if self._random.random() < 0.9:
            peer.send(json.dumps(hello(None, "mad", self._random.choice([1, 2, 60]))).encode())

    def closed(self, reason: str) -> None:
        self.lost.append(reason)
        self._peer = None
        self._bed.dial(self.opened)

    def speak(self) -> None:
        """Send a message, if there is a connection."""
        if self._peer is not None:
            self._peer.send(self.payload())

    def payload(self) -> bytes:
        """Return a message of any kind: whole, with hostile values, or no message at all."""
        draw = self._random
        message: Any = draw.choice(self._known)
        if "generation" in message:
            message = message | {
                "generation": self._bed.coordinator.state.generation.number + draw.choice([0, 0, 0, 1, -1])
            }
        if message["type"] in ("answered", "chunk"):
            message = message | {"number": draw.randrange(6)}
        if (kind := draw.random()) < 0.05:
            return draw.randbytes(draw.choice([0, 1, 100, 60_000]))
        for _ in range(0 if kind < 0.6 else draw.choice([1, 1, 3])):
            at = draw.choice([at for at in places(message) if at and at != ("type",)] or [()])
            if at:
                message = with_value(message, at, draw.choice(HOSTILE))
        return json.dumps(message).encode()


@pytest.mark.parametrize("seed", range(6))
def test_whatever_an_agent_sends_the_others_go_on(bed: Bed, seed: int) -> None:
    known = [
        # a program that cannot be started ends the job, too, and so do processes that cannot be ended
        message | {"start_failure": None, "leftovers": []} if message["type"] == "ended" else message
        for message in (*TO_COORDINATOR, *TO_AGENT)
        if message["type"] not in STOPS
    ]
    mad = Mad(bed, seed, known)
    bed.until(lambda: bed.honest)
    asker = PlayedAsker()
    questions = 0
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(MESSAGES):
        mad.speak()
        if number % 10 == 0:
            questions += 1
            asked = AskStatus() if number % 20 else AskStacks()
            bed.coordinator.questions.ask(asked, 1.0, asker)
        bed.turn()
        assert bed.agents.job_end is None, bed.lines.said
    assert all(isinstance(order, Generation) for order in bed.honest), "the other agent was neither lost nor sent home"
    assert mad.lost, "some of that is worth a connection"
    bed.loop.pass_time(3.0)
    assert asker.told.count("done") == questions, "each is done in its time, whoever does not answer"
    assert bed.slowest < SLOWEST
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 64 << 10, "KiB"
    assert len("".join(bed.lines.said)) < 2000 * MESSAGES
