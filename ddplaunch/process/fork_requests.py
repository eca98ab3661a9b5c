"""The agent's side of a connection to a process that forks workers: its lines, and requests to it. Starts and ends nothing.

Whatever the other side does, or does not do any more, costs the agent at most `ANSWER_TIMEOUT`, once: after that no answer is
waited for, nor taken for that to a later request.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from msgspec import Struct

from ddplaunch.process import clock
from ddplaunch.process.start import StartError, Stdio

if TYPE_CHECKING:
    from ddplaunch.process.child import Child
    from ddplaunch.process.guard import GuardedChild

T = TypeVar("T", bound="Child | GuardedChild")
ANSWER_TIMEOUT = 5.0  # seconds from a request to the end of its answer, in which workers are forked
_LONGEST_LINE = 4096  # bytes of an answer
_PID = "pid "
_CREATE = "cannot create a process"


class ServerLost(Exception):
    """The server can fork no worker; the text says why."""


class Fork(Struct, frozen=True):
    """A worker to be forked; `argv` as for `start`, with the interpreter and the bootstrap that are running already."""

    argv: Sequence[str]
    env: Mapping[str, str]
    stdio: Stdio
    cpus: Iterable[int] = ()

    @property
    def content(self) -> bytes:
        """What is sent of it."""
        fields = (
            ",".join(map(str, self.cpus)),
            str(len(self.argv) - 2),
            *self.argv[2:],
            *(f"{name}={value}" for name, value in self.env.items()),
        )
        return joined(fields)

    @property
    def descriptors(self) -> tuple[int, ...]:
        """The descriptors that it gets."""
        stdio = (self.stdio.stdin, self.stdio.stdout, self.stdio.stderr)
        return stdio if self.stdio.stacks is None else (*stdio, self.stdio.stacks)


class ForkRequests:
    """A connection to what forks workers, once it is ready."""

    _what = b""  # what its requests to fork begin with

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
        """Read the lines that the server sends while it starts.

        Raises:
            ServerLost: the server cannot serve.
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

    def _fork(self, forks: Sequence[Fork], adopt: Callable[[int], T], more: Sequence[int] = ()) -> list[T]:
        """Have workers forked, which begin together once `adopt` has made a child of the pid of each; in their order.

        `adopt` may raise OSError; `more` is one further descriptor for each.

        Raises:
            StartError: the machine cannot create one of the processes; none of them begins.
            ServerLost: the server has ended, or does not answer; none of them begins.
        """
        contents = [fork.content for fork in forks]
        each = len(forks[0].descriptors) + 1 + bool(more)
        content = self._what + b"".join([_number(each), *(_number(len(one)) + one for one in contents)])
        children: list[T] = []
        try:
            # those that are forked after we have given up end by themselves: other processes have their ranks by then
            wait, release = os.pipe()
            try:
                descriptors = [
                    fd for at, fork in enumerate(forks) for fd in (*fork.descriptors, wait, *more[at : at + 1])
                ]
                *pids, last = self._ask(content, *descriptors)
                what, _, text = last.partition(" ")
                if what == "errno" and text.isdecimal():
                    raise StartError(int(text), _CREATE, len(pids), elsewhere=True)
                if what != "forked" or not all(pid.isdecimal() for pid in pids):
                    raise ServerLost(text or "an imported module has written to the fork server's socket")
                if len(pids) < len(forks):
                    raise StartError(errno.EAGAIN, _CREATE, len(pids))
                children.extend(adopt(int(pid)) for pid in pids)
                os.write(release, b"\n" * len(forks))
            finally:
                os.close(wait)
                os.close(release)
        except BaseException as error:
            for child in children:
                child.abandon()
            if isinstance(error, OSError):
                raise StartError(error.errno or errno.EMFILE, _CREATE, len(children)) from None
            raise
        return children

    def _ask(self, content: bytes, *descriptors: int) -> list[str]:
        """Send a request; give the pids of the answer, and the first line that tells of none.

        Raises:
            ServerLost: there is no such line.
        """
        if self._why_lost:
            raise ServerLost(self._why_lost)
        answer: list[str] = []
        deadline = clock.now() + ANSWER_TIMEOUT
        try:
            self._send(content, *descriptors)
            while True:
                self._wait(selectors.EVENT_READ, deadline)
                for line in self._lines():
                    if not line.startswith(_PID):
                        return [*answer, line]
                    answer.append(line.removeprefix(_PID))
        except OSError as error:
            self._why_lost = str(error.strerror or "it does not answer")
            raise ServerLost(self._why_lost) from None

    def _send(self, content: bytes, *descriptors: int) -> None:
        deadline = clock.now() + ANSWER_TIMEOUT
        self._wait(selectors.EVENT_WRITE, deadline)
        socket.send_fds(self._socket, [_number(len(content))], descriptors)
        left = memoryview(content)
        while left:
            self._wait(selectors.EVENT_WRITE, deadline)
            left = left[self._socket.send(left) :]

    def _wait(self, event: int, deadline: float) -> None:
        """Wait until the socket can be read or written, in time that passes for us: a pause of everything loses no server."""
        with selectors.PollSelector() as selector:  # which takes no descriptor, of which there may be too few
            selector.register(self._socket, event)
            if not clock.wait(selector, deadline):
                raise TimeoutError

    def _lines(self) -> list[str]:
        """Receive once; give the lines that are complete."""
        try:
            data = self._socket.recv(_LONGEST_LINE)
        except BlockingIOError:
            return []
        except ConnectionError:  # it has ended without reading what it was sent
            data = b""
        if not data or len(self._received) > _LONGEST_LINE:
            raise ServerLost("it has ended")
        *lines, self._received = (self._received + data).split(b"\n")
        return [line.decode(errors="replace") for line in lines]


def _number(value: int) -> bytes:
    return value.to_bytes(8, "big")


def joined(fields: Iterable[str]) -> bytes:
    """Return fields as they are sent, each ended by a zero byte."""
    return b"".join(os.fsencode(field) + b"\0" for field in fields)


def nothing_failed() -> int:
    """Return what `Child.failure` is of a process that has no exec to fail."""
    read, write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    os.close(write)
    return read
