"""What stands between a node and the others: passes on all bytes, until a test cuts it one way or both."""

from __future__ import annotations

import select
import socket
import struct
import threading
from collections.abc import Iterable
from typing import Self

_EACH = 0.05  # seconds


class Relay:
    """Listens at an address of its own, and passes on what comes there to the same port of 127.0.0.1."""

    address = "127.0.0.7"

    def __init__(self, ports: Iterable[int]) -> None:
        self._listening = [socket.create_server((self.address, port)) for port in ports]
        self._pairs: dict[socket.socket, tuple[socket.socket, str]] = {}
        self._cut: set[str] = set()
        self._reset: list[socket.socket] = []
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()
        for each in (*self._listening, *self._pairs):
            each.close()

    def cut(self, ways: str) -> None:
        """Pass on nothing any more: what the node sends ("there"), what comes "back", or "both".

        "reset" and "close" tell node 0 so, as a firewall or a proxy that ends, and the node nothing.
        """
        self._cut = {ways} if ways in ("there", "back") else {"there", "back"}
        if ways in ("reset", "close"):
            for each in [each for each, (_, way) in self._pairs.items() if way == "back"]:
                if ways == "close":  # and not to be closed here, which would reset it because of what was not read
                    each.shutdown(socket.SHUT_WR)
                else:
                    each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    self._reset.append(each)

    def join(self) -> None:
        """Pass on all again that is sent over new connections."""
        self._cut = set()

    def _run(self) -> None:
        while not self._ends.is_set():
            while self._reset:
                each = self._reset.pop()
                if each in self._pairs:
                    del self._pairs[each]
                    each.close()
            dropped = [each for each, (_, way) in self._pairs.items() if way in self._cut]
            ready, _, _ = select.select([*self._listening, *(set(self._pairs) - set(dropped))], [], [], _EACH)
            for each in ready:
                if each in self._listening:
                    self._accept(each)
                elif each in self._pairs:
                    self._pass_on(each)

    def _accept(self, listening: socket.socket) -> None:
        near, _ = listening.accept()
        try:
            far = socket.create_connection(("127.0.0.1", listening.getsockname()[1]), 1.0)
        except OSError:
            near.close()
            return
        self._pairs[near], self._pairs[far] = (far, "there"), (near, "back")

    def _pass_on(self, each: socket.socket) -> None:
        other, _ = self._pairs[each]
        try:
            data = each.recv(1 << 16)
            other.sendall(data)
        except OSError:
            data = b""
        if not data:
            for one in (each, other):
                self._pairs.pop(one, None)
                one.close()
