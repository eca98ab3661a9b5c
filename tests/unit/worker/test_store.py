"""Clients of torch's store at MASTER_PORT, with a stand-in for torch that connects once and tries no second time."""

from __future__ import annotations

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

    def __init__(self, host_name: str, port: int, **_: Any) -> None:
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
    store.serve(distributed, "")
    rank_0 = threading.Timer(0.05, reserved.listen)
    rank_0.start()
    client = {"world_size": 2, "is_master": False, "multi_tenant": True}
    distributed.TCPStore(host_name="127.0.0.1", port=reserved.getsockname()[1], **client)
    rank_0.join()


def test_a_client_of_little_patience_is_not_kept_for_longer(distributed, reserved):
    store.serve(distributed, "")
    client = {"is_master": False, "multi_tenant": True, "timeout": timedelta(milliseconds=10)}
    began = time.monotonic()
    with pytest.raises(ConnectionRefusedError):
        distributed.TCPStore(host_name="127.0.0.1", port=reserved.getsockname()[1], **client)
    assert time.monotonic() - began < store.PATIENCE
