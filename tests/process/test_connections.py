"""The coordinator's connections on real sockets, with hundreds of agents in one loop."""

import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import closing

import pytest

from ddplaunch.launcher.job import messages
from ddplaunch.launcher.job.connections import Connections, Terms
from ddplaunch.reach.channel.dialer import Dialer
from ddplaunch.reach.channel.handshake import key
from ddplaunch.reach.channel.peer import Peer, sends_again_each_second
from ddplaunch.reach.silence import SHORTEST_LIMIT, SHORTEST_LIMIT_WITH_GAPS, Keepalive
from tests.loops import FakeLoop

KEY = key("a long secret", "job-1")
AGENTS = 300


class Crowd:
    """Connections, all that are on their other ends, and a clock that stands until it is put forward."""

    def __init__(self, agents: int = AGENTS, *, most: float = 4.0, may_be_shorter: bool = False) -> None:
        self.agents = agents
        self.loop = FakeLoop()
        self.limits: set[float] = set()  # of the silence of a host, in the pings
        self.lost: list[tuple[int, str]] = []
        self.peers: list[Peer] = []
        self.pings: Counter[Peer] = Counter()
        self.silent: set[Peer] = set()
        terms = Terms(
            keepalive=Keepalive(max_nodes=AGENTS, timeout=most, may_be_shorter=may_be_shorter),
            run_id="", address=None, key=KEY, listen="127.0.0.1", ports=(0,),
        )  # fmt: skip
        self.connections = Connections(self.loop, terms, self)

    def on_message(self, id: int, message: messages.ToCoordinator) -> None:
        """The agents say nothing but pongs."""

    def on_pong(self) -> None:
        """Nobody waits for an answer."""

    def on_part_dropped(self, id: int, reason: str) -> None:
        """Nothing is malformed."""

    def on_lost(self, id: int, reason: str, renewed_at: float) -> None:
        self.lost.append((id, reason))

    def on_refused(self, address: str, reason: str) -> None:
        """These have not even said hello."""

    def join(self) -> None:
        target = (socket.AF_INET, ("127.0.0.1", self.connections.port))
        for _ in range(self.agents):
            dialer = Dialer(self.loop, KEY, self, tcp_user_timeout=60)
            dialer.set_targets([target])
        self.loop.until(lambda: len(self.peers) == len(self.connections.ids) == self.agents == len(self.pings))

    def on_opened(self, peer: Peer) -> None:
        self.peers.append(peer)
        peer.received = lambda payload: self.received(peer, payload)

    def received(self, peer: Peer, payload: bytes) -> None:
        match messages.for_agent(payload):
            case messages.Ping(_, limit):
                self.pings[peer] += 1
                self.limits.add(limit)
                if peer not in self.silent:
                    answer(peer, payload)


def answer(peer: Peer, payload: bytes) -> None:
    """Answer a ping, as an agent does."""
    match messages.for_agent(payload):
        case messages.Ping(sent):
            peer.send(messages.encode(messages.Pong(sent, sent)))


@pytest.fixture
def crowd() -> Iterator[Crowd]:
    crowd = Crowd()
    with closing(crowd.connections):
        crowd.join()
        yield crowd
    for peer in crowd.peers:
        peer.close()


def test_hundreds_are_pinged_once_a_beat_and_what_else_there_is_comes_in_between(crowd: Crowd) -> None:
    assert set(crowd.pings.values()) == {1}
    silent = crowd.peers[AGENTS // 2]
    crowd.silent.add(silent)
    for beat in range(2, 6):
        crowd.loop.advance(1.0)
        crowd.loop.turn()
        crowd.loop.turn()
        pinged = [number for number in crowd.pings.values() if number == beat]
        assert 0 < len(pinged) < AGENTS, "all at once"
        crowd.loop.until(lambda beat=beat: set(crowd.pings.values()) == {beat})  # type: ignore[misc]
        assert crowd.loop.deadline == crowd.loop.now() + 1.0
    assert not crowd.lost
    crowd.loop.advance(1.0)
    crowd.loop.until(lambda: bool(crowd.lost))
    assert [reason for _, reason in crowd.lost] == ["silent for 4 s"]
    assert len(crowd.connections.ids) == AGENTS - 1


def test_many_pings_out_of_turn_make_nobody_look_dead(crowd: Crowd) -> None:
    """As many nodes as the job has no place for say hello within a round trip, and each wants to know who is there."""
    crowd.silent.update(crowd.peers)
    for number in range(2, 12):
        crowd.connections.ping_all()
        assert not crowd.connections.all_answered_ping_all
        crowd.loop.until(lambda number=number: set(crowd.pings.values()) == {number})  # type: ignore[misc]
    assert not crowd.lost
    for beat in range(12, 15):
        crowd.loop.advance(1.0)
        crowd.loop.until(lambda beat=beat: bool(crowd.lost) or set(crowd.pings.values()) == {beat})  # type: ignore[misc]
        assert not crowd.lost


HOST_LIMIT = SHORTEST_LIMIT if sends_again_each_second() else SHORTEST_LIMIT_WITH_GAPS


@pytest.mark.parametrize(("pauses", "limit"), [((), HOST_LIMIT), ((3.0,), 9.0)])
def test_a_silent_host_is_lost_earlier_but_not_where_one_has_come_back_from_a_longer_silence(
    pauses: tuple[float, ...], limit: float
) -> None:
    crowd = Crowd(2, most=10.0, may_be_shorter=True)
    with closing(crowd.connections):
        crowd.join()
        kernels = [connection.peer for connection in crowd.connections._connections.values()]

        def beat(silence: float) -> None:
            """Let a second pass, after which the kernel of the first host has been silent for so long."""
            kernels[0].host_silence = lambda: silence  # type: ignore[method-assign]
            crowd.loop.advance(1.0)
            expected = {peer: number + 1 for peer, number in crowd.pings.items()}
            crowd.loop.until(lambda: bool(crowd.lost) or crowd.pings == expected)

        for pause in pauses:
            beat(pause)
            beat(0.5)
        beat(0.9)
        assert max(crowd.limits) == limit
        crowd.silent = set(crowd.peers)
        seconds = 0
        while not crowd.lost:
            seconds += 1
            beat(float(seconds))
        assert [reason for _, reason in crowd.lost] == [f"silent for {limit:g} s"]
        assert seconds == limit, "the other one, whose kernel answers, is not lost yet"
    for peer in crowd.peers:
        peer.close()
