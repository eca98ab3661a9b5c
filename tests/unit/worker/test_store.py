"""Clients of torch's store at MASTER_PORT, with a stand-in for torch that connects once and tries no second time."""

import _socket
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from ddplaunch.worker import store


class TCPStore:
    """A client that gives up at once."""

    asked: dict[str, Any]  # of the last one

    def __init__(self, host_name: str, port: int, **asked: Any) -> None:
        type(self).asked = asked
        socket.create_connection((host_name, port), timeout=5).close()


@pytest.fixture
def distributed() -> SimpleNamespace:
    """What has such a store."""
    return SimpleNamespace(TCPStore=type("TCPStore", (TCPStore,), {}))


@pytest.fixture
def reserved(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """The port of the job, at which nobody listens yet, for a worker of node 0 that is not rank 0."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        place = {"RANK": "1", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        for name, value in {**place, "MASTER_PORT": str(bound.getsockname()[1])}.items():
            monkeypatch.setenv(name, value)
        yield bound


def test_a_client_that_is_faster_than_rank_0_is_made_once_it_is_served(distributed, reserved):
    store.host_for_clients(distributed, "", lambda: None)
    rank_0 = threading.Timer(0.05, reserved.listen)
    rank_0.start()
    client = {"world_size": 2, "is_master": False, "multi_tenant": True}
    distributed.TCPStore(host_name="127.0.0.1", port=reserved.getsockname()[1], **client)
    rank_0.join()


def test_what_is_waited_for_rank_0_is_taken_off_the_timeout(distributed, reserved):
    store.host_for_clients(distributed, "", lambda: None)
    timeout = timedelta(seconds=1)
    began = time.monotonic()
    with pytest.raises(ConnectionRefusedError):
        distributed.TCPStore("127.0.0.1", reserved.getsockname()[1], None, False, timeout, multi_tenant=True)
    left = distributed.TCPStore.asked["timeout"]
    tick = 0.02
    assert max(1 - (time.monotonic() - began) - tick, 0.1) <= left.total_seconds() <= 0.9 + tick


def test_a_store_of_another_host_at_the_same_port_is_not_waited_for(distributed, reserved):
    store.host_for_clients(distributed, "", lambda: None)
    timeout = timedelta(days=1)
    with pytest.raises(ConnectionRefusedError):
        distributed.TCPStore("127.0.0.2", reserved.getsockname()[1], None, False, timeout, multi_tenant=True)
    assert distributed.TCPStore.asked["timeout"] is timeout


def test_a_name_is_resolved_once_however_often_it_is_tried(reserved, monkeypatch):
    resolved = []
    monkeypatch.setattr(store, "getaddrinfo", lambda *a, **b: resolved.append(a) or _socket.getaddrinfo(*a, **b))
    assert not store.is_hosted_within(0.1, "localhost", reserved.getsockname()[1])
    assert len(resolved) == 1


def test_a_program_may_remove_the_variables_of_its_place_before_it_makes_a_client(distributed, reserved, monkeypatch):
    store.host_for_clients(distributed, "", lambda: None)
    for name in ("RANK", "GROUP_RANK", "GROUP_WORLD_SIZE"):
        monkeypatch.delenv(name)
    reserved.listen()
    for several_tenants in (False, True):
        distributed.TCPStore("127.0.0.1", reserved.getsockname()[1], is_master=False, multi_tenant=several_tenants)


def test_a_program_may_stop_the_time_and_forbid_sockets(reserved, monkeypatch):
    monkeypatch.setattr(time, "monotonic", lambda: 1.0)
    monkeypatch.setattr(socket, "socket", None)
    assert not store.is_hosted_within(0.01, "127.0.0.1", reserved.getsockname()[1])
    reserved.listen()
    assert store.is_hosted_within(0, "127.0.0.1", reserved.getsockname()[1])
