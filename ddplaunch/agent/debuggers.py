"""Where workers of this node ask for what a debugger needs: an abstract address that they know, never a port. Decides nothing.

Who asks is known by its process, as the kernel names it. A connection lasts as long as the debugger does.
"""

from __future__ import annotations

import os
import selectors
import socket
import struct
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial

from ddplaunch.errors import below
from ddplaunch.process import clock
from ddplaunch.process.worker import RunningWorker
from ddplaunch.supervise import node

_CREDENTIALS = struct.Struct("iII")  # struct ucred, unix(7)
_BACKLOG = 1024
_LONGEST = 4096  # bytes of what a worker asks
_TERMINAL = (0, 1)  # our stdin and stdout, which were the command's


class Debuggers:
    """Takes what workers ask from the moment that it is made."""

    def __init__(
        self,
        address: str,
        selector: selectors.BaseSelector,
        workers: Callable[[], Mapping[int, RunningWorker]],
        feed: Callable[[node.Event], None],
    ) -> None:
        """`workers` gives those that there are, by rank.

        Raises:
            OSError: there are too many open files.
        """
        self._selector = selector
        self._workers = workers
        self._feed = feed
        self._asking: dict[int, socket.socket] = {}  # for the terminal, by rank
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.setblocking(False)
        self._listener.bind("\0" + address)
        self._listener.listen(_BACKLOG)
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return
        sock.setblocking(False)
        pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        rank = next((rank for rank, worker in self._workers().items() if worker.pid == pid), None)
        if rank is None or uid != os.getuid():
            sock.close()
            return
        self._selector.register(sock, selectors.EVENT_READ, partial(self._readable, sock, rank))

    def _readable(self, sock: socket.socket, rank: int) -> None:
        try:
            packet = sock.recv(_LONGEST)
        except BlockingIOError:
            return
        except OSError:
            packet = b""
        if packet[:1] == b"E" and rank not in self._asking:
            self._asking[rank] = sock
            self._feed(node.TerminalAsked(rank, below(packet[1:].decode(errors="replace")), clock.now()))
        else:
            self._drop(sock, rank)

    def _drop(self, sock: socket.socket, rank: int) -> None:
        if sock.fileno() < 0:
            return
        self._selector.unregister(sock)
        sock.close()
        if self._asking.get(rank) is sock:
            del self._asking[rank]
            self._feed(node.TerminalReturned(rank, clock.now()))

    def lend_terminal(self, rank: int) -> None:
        """Give the terminal to a worker that has asked for it."""
        if (sock := self._asking.get(rank)) is not None:
            with suppress(OSError):  # it has ended, which is read
                socket.send_fds(sock, [b"T"], _TERMINAL)

    def refuse_terminal(self, rank: int) -> None:
        """Let it end without."""
        if (sock := self._asking.get(rank)) is not None:
            self._drop(sock, rank)

    def close(self) -> None:
        """Take nothing any more."""
        self._selector.unregister(self._listener)
        self._listener.close()
        for rank, sock in list(self._asking.items()):
            self._drop(sock, rank)
