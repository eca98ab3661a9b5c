"""The agent's side of a connection to a process that forks workers: its lines, and requests to it. Starts and ends nothing.

Whatever the other side does, or does not do any more, costs the agent at most `ANSWER_TIMEOUT`, once: after that no answer is
waited for, nor taken for that to a later request.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from ddplaunch.process.start import StartError, Stdio

T = TypeVar("T")
ANSWER_TIMEOUT = 5.0  # seconds in which a worker is forked
_LONGEST_LINE = 4096  # bytes of an answer


class ServerLost(Exception):
    """The server can fork no worker; the text says why."""


class ForkRequests:
    """A connection to what forks workers, once it is ready."""

    _what: tuple[str, ...] = ()  # what its requests to fork begin with

    def __init__(self, connection: socket.socket) -> None:
        """Own this connection."""
        self._socket = connection
        self._socket.setblocking(False)
        self._received = b""
        self.notes: list[str] = []  # why some modules were not imported
        self.is_ready = False
        self._why_lost = ""  # it is asked nothing any more

    def fileno(self) -> int:
        """The descriptor that is readable when it has something to say: `read`."""
        return self._socket.fileno()

    def read(self) -> None:
        """Take in what it says of its start.

        Raises:
            ServerLost: it cannot serve.
        """
        for line in self._lines():
            what, _, text = line.partition(" ")
            match what:
                case "note":
                    self.notes.append(text)
                case "ready":
                    self.is_ready = True
                case "unsafe" | "stale" | "unfit":
                    raise ServerLost(text)
                case _:
                    self._take(what, text)

    def _take(self, what: str, text: str) -> None:
        """Take in a line that only some servers send."""

    def _fork(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        stdio: Stdio,
        cpus: Iterable[int],
        adopt: Callable[[int], T],
        *more: int,
    ) -> T:
        """Have a worker forked, which begins once `adopt` has made a child of its pid; `more` are further descriptors.

        Raises:
            StartError: the machine cannot create another process.
            ServerLost: the server has ended, or does not answer.
        """
        fields = [
            *self._what,
            ",".join(map(str, cpus)),
            str(len(argv) - 2),
            *argv[2:],
            *(f"{name}={value}" for name, value in env.items()),
        ]
        # one that is forked after we have given up ends by itself: another process has its rank by then
        wait, release = os.pipe()
        try:
            stacks = () if stdio.stacks is None else (stdio.stacks,)
            line = self._ask(fields, stdio.stdin, stdio.stdout, stdio.stderr, *stacks, wait, *more)
            what, _, text = line.partition(" ")
            if what == "errno" and text.isdecimal():
                raise StartError(int(text), "cannot create a process")
            if what != "pid" or not text.isdecimal():
                raise ServerLost(text or "an imported module has written to the fork server's socket")
            child = adopt(int(text))
            os.write(release, b"\n")
        finally:
            os.close(wait)
            os.close(release)
        return child

    def _ask(self, fields: Iterable[str], *descriptors: int) -> str:
        """Send a request; give the first line of the answer.

        Raises:
            ServerLost: there is none.
        """
        if self._why_lost:
            raise ServerLost(self._why_lost)
        try:
            self._socket.settimeout(ANSWER_TIMEOUT)
            self._send(fields, *descriptors)
            while not (lines := self._lines()):
                pass
        except OSError as error:
            self._why_lost = str(error.strerror or "it does not answer")
            raise ServerLost(self._why_lost) from None
        finally:
            self._socket.setblocking(False)
        return lines[0]

    def _send(self, fields: Iterable[str], *descriptors: int) -> None:
        content = b"".join(os.fsencode(field) + b"\0" for field in fields)
        socket.send_fds(self._socket, [len(content).to_bytes(8, "big")], descriptors)
        self._socket.sendall(content)

    def _lines(self) -> list[str]:
        """Receive once; give the lines that are complete."""
        try:
            data = self._socket.recv(_LONGEST_LINE)
        except BlockingIOError:
            return []
        if not data or len(self._received) > _LONGEST_LINE:
            raise ServerLost("it has ended")
        *lines, self._received = (self._received + data).split(b"\n")
        return [line.decode(errors="replace") for line in lines]


def nothing_failed() -> int:
    """Give what `Child.failure` is of a process that has no exec to fail."""
    read, write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    os.close(write)
    return read
