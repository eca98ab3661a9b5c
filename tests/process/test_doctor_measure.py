"""A node measures the way to another one, and takes nothing else for it: over loopback, with the server in a child."""

import socket
from collections.abc import Iterator
from functools import partial

import pytest

from ddplaunch.system.loop.loop import Loop
from ddplaunch.tools.doctor.nodes import host, measure
from ddplaunch.tools.doctor.nodes.messages import Measure

HERE = ("127.0.0.1",)


@pytest.fixture
def port() -> Iterator[int]:
    """Where node 4 of the job "token" is served."""
    loop = Loop()
    stream = measure.listen()
    number: int = stream.getsockname()[1]
    serve = partial(host._serve, 1, "token", 4)
    loop.ask(serve, None, descriptors=(stream.fileno(),))
    stream.close()
    yield number
    loop.close()


@pytest.fixture
def silent() -> Iterator[int]:
    """A port that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "CONNECT_TIMEOUT", 0.5)


def test_a_way_is_measured_and_ports_that_do_not_answer_are_named(port, silent):
    way = measure.measure(Measure(4, HERE, (port, silent, 1), 0.02), "token")
    assert way.address == "127.0.0.1"
    assert 0 < way.latency < 1
    assert way.speed > 1e6
    assert way.mtu > 60_000
    assert way.resent is None or way.resent < 0.05  # on a busy machine TCP sends its last packet again
    assert {one.port: one.why for one in way.blocked} == {
        silent: "the connection alone answers in 0.5 s",
        1: "connection refused",
    }


@pytest.mark.parametrize(("node_rank", "token"), [(3, "token"), (4, "another")], ids=["another node", "another job"])
def test_another_node_or_job_at_an_address_is_not_taken_for_the_node(port, node_rank, token):
    way = measure.measure(Measure(node_rank, HERE, (port,), 0.02), token)
    assert way.address is None
    assert [one.why for one in way.blocked] == ["something else answers there"]


def test_a_stranger_gets_nothing(port):
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(bytes(48))
        assert stranger.recv(1) == b""


def test_a_name_leads_to_node_0_or_not(port):
    met = measure.meet("localhost", port, "token")  # node 4 answers there
    assert met.reached is None
    assert "127.0.0.1" in met.addresses
    assert "something else answers there" in met.error
    assert measure.meet("no-such-host.invalid", port, "token").addresses == ()
