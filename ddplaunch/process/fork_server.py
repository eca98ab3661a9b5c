"""The fork server of a node, seen from the agent: starts it, and has it fork workers. Its other half is worker/fork_server.py.

A worker that it has forked is a child of the agent, as one that the agent has started itself. Whatever the server does, or
does not do any more, costs the agent at most `ANSWER_TIMEOUT`.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import socket
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack

from ddplaunch.process.start import Child, StartError, Stdio, start

VARIABLE = "DDPLAUNCH_FORK_SERVER"
ANSWER_TIMEOUT = 5.0  # seconds in which it forks a worker
END_TIMEOUT = 1.0  # seconds that the agent waits for its end; one that cannot be killed is not waited for longer
_LONGEST_LINE = 4096  # bytes of an answer


class ServerLost(Exception):
    """The server can fork no worker; the text says why."""


class ForkServer:
    """A process that imports modules once, and then forks workers."""

    def __init__(
        self, argv: Sequence[str], env: Mapping[str, str], modules: Iterable[str], *, handled: Collection[int]
    ) -> None:
        """Start it with the command of a worker, and what the environments of all workers have in common.

        Raises:
            StartError: the machine cannot create another process.
        """
        with ExitStack() as opened:
            try:
                self._socket, theirs = socket.socketpair()
                opened.enter_context(theirs)
                failed = opened.enter_context(ExitStack())
                failed.callback(self._socket.close)
                read, write = os.pipe()  # stdout and stderr are pipes, as those of workers are
                opened.callback(os.close, read)
                opened.callback(os.close, write)
                devnull = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
                opened.callback(os.close, devnull)
            except OSError as error:
                raise StartError(error.errno or errno.EMFILE, "cannot start the fork server") from None
            theirs.set_inheritable(True)
            served = ",".join([str(theirs.fileno()), *modules])
            self._child = start(argv, {**env, VARIABLE: served}, Stdio(devnull, write, write), handled=handled)
            failed.pop_all()
        self._socket.setblocking(False)
        self._received = b""
        self.notes: list[str] = []  # why some modules were not imported
        self.is_ready = False

    @property
    def pid(self) -> int:
        """Its process."""
        return self._child.pid

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
                case "unsafe":
                    raise ServerLost(text)

    def fork(self, argv: Sequence[str], env: Mapping[str, str], stdio: Stdio, *, cpus: Iterable[int] = ()) -> Child:
        """Fork a worker; `argv` as for `start`, with the interpreter and the bootstrap that are running already.

        Raises:
            StartError: the machine cannot create another process.
            ServerLost: it has ended, or does not answer.
        """
        fields = [
            ",".join(map(str, cpus)),
            str(len(argv) - 2),
            *argv[2:],
            *(f"{name}={value}" for name, value in env.items()),
        ]
        content = b"".join(os.fsencode(field) + b"\0" for field in fields)
        # one that is forked after we have given up ends by itself: another process has its rank by then
        wait, release = os.pipe()
        try:
            stacks = () if stdio.stacks is None else (stdio.stacks,)
            line = self._answer(content, (stdio.stdin, stdio.stdout, stdio.stderr, *stacks, wait))
            what, _, text = line.partition(" ")
            if what == "errno" and text.isdecimal():
                raise StartError(int(text), "cannot create a process")
            if what != "pid" or not text.isdecimal():
                raise ServerLost(text or "an imported module has written to the fork server's socket")
            child = self._adopted(int(text))
            os.write(release, b"\n")
        finally:
            os.close(wait)
            os.close(release)
        return child

    def _answer(self, content: bytes, descriptors: Sequence[int]) -> str:
        """Send a request; give the first line of the answer."""
        self._socket.settimeout(ANSWER_TIMEOUT)
        try:
            socket.send_fds(self._socket, [len(content).to_bytes(8, "big")], descriptors)
            self._socket.sendall(content)
            while not (lines := self._lines()):
                pass
        except OSError as error:
            raise ServerLost(str(error.strerror or "it does not answer")) from None
        finally:
            self._socket.setblocking(False)
        return lines[0]

    def _adopted(self, pid: int) -> Child:
        read, write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        os.close(write)  # there is no exec that could fail
        try:
            return Child(pid, os.pidfd_open(pid), read)
        except OSError as error:
            os.close(read)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise StartError(error.errno or errno.EMFILE, "cannot create a process") from None

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

    def close(self) -> None:
        """End it, whatever it is doing."""
        self._socket.close()
        try:
            signal.pidfd_send_signal(self._child.pidfd, signal.SIGKILL)
            select.select([self._child.pidfd], [], [], END_TIMEOUT)
            os.waitpid(self.pid, os.WNOHANG)
        except OSError:
            pass  # it has ended before
        os.close(self._child.failure)
        os.close(self._child.pidfd)
