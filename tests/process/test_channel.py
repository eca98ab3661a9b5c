"""The control channel on real sockets: one loop holds both sides, and unauthenticated clients through sockets of their own."""

import os
import resource
import socket
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from ddplaunch.reach.channel import dialer
from ddplaunch.reach.channel.dialer import LONGEST_PAUSE, STAGGER, Dialer, answers, target
from ddplaunch.reach.channel.handshake import (
    LIMIT,
    LIMIT_UNKNOWN,
    PROTOCOL,
    Client,
    Decoder,
    Server,
    Session,
    key,
    pack,
)
from ddplaunch.reach.channel.listener import Listener, Origins, index_to_drop, origin_of
from ddplaunch.reach.channel.peer import HANDSHAKE_TIMEOUT, MAX_QUEUED, Peer, error_of
from ddplaunch.system.errors import LaunchError
from ddplaunch.system.net.addresses import usable_addresses
from ddplaunch.system.net.port import listen, reserve
from tests.conftest import descriptors
from tests.loops import FakeLoop
from tests.peers import PeerRecorder

KEY = key("a long secret", "job-1")


class RecordingHandler:
    """The owner of a peer: what it has heard."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.heard: list[bytes] = []
        self.ends: list[str] = []
        peer.received = self.heard.append
        peer.closed = self.ends.append


class Loop(FakeLoop):
    """An agent's loop, with what is in it."""

    def __init__(self) -> None:
        super().__init__(at=100.0)
        self.listeners: list[Listener] = []
        self.dialers: list[Dialer] = []
        self.theirs: list[RecordingHandler] = []  # peers of listeners
        self.ours: list[RecordingHandler] = []  # peers of dialers
        self.raw_sockets: list[socket.socket] = []
        self.at_listeners = PeerRecorder(lambda peer: self.theirs.append(RecordingHandler(peer)))
        self.at_dialers = PeerRecorder(lambda peer: self.ours.append(RecordingHandler(peer)))
        self.refusals = self.at_listeners.refusals
        self.failures = self.at_dialers.refusals

    def turns(self, number: int = 20) -> None:
        for _ in range(number):
            self.turn()

    def listen(self, address: str | None = "127.0.0.1", ports=(0,), **options) -> Listener:
        return self.listen_at(listen(address, ports), **options)

    def listen_at(self, listening: socket.socket, **options) -> Listener:
        listener = Listener(self, listening, KEY, self.at_listeners, tcp_user_timeout=60, **options)
        self.listeners.append(listener)
        return listener

    def dial(self, *targets, secret=KEY) -> Dialer:
        dialer = Dialer(self, secret, self.at_dialers, tcp_user_timeout=60)
        self.dialers.append(dialer)
        dialer.set_targets(targets)
        return dialer

    def pair(self, **options) -> tuple[RecordingHandler, RecordingHandler]:
        """Both ends of a fresh connection: the listener's and the dialer's."""
        self.dial(at(self.listen(**options).port))
        self.until(lambda: self.theirs and self.ours)
        return self.theirs[0], self.ours[0]

    def raw_socket(self, port: int, host: str = "127.0.0.1", source: str = "") -> socket.socket:
        sock = socket.create_connection((host, port), source_address=(source, 0))
        sock.settimeout(0)
        self.raw_sockets.append(sock)
        return sock

    def say(self, sock: socket.socket, data: bytes) -> None:
        """Send what the loop lets through; a client that is refused does not care."""
        view = memoryview(data)
        while view:
            try:
                view = view[sock.send(view) :]
            except BlockingIOError:
                self.turn()
            except OSError:
                return

    def read(self, sock: socket.socket) -> bytes | None:
        """What has arrived; None: nothing; empty: the end."""
        try:
            return sock.recv(1 << 16)
        except BlockingIOError:
            return None
        except OSError:
            return b""

    def gone(self, sock: socket.socket) -> bool:
        """Whether the other side has closed."""
        return self.read(sock) == b""

    def agent(self, port: int) -> tuple[socket.socket, Session]:
        """An authenticated connection whose bytes the test holds in its own hands."""
        sock = self.raw_socket(port)
        client, decoder = Client(KEY), Decoder()
        while True:
            decoder.feed(self.read(sock) or b"")
            while (payload := decoder.take()) is not None:
                step = client.receive(payload)
                if step.session:
                    return sock, step.session
                assert step.reply
                sock.send(pack(step.reply))
            self.turn()

    def undisturbed(self, one: RecordingHandler, other: RecordingHandler) -> None:
        """Prove that two peers can still talk."""
        before = len(one.heard), len(other.heard)
        one.peer.send(b"are you there")
        other.peer.send(b"and you")
        self.until(lambda: (len(one.heard), len(other.heard)) == (before[0] + 1, before[1] + 1))
        assert not one.ends and not other.ends


@pytest.fixture
def loop() -> Iterator[Loop]:
    """One loop; everything that a test leaves in it is closed, and then nothing may be left."""
    fds = descriptors()
    loop = Loop()
    yield loop
    for listener in loop.listeners:
        listener.close()
    for each in loop.dialers:
        each.stop()
    assert loop.deadline is None
    for side in (*loop.theirs, *loop.ours):
        side.peer.close()
    for sock in loop.raw_sockets:
        sock.close()
    assert loop.is_idle
    loop.close()
    assert descriptors() == fds


def at(port: int, host: str = "127.0.0.1"):
    if ":" in host:
        return socket.AF_INET6, (host, port, 0, 0)
    return socket.AF_INET, (host, port)


def free_port() -> int:
    """A port on which nobody listens now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


# --- meeting


def test_two_sides_meet_and_talk(loop) -> None:
    coordinator, agent = loop.pair()
    agent.peer.send(b"hello")
    coordinator.peer.send(b"")
    coordinator.peer.send(b"x" * LIMIT)
    loop.until(lambda: coordinator.heard and len(agent.heard) == 2)
    assert coordinator.heard == [b"hello"]
    assert agent.heard == [b"", b"x" * LIMIT]
    assert {agent.peer.address, agent.peer.local_address, coordinator.peer.address} == {"127.0.0.1"}
    assert not loop.refusals and not loop.failures
    assert repr(agent.peer) == "<peer 127.0.0.1, open>"


def test_the_first_words_may_arrive_in_one_piece_with_the_handshake(loop) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        loop.dial(at(server.getsockname()[1]))
        loop.until(lambda: loop.dialers[0]._attempts)
        sock, _ = server.accept()
        loop.raw_sockets.append(sock)
    sock.settimeout(0)
    coordinator, decoder = Server(KEY), Decoder()
    assert coordinator.opening
    sock.send(pack(coordinator.opening))
    answers: list[bytes] = []

    def answered() -> bool:
        decoder.feed(loop.read(sock) or b"")
        answers.extend(iter(decoder.take, None))
        return bool(answers)

    loop.until(answered)
    step = coordinator.receive(answers[0])
    assert step.reply and step.session
    sock.send(pack(step.reply) + step.session.seal(b"a" * 2000) + step.session.seal(b"b"))
    loop.until(lambda: loop.ours)
    assert loop.ours[0].heard == [b"a" * 2000, b"b"]


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_without_an_address_both_families_are_listened_to(loop, host: str) -> None:
    listener = loop.listen(address=None)
    loop.dial(at(listener.port, host))
    loop.until(lambda: loop.theirs and loop.ours)
    assert (loop.theirs[0].peer.address, loop.theirs[0].peer.local_address) == (host, host)
    loop.undisturbed(loop.theirs[0], loop.ours[0])


def test_an_ipv6_address_alone_can_be_listened_on(loop) -> None:
    listener = loop.listen(address="::1")
    loop.dial(at(listener.port, "127.0.0.1"), at(listener.port, "::1"))
    loop.until(lambda: loop.theirs and loop.ours)
    # on a busy machine more than once
    assert {*loop.failures} == {(f"127.0.0.1:{listener.port}", "connection refused")}
    assert loop.deadline is None


def test_sockets_are_not_inherited_and_send_at_once(loop) -> None:
    for side in loop.pair():
        sock = side.peer._sock
        assert not os.get_inheritable(sock.fileno())
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 60_000


# --- ports


def test_a_taken_port_is_walked_past(loop) -> None:
    first, second = loop.listen(), free_port()
    assert loop.listen(ports=(first.port, second)).port == second


def test_no_free_port_is_an_error_that_names_them(loop) -> None:
    first, second = loop.listen(), loop.listen()
    with pytest.raises(LaunchError) as caught:
        loop.listen(ports=(first.port, second.port))
    assert caught.value.message == (
        f"no free port at 127.0.0.1 for the agents: {first.port} is taken, {second.port} is taken"
    )


def test_a_port_that_another_job_has_reserved_is_taken(loop) -> None:
    reservation = reserve()
    try:
        with pytest.raises(LaunchError, match=f"{reservation.port} is taken"):
            loop.listen(address=None, ports=(reservation.port,))
    finally:
        reservation.release()


def test_a_port_whose_last_job_has_just_ended_is_free(loop) -> None:
    coordinator, agent = loop.pair()
    port = coordinator.peer._sock.getsockname()[1]
    coordinator.peer.close()  # who closes first is remembered by the kernel for a minute
    loop.until(lambda: agent.ends)
    loop.listeners[0].close()
    assert loop.listen(address=None, ports=(port,)).port == port


def test_an_address_of_another_node_is_an_error(loop) -> None:
    with pytest.raises(LaunchError, match=r"^192\.0\.2\.1 is not an address of this node"):
        loop.listen(address="192.0.2.1")


# --- who is refused


@pytest.mark.parametrize("other", [key("guess", "job-1"), key("a long secret", "job-2")], ids=["token", "job"])
def test_a_client_of_another_job_is_refused_and_both_sides_say_why(loop, other) -> None:
    coordinator, agent = loop.pair()
    dialer = loop.dial(at(loop.listeners[0].port), secret=other)
    loop.until(lambda: loop.failures)
    loop.advance(LONGEST_PAUSE)
    loop.until(lambda: len(loop.failures) >= 2)
    dialer.stop()
    assert set(loop.failures) == {(f"127.0.0.1:{loop.listeners[0].port}", "wrong token, or another job")}
    assert loop.refusals == [("127.0.0.1", "wrong token, or another job")]  # told once
    loop.undisturbed(coordinator, agent)


def test_an_old_protocol_is_refused_and_told_by_the_coordinator(loop) -> None:
    listener = loop.listen()
    sock = loop.raw_socket(listener.port)
    loop.say(sock, pack(b'{"ddplaunch":%d}' % (PROTOCOL - 1)))
    loop.until(lambda: loop.refusals)
    assert loop.refusals == [
        ("127.0.0.1", f"protocol {PROTOCOL - 1}, here {PROTOCOL}: install the same ddplaunch on all nodes")
    ]


def test_who_only_looks_whether_anybody_listens_is_not_worth_a_word(loop) -> None:
    listener = loop.listen()
    loop.raw_socket(listener.port).close()
    sock = loop.raw_socket(listener.port)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    loop.until(lambda: listener._half_open)
    sock.close()
    loop.until(lambda: not listener._half_open)
    assert not loop.refusals


def test_half_open_connections_by_the_hundred_disturb_nobody(loop) -> None:
    coordinator, agent = loop.pair(max_half_open=50)
    listener = loop.listeners[0]
    for _ in range(300):
        loop.raw_socket(listener.port)
        loop.turn()
        assert len(listener._half_open) <= 50
    loop.undisturbed(coordinator, agent)
    loop.dial(at(listener.port))  # a genuine one still gets in
    loop.until(lambda: len(loop.ours) == 2)
    assert loop.refusals == [("127.0.0.1", "too many unauthenticated connections")]
    loop.pass_time(HANDSHAKE_TIMEOUT)
    loop.until(lambda: not listener._half_open)
    assert loop.refusals[1:] == [("127.0.0.1", "handshake not completed in 5 s")]
    assert loop.deadline is None
    assert sum(loop.gone(sock) for sock in loop.raw_sockets if loop.read(sock)) == 300
    loop.undisturbed(coordinator, agent)


def test_who_comes_with_hundreds_is_answered_at_once_where_hundreds_are_expected(loop) -> None:
    listener = loop.listen(max_half_open=800)
    clients = [loop.raw_socket(listener.port) for _ in range(200)]
    loop.turn()
    assert all(map(loop.read, clients))


def test_all_addresses_of_this_host_are_one_origin_of_connections(loop) -> None:
    listener = loop.listen(max_half_open=20)
    for number in range(2, 102):
        loop.raw_socket(listener.port, source=f"127.0.0.{number}")
        loop.turn()
    latest = [f"127.0.0.{number}" for number in range(82, 102)]
    assert [one.greeting.address for one in listener._half_open] == latest


def test_a_host_is_one_origin_whatever_address_it_connects_from() -> None:
    here = ("127.0.0.1", "127.9.8.7", "::1", *usable_addresses())
    assert len({origin_of(address) for address in here}) == 1
    assert origin_of("2001:db8::1") == origin_of("2001:db8::ffff:1%eth0") != origin_of("2001:db8:0:1::1")
    assert len({origin_of(address) for address in ("203.0.113.1", "203.0.113.2", "127.0.0.1", "2001:db8::1")}) == 4


def test_without_a_free_descriptor_an_address_counts_as_itself_for_the_moment() -> None:
    origins = Origins()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
    try:
        assert origins["2001:db8::1"] == "2001:db8::1"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert origins["2001:db8::1"] == origins["2001:db8::2"]


def test_an_origin_that_crowds_loses_its_oldest_connection_and_others_none() -> None:
    assert index_to_drop(["slow", "host", "host"]) == 1
    assert index_to_drop(["host", "slow", "host", "other"]) == 0
    crowd: list[str] = ["slow", *map(str, range(9))]
    for number in range(100):
        crowd.append("host" if number % 2 else f"host {number}")
        del crowd[index_to_drop(crowd)]
    assert crowd[0] == "slow"


def test_of_origins_that_have_equally_many_connections_the_newest_is_dropped() -> None:
    assert index_to_drop(["slow", "a", "b"]) == 2
    assert index_to_drop(["slow", "a", "a", "b", "b", "c"]) == 4


def test_one_byte_a_second_is_too_slow(loop) -> None:
    coordinator, agent = loop.pair()
    listener = loop.listeners[0]
    sock = loop.raw_socket(listener.port)
    for byte in b"\0\0\0\x64{{":
        loop.say(sock, bytes([byte]))
        loop.turns(3)
        loop.pass_time(1)
    loop.until(lambda: loop.refusals)
    assert loop.refusals == [("127.0.0.1", "handshake not completed in 5 s")]
    loop.undisturbed(coordinator, agent)


def test_random_bytes_at_a_live_coordinator_disturb_nobody(loop) -> None:
    coordinator, agent = loop.pair()
    listener = loop.listeners[0]
    lengths = (b"", b"\0\0\0\x04", b"\0\0\x0f\xff", b"\x7f\xff\xff\xff")
    for number in range(80):
        sock = loop.raw_socket(listener.port)
        loop.say(sock, lengths[number % 4] + os.urandom(1 + 97 * number))
        if number % 3 == 0:
            sock.close()
        loop.turn()
        if number % 20 == 0:
            loop.undisturbed(coordinator, agent)
    loop.pass_time(HANDSHAKE_TIMEOUT)
    loop.until(lambda: not listener._half_open)
    assert {reason for _, reason in loop.refusals} >= {"is not ddplaunch"}
    assert len(loop.refusals) == len(set(loop.refusals)) <= 4
    loop.undisturbed(coordinator, agent)


def test_no_more_than_twenty_refusals_are_told(loop) -> None:
    listener = loop.listen(address=None)
    for version in range(2, 42):
        loop.say(loop.raw_socket(listener.port), pack(b'{"ddplaunch":%d}' % version))
    loop.until(lambda: not listener._half_open and len(loop.refusals) == 20)
    loop.turns()
    assert len(loop.refusals) == 20


def test_without_free_files_the_loop_does_not_spin_and_goes_on_later(loop) -> None:
    coordinator, agent = loop.pair()
    listener = loop.listeners[0]
    sock = socket.socket()
    loop.raw_sockets.append(sock)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    fillers: list[int] = []
    try:
        with pytest.raises(OSError, match="Too many open files"):
            fillers.extend(iter(lambda: os.dup(sock.fileno()), None))
        sock.connect(("127.0.0.1", listener.port))
        loop.until(lambda: loop.refusals)
        assert loop.refusals == [("new connections", "too many open files")]
        assert sum(loop.turn() for _ in range(20)) == 0
        loop.undisturbed(coordinator, agent)
    finally:
        for filler in fillers:
            os.close(filler)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert not listener._half_open
    loop.pass_time(1)
    loop.until(lambda: listener._half_open)


def test_a_listener_may_be_closed_in_the_midst_of_anything(loop) -> None:
    listener = loop.listen(max_half_open=2)
    loop.at_listeners.then_refused = listener.close
    for _ in range(5):
        loop.raw_socket(listener.port)
    loop.until(lambda: listener._closed)
    loop.turns(3)
    assert loop.deadline is None


# --- authenticated, and yet


def hold(loop: Loop, listener: Listener) -> tuple[socket.socket, Session]:
    """An agent that is to misbehave beside a genuine one."""
    sock, session = loop.agent(listener.port)
    loop.until(lambda: len(loop.theirs) == 2)
    return sock, session


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (lambda session: (1 << 30).to_bytes(4), "sent a frame of 1073741824 bytes, at most 65536 are allowed"),
        (lambda session: session.seal(b"stop")[:-1] + b"\0\0", "sent a frame with a wrong signature"),
        (lambda session: 2 * session.seal(b"first"), "sent a frame with a wrong signature"),
        (lambda session: pack(b"no signature", bytes(16)), "sent a frame with a wrong signature"),
    ],
    ids=["1 GB", "altered", "replayed", "forged"],
)
def test_a_wrong_frame_ends_the_connection_with_its_reason(loop, wrong, reason: str) -> None:
    listener = loop.listen()
    loop.dial(at(listener.port))
    loop.until(lambda: loop.ours)
    sock, session = hold(loop, listener)
    loop.say(sock, session.seal(b"first") if "1 GB" in reason else b"")
    loop.say(sock, wrong(session))
    loop.until(lambda: loop.theirs[1].ends)
    assert loop.theirs[1].ends == [reason]
    assert loop.theirs[1].heard in ([], [b"first"])
    loop.until(lambda: loop.gone(sock))
    loop.undisturbed(loop.theirs[0], loop.ours[0])


def test_a_frame_that_never_ends_takes_no_more_memory_than_a_frame_and_little_of_who_takes_no_part(loop) -> None:
    listener = loop.listen()
    sock, session = loop.agent(listener.port)
    loop.say(sock, session.seal(b"x" * LIMIT_UNKNOWN))
    loop.until(lambda: loop.theirs[0].heard)
    loop.theirs[0].heard.clear()
    loop.theirs[0].peer.admit()
    sealed = session.seal(b"x" * LIMIT)
    loop.say(sock, sealed[:-1])
    buffer = loop.theirs[0].peer._decoder._buffer
    loop.until(lambda: len(buffer) == len(sealed) - 1)
    assert not loop.theirs[0].heard and not loop.theirs[0].ends
    loop.say(sock, sealed[-1:])  # what comes next completes it, so that more never waits
    loop.until(lambda: loop.theirs[0].heard)
    assert not buffer


def test_a_peer_that_does_not_read_is_given_up(loop) -> None:
    listener = loop.listen()
    loop.dial(at(listener.port))
    loop.until(lambda: loop.theirs)
    hold(loop, listener)
    lazy = loop.theirs[1]
    most = 0
    for _ in range(64):
        lazy.peer.send(b"x" * (1 << 20))
        most = max(most, lazy.peer._buffer.size)
        assert not lazy.ends  # nobody is called back from within send()
    assert MAX_QUEUED // 2 < most <= MAX_QUEUED
    loop.until(lambda: lazy.ends)
    assert lazy.ends == ["does not read"]
    assert not lazy.peer._buffer.size
    loop.undisturbed(loop.theirs[0], loop.ours[0])


def test_a_slow_reader_gets_everything(loop) -> None:
    coordinator, agent = loop.pair()
    for number in range(7):
        coordinator.peer.send(bytes([number]) * (1 << 20))
    assert coordinator.peer._buffer.size
    loop.until(lambda: len(agent.heard) == 7)
    assert agent.heard == [bytes([number]) * (1 << 20) for number in range(7)]
    assert not coordinator.peer._buffer.size
    loop.turn(0.0)
    assert loop.turn() == 0, "a socket that can be written to is watched though nothing waits"


# --- the end


def test_last_words_arrive_although_both_sides_speak(loop) -> None:
    coordinator, agent = loop.pair()
    for _ in range(10):
        agent.peer.send(b"heartbeat")
    coordinator.peer.send(b"quit")
    coordinator.peer.close()
    loop.until(lambda: agent.ends)
    assert agent.heard == [b"quit"]
    assert agent.ends == ["connection closed"]  # no reset, which might have overtaken the last words
    assert not coordinator.ends  # who closes needs not be told
    assert repr(coordinator.peer) == "<peer 127.0.0.1, closed>"


def test_what_the_kernel_has_taken_arrives_after_the_end_although_the_other_side_was_not_heard_out(loop) -> None:
    coordinator, agent = loop.pair()
    agent.peer.send(b"heartbeat")
    sent = 0
    while not coordinator.peer._buffer.size:
        coordinator.peer.send(b"x" * (1 << 16))
        sent += 1
    coordinator.peer.close()
    loop.until(lambda: agent.ends)
    assert len(agent.heard) == sent - 1
    assert agent.ends == ["connection closed in the middle of a message"]


def test_the_end_is_told_once(loop) -> None:
    coordinator, agent = loop.pair()
    agent.peer.close()
    agent.peer.close()
    agent.peer.send(b"into the void")
    loop.until(lambda: coordinator.ends)
    coordinator.peer.send(b"into the void")
    coordinator.peer.close()
    loop.turns(5)
    assert (coordinator.ends, agent.ends) == (["connection closed"], [])


def test_who_is_given_up_for_a_malformed_frame_does_not_take_that_for_the_end_of_the_process(loop) -> None:
    coordinator, agent = loop.pair()
    agent.peer._buffer.put(pack(b"signed by nobody", bytes(16)))
    loop.until(lambda: agent.ends and coordinator.ends)
    assert (coordinator.ends, agent.ends) == (["sent a frame with a wrong signature"], ["connection reset"])


def test_a_reset_has_its_own_reason(loop) -> None:
    listener = loop.listen()
    sock, _ = loop.agent(listener.port)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()
    loop.until(lambda: loop.theirs[0].ends)
    assert loop.theirs[0].ends == ["connection reset"]


def test_what_was_said_before_a_reset_is_heard_even_if_sending_finds_it_first(loop) -> None:
    listener = loop.listen()
    sock, session = loop.agent(listener.port)
    sock.send(session.seal(b"quit"))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()
    loop.theirs[0].peer.send(b"heartbeat")
    loop.theirs[0].peer.send(b"heartbeat")
    loop.until(lambda: loop.theirs[0].ends)
    assert loop.theirs[0].heard == [b"quit"]
    assert loop.theirs[0].ends == ["connection reset"]


def test_an_owner_may_close_while_it_receives(loop) -> None:
    coordinator, agent = loop.pair()

    def hear(payload: bytes) -> None:
        coordinator.heard.append(payload)
        coordinator.peer.close()

    coordinator.peer.received = hear
    agent.peer.send(b"1")
    agent.peer.send(b"2")
    loop.until(lambda: agent.ends)
    assert coordinator.heard == [b"1"]


# --- dialing


@pytest.mark.parametrize(
    ("address", "sockaddr"),
    [
        ("10.0.0.1", ("10.0.0.1", 1)),
        ("fd00::1", ("fd00::1", 1, 0, 0)),
        ("fe80::1%lo", ("fe80::1", 1, 0, socket.if_nametoindex("lo"))),
        ("fe80::1%none", ("fe80::1", 1)),
    ],
)
def test_an_address_that_another_node_has_given_is_a_target_here(address: str, sockaddr: tuple[object, ...]) -> None:
    assert target(address, 1)[1] == sockaddr


def test_a_dialer_tries_until_the_coordinator_is_there(loop) -> None:
    port = free_port()
    loop.dial(at(port))
    for tries, pause in enumerate([min(0.01 * 1.25**tries, 1.0) for tries in range(24)], start=1):
        loop.until(lambda expected=tries: len(loop.failures) == expected)
        assert loop.deadline == pytest.approx(loop.now() + pause)
        loop.advance(loop.deadline - loop.now())
    loop.listen(ports=(port,))
    loop.until(lambda: loop.ours)
    assert set(loop.failures) == {(f"127.0.0.1:{port}", "connection refused")}
    assert loop.deadline is None


@pytest.fixture
def service(loop):
    """Another service, that says something to each client."""
    server = socket.create_server(("127.0.0.1", 0))
    port: int = server.getsockname()[1]
    loop.raw_sockets.append(server)

    def accept(words: bytes) -> None:
        sock, _ = server.accept()
        loop.raw_sockets.append(sock)
        sock.sendall(words)

    def start(words: bytes) -> int:
        loop.watch(server, lambda: accept(words))
        return port

    yield start
    loop.unwatch(server)


@pytest.mark.parametrize("words", [b"SSH-2.0-OpenSSH_9.2\r\n", pack(b"{}"), pack(b"[" * 4000)])
def test_another_service_is_walked_past(loop, service, words: bytes) -> None:
    port = service(words)
    listener = loop.listen()
    loop.dial(at(port), at(listener.port))
    loop.until(lambda: loop.ours)
    assert loop.failures == [(f"127.0.0.1:{port}", "is not ddplaunch")]


def test_a_silent_service_does_not_hold_up_the_next_target(loop, service) -> None:
    port = service(b"")
    listener = loop.listen()
    dialer = loop.dial(at(port), at(listener.port))
    loop.until(lambda: len(dialer._attempts) == 1)
    loop.advance(STAGGER)
    loop.until(lambda: loop.ours)
    assert not loop.failures


@pytest.mark.parametrize(
    ("words", "seconds", "then", "reason"),
    [
        (
            b"",
            2,
            4,
            "accepted the connection, but sent nothing in 2 s; "
            "it may still be starting, or another program holds the port",
        ),
        (b"\0", 5, 5, "handshake not completed in 5 s"),
    ],
    ids=["nothing", "half a word"],
)
def test_a_service_that_waits_is_given_up_and_tried_again(loop, service, words, seconds, then, reason) -> None:
    port = service(words)
    dialer = loop.dial(at(port))

    def wait(seconds: float) -> None:
        """Let the time pass until an attempt that waits is given up."""
        loop.until(lambda: dialer._attempts)
        (attempt,) = dialer._attempts
        loop.until(lambda: attempt._greeting and (attempt._greeting.received_any or not words))
        before = len(loop.failures)
        loop.pass_time(seconds - 0.1)
        assert len(loop.failures) == before
        loop.pass_time(0.1)
        assert len(loop.failures) == before + 1

    wait(seconds)
    assert loop.failures == [(f"127.0.0.1:{port}", reason)]
    loop.advance(loop.deadline - loop.now())
    wait(then)  # a coordinator with a queue before it has more time for the first bytes


def test_a_silent_service_does_not_keep_the_others_from_being_tried_again(loop, service) -> None:
    port, late = service(b""), free_port()
    loop.dial(at(port), at(late))
    loop.turns(3)
    loop.advance(STAGGER)
    loop.until(lambda: loop.failures)
    loop.listen(ports=(late,))
    loop.advance(LONGEST_PAUSE)
    loop.until(lambda: loop.ours)
    assert loop.failures == [(f"127.0.0.1:{late}", "connection refused")]


def test_a_target_that_does_not_answer_at_all_is_given_up(loop) -> None:
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        port: int = full.getsockname()[1]
        loop.raw_socket(port)  # no room for another
        loop.dial(at(port))
        loop.turns(3)
        assert loop.deadline == 102.0
        loop.advance(2.0)
        loop.until(lambda: loop.failures)
        assert loop.failures == [(f"127.0.0.1:{port}", "no answer in 2 s")]


def test_a_coordinator_that_accepts_long_before_it_answers_is_one(loop) -> None:
    listening = listen("127.0.0.1", [0])
    with ThreadPoolExecutor() as other:
        asked = other.submit(answers, KEY, [at(listening.getsockname()[1])])
        time.sleep(1.2)  # it imports
        loop.listen_at(listening)
        loop.until(asked.done)
    assert asked.result()


def test_who_refuses_is_no_coordinator_and_who_accepts_in_silence_is_none_in_the_end(service, monkeypatch) -> None:
    monkeypatch.setattr(dialer, "_TRIED_FOR", 0.2)
    monkeypatch.setattr(dialer, "_ANSWERS_WITHIN", 1e9)
    assert not answers(KEY, [at(free_port())])
    monkeypatch.setattr(dialer, "_ANSWERS_WITHIN", 0.4)
    assert not answers(KEY, [at(service(b""))])


def test_targets_that_cannot_even_be_tried_are_told(loop) -> None:
    listener = loop.listen()
    loop.dial(at(listener.port, "255.255.255.255"), at(listener.port))
    loop.until(lambda: loop.ours)
    assert {endpoint for endpoint, _ in loop.failures} == {f"255.255.255.255:{listener.port}"}


def test_new_targets_take_the_place_of_the_old(loop) -> None:
    listener = loop.listen()
    dialer = loop.dial(at(free_port()))
    loop.until(lambda: loop.failures)
    dialer.set_targets([at(listener.port)])
    loop.until(lambda: loop.ours)
    assert len(loop.failures) == 1


def test_a_dialer_finds_the_way_again_after_the_connection_is_lost(loop) -> None:
    listener = loop.listen()
    dialer = loop.dial(at(listener.port))
    loop.until(lambda: loop.theirs and loop.ours)
    loop.theirs[0].peer.close()
    loop.until(lambda: loop.ours[0].ends)
    dialer.set_targets([at(listener.port)])
    loop.until(lambda: len(loop.theirs) == 2 and len(loop.ours) == 2)
    loop.undisturbed(loop.theirs[1], loop.ours[1])


def test_a_dialer_may_be_stopped_by_the_one_it_tells(loop, service) -> None:
    port = service(b"")
    dialer = loop.dial(at(port), at(port))
    loop.turn()
    loop.advance(STAGGER)
    loop.until(lambda: len(dialer._attempts) == 2)
    loop.at_dialers.then_refused = dialer.stop
    loop.pass_time(3)
    loop.until(lambda: loop.deadline is None)
    loop.turns(3)
    assert len(loop.failures) == 1
    assert loop.deadline is None


def test_a_socket_that_has_reached_itself_has_reached_nobody(loop) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
        sock.connect(("127.0.0.1", port))
        error = error_of(sock)
        assert isinstance(error, ConnectionRefusedError)
    with socket.socket() as coordinator:  # and leaves the port to whom it belongs
        coordinator.bind(("127.0.0.1", port))
