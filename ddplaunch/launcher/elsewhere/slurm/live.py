"""--live in the watcher of a step: srun's output passes through here, and whoever makes the rows reaches node 0's agent.

Without --live srun writes to the terminal itself. The questions go as streams over the watcher's connection to the coordinator,
wherever node 0 is. The socket for them has an abstract name, so that nothing is left of it, and takes this user alone.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import suppress

from ddplaunch.reach.channel.streams import Chunk, Streams
from ddplaunch.reach.pipes import FULL, MESSAGE, SOCKET, STDERR, STDOUT, OutputQueue
from ddplaunch.record import run_socket
from ddplaunch.system.loop.loop import Loop
from ddplaunch.system.net.acceptor import Acceptor

_MOST = 16  # streams at a time: rows and a snapshot need two


class StepOutput:
    """Passes what srun writes on to the front; while the front takes nothing, srun has to wait."""

    def __init__(self, loop: Loop, queue: OutputQueue, fds: tuple[int, int]) -> None:
        """Read these descriptors, which are srun's stdout and stderr."""
        self._loop = loop
        self._queue = queue
        self._streams = dict(zip(fds, (STDOUT, STDERR), strict=True))
        self._reads = False
        for fd in fds:
            os.set_blocking(fd, False)
        self.update()

    def update(self) -> None:
        """Read, or leave alone, as the queue has room."""
        reads = not self._queue.full if self._reads else self._queue.size < FULL // 2
        if reads != self._reads:
            self._reads = reads
            for fd in self._streams:
                if reads:
                    self._loop.watch(fd, lambda fd=fd: self._read(fd))  # type: ignore[misc]  # fd is bound here
                else:
                    self._loop.unwatch(fd)

    def _read(self, fd: int) -> bool:
        """Pass a piece on; return whether there was one. Called by the loop."""
        try:
            data = os.read(fd, MESSAGE)
        except BlockingIOError:
            return False
        if data:
            self._queue.put(self._streams[fd], data)
        else:
            self._loop.unwatch(fd)
            del self._streams[fd]
            os.close(fd)
        return bool(data)

    def drain(self) -> None:
        """Pass on what is left, once srun has ended."""
        for fd in list(self._streams):
            while self._read(fd):
                pass


class StepSocket:
    """Where the process that makes the rows asks the job."""

    def __init__(self, loop: Loop, queue: OutputQueue, send: Callable[[Chunk], None]) -> None:
        """Listen, and say so to the front; `send` takes what is for node 0's agent."""
        self._newest = 0  # number of a stream
        self._streams = Streams(loop, send)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        name = f"ddplaunch-{os.urandom(16).hex()}"
        listener.bind(f"\0{name}")
        listener.listen()
        self._acceptor = Acceptor(loop, listener, lambda sock, _: self._on_connection(sock))
        self._acceptor.start()
        queue.put(SOCKET, b"\0" + name.encode())

    def _on_connection(self, sock: socket.socket) -> None:
        """Connect a process of this user to node 0's agent."""
        if run_socket.uid_of(sock) not in (os.getuid(), 0) or len(self._streams) >= _MOST:
            sock.close()
            return
        self._newest += 1
        self._streams.add(self._newest, sock)

    def take(self, chunk: Chunk) -> None:
        """Take what node 0's agent has sent."""
        self._streams.take(chunk)

    def drop(self) -> None:
        """End all connections, since that agent is lost; later ones are to the node that takes over."""
        self._streams.close()

    def close(self) -> None:
        """End all."""
        with suppress(OSError):
            self._acceptor.close()
            self._streams.close()
