"""The agent's ends of what forks its workers: a fork server, or the guard of an interpreter that is kept warm.

The other halves are worker/fork_server.py, with all requests and answers, and worker/guard.py. Whatever these do, or do not do
any more, costs the agent at most `ANSWER_TIMEOUT`, once: then it waits for no answer, and takes none for that to a later request.
"""

from __future__ import annotations

import errno
import os
import select
import selectors
import signal
import socket
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import TypeVar

from msgspec import Struct

from ddplaunch.system.process import clock
from ddplaunch.system.process.child import Child, End, StartError, Stdio, Usage, start
from ddplaunch.system.process.tree import Process, descendants, look

T = TypeVar("T", bound=Child)
SERVE_VARIABLE = "DDPLAUNCH_FORK_SERVER"
ANSWER_TIMEOUT = 5.0  # seconds from a request to the end of its answer, in which workers are forked
# seconds that the agent waits for the end of a fork server; one that cannot be killed is not waited for longer
END_TIMEOUT = 1.0
_LONGEST_LINE = 4096  # bytes of an answer
_PID_PREFIX = "pid "
_CANNOT_FORK = "cannot create a process"


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
        """The bytes that the server receives."""
        variables = (f"{name}={value}" for name, value in self.env.items())
        return _packed_fields([",".join(map(str, self.cpus)), str(len(self.argv) - 2), *self.argv[2:], *variables])

    @property
    def descriptors(self) -> tuple[int, ...]:
        """The descriptors that the worker gets."""
        fds = (self.stdio.stdin, self.stdio.stdout, self.stdio.stderr, self.stdio.stacks)
        return tuple(fd for fd in fds if fd is not None)


class ForkRequests:
    """The agent's connection to a process that forks workers once it has imported its modules; both kinds below share it."""

    def __init__(self, connection: socket.socket) -> None:
        """Own this connection."""
        self._socket = connection
        self._socket.setblocking(False)
        self._received = b""
        self.notes: list[str] = []  # why some modules were not imported
        self.is_ready = False
        self._process: Process | None = None  # of a guard, which says its pid
        self._why_lost = ""  # once the server did not answer: it gets no more requests

    def fileno(self) -> int:
        """Return the descriptor that is readable when the server has something to say: `read`."""
        return self._socket.fileno()

    def read(self) -> None:
        """Read the lines that the server sends while the server starts; ServerLost if the server cannot serve."""
        for line in self._receive_lines():
            what, _, text = line.partition(" ")
            match what:
                case "note":
                    self.notes.append(text)
                case "ready":
                    self.is_ready = True
                case "unsafe" | "stale" | "unfit":  # with why no worker can be forked
                    raise ServerLost(text)
                case "guard":  # with its pid
                    self._process = look(int(text))

    def _fork(self, forks: Sequence[Fork], adopt: Callable[[int], T], end_pipes: Sequence[int] = ()) -> list[T]:
        """Have workers forked, which begin together once `adopt` has made a child of the pid of each; return them in order.

        `adopt` may raise OSError. `end_pipes`, by which a guard tells how each worker has ended, are none for a fork server.

        Raises:
            StartError: the machine cannot create one of the processes; none of them begins.
            ServerLost: the server has ended, or does not answer; none of them begins.
        """
        contents = [fork.content for fork in forks]
        children: list[T] = []
        try:
            # each worker reads a byte of this pipe before it begins: if the agent gives up first, it reads the end, and ends
            wait, release = os.pipe()
            try:
                # descriptors of each worker: its files, the end of the pipe, and with a guard the pipe for how the worker ends
                of_workers = [[*fork.descriptors, wait] for fork in forks]
                for of_one, end_pipe in zip(of_workers, end_pipes, strict=False):
                    of_one.append(end_pipe)
                descriptors_each = len(of_workers[0])
                framed = [_packed_number(descriptors_each), *(_packed_number(len(one)) + one for one in contents)]
                descriptors = [fd for of_one in of_workers for fd in of_one]
                answer = self._ask(b"fork\0" + b"".join(framed), *descriptors)
                children.extend(map(adopt, _pids(answer, len(forks))))
                os.write(release, b"\n" * len(forks))
            finally:
                os.close(wait)
                os.close(release)
        except BaseException as error:
            for child in children:
                child.abandon()
            if isinstance(error, OSError):
                raise StartError(error.errno or errno.EMFILE, _CANNOT_FORK, index=len(children)) from None
            raise
        return children

    def _ask(self, content: bytes, *descriptors: int) -> list[str]:
        """Send a request; return the answer: the pids of lines `pid N`, then the first other line, which ends it.

        Raises ServerLost: there is no answer in time; from then on none is waited for.
        """
        if self._why_lost:
            raise ServerLost(self._why_lost)
        answer: list[str] = []
        deadline = clock.now() + ANSWER_TIMEOUT
        try:
            self._send(content, *descriptors)
            while True:
                self._wait(selectors.EVENT_READ, deadline)
                for line in self._receive_lines():
                    if not line.startswith(_PID_PREFIX):
                        return [*answer, line]
                    answer.append(line.removeprefix(_PID_PREFIX))
        except OSError as error:
            self._why_lost = str(error.strerror or "it does not answer")
            raise ServerLost(self._why_lost) from None

    def _send(self, content: bytes, *descriptors: int) -> None:
        """Send a request: its length with the descriptors, then its content."""
        deadline = clock.now() + ANSWER_TIMEOUT
        self._wait(selectors.EVENT_WRITE, deadline)
        socket.send_fds(self._socket, [_packed_number(len(content))], descriptors)
        left = memoryview(content)
        while left:
            self._wait(selectors.EVENT_WRITE, deadline)
            left = left[self._socket.send(left) :]

    def _wait(self, event: int, deadline: float) -> None:
        """Wait until the socket can be read or written. A pause of the whole machine does not count, and loses no server."""
        with selectors.PollSelector() as selector:  # which takes no descriptor, of which there may be too few
            selector.register(self._socket, event)
            if not clock.wait(selector, deadline):
                raise TimeoutError

    def _receive_lines(self) -> list[str]:
        """Receive once; return the lines that are complete, and keep the rest. ServerLost: the server has ended."""
        try:
            data = self._socket.recv(_LONGEST_LINE)
        except BlockingIOError:
            return []
        except ConnectionError:  # the server has ended without reading the request
            data = b""
        # no line of the server is so long: an imported module has written here
        is_from_module = len(self._received) > _LONGEST_LINE
        if not data or is_from_module:
            raise ServerLost("it has ended")
        *lines, self._received = (self._received + data).split(b"\n")
        return [line.decode(errors="replace") for line in lines]


class ForkServer(ForkRequests):
    """A process that imports modules once, and then forks workers; these are children of the agent, as fresh ones are."""

    def __init__(
        self, argv: Sequence[str], env: Mapping[str, str], modules: Iterable[str], *, handled: Collection[int]
    ) -> None:
        """Start the server with the command of a worker, and the variables that all workers have in common.

        `modules` are to be imported; `handled` are the signals that this process has a handler for: the server begins without.

        Raises StartError: the machine cannot create the process.
        """
        with ExitStack() as at_end, ExitStack() as on_error:
            try:
                ours, theirs = socket.socketpair()
                at_end.enter_context(theirs)
                on_error.enter_context(ours)
                read, write = os.pipe()  # stdout and stderr are pipes, as those of workers are
                # nobody reads it: the server sends what imports print to files of its own
                at_end.callback(os.close, read)
                at_end.callback(os.close, write)
                devnull = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
                at_end.callback(os.close, devnull)
            except OSError as error:
                raise StartError(error.errno or errno.EMFILE, "cannot start the fork server") from None
            theirs.set_inheritable(True)
            served = ",".join([str(theirs.fileno()), *modules])
            self._child = start(argv, {**env, SERVE_VARIABLE: served}, Stdio(devnull, write, write), handled=handled)
            on_error.pop_all()  # it is started: our end stays open
        super().__init__(ours)

    @property
    def pid(self) -> int:
        """The pid of the server."""
        return self._child.pid

    def fork(self, forks: Sequence[Fork]) -> list[Child]:
        """Fork workers, which begin together. Raises StartError, ServerLost."""
        return self._fork(forks, lambda pid: Child(pid, os.pidfd_open(pid)))

    def close(self) -> None:
        """End the server, whatever it is doing."""
        self._socket.close()
        with suppress(OSError):  # it has ended before
            signal.pidfd_send_signal(self._child.pidfd, signal.SIGKILL)
            select.select([self._child.pidfd], [], [], END_TIMEOUT)
            os.waitpid(self.pid, os.WNOHANG)
        self._child.abandon()


class Guard(ForkRequests):
    """The agent's end of a guard: a process forked from the warm interpreter, which has the workers of a run as its children.

    So neither the guard nor the workers are children of ours. The guard passes on what the kernel tells a parent: how each
    worker has ended, by a pipe, and SIGCHLD. The end of another pipe shows that the guard has ended itself, whatever ended it.
    The kernel has killed the workers then; worker/warm.py kills what they have started, and closes the connection when nothing
    is left of it.
    """

    def __init__(self, connection: socket.socket, front_pipe: int) -> None:
        """Use this connection. The guard keeps `front_pipe` open as long as it lives: a front reads to the end of this pipe."""
        super().__init__(connection)
        self._front_pipe = front_pipe
        self._life_pipe = -1  # at its end when the guard has ended; -1 before it is ready, and when it is closed
        self.is_over = False  # the guard has ended, and nothing is left of the processes below it

    @property
    def pid(self) -> int:
        """The pid of the guard, 0 while that is not known."""
        return self._process.pid if self._process is not None else 0

    def send_surroundings(self) -> None:
        """Send a guard that is ready what it and all workers take from the agent: pid, umask, working directory.

        With these go two files to be kept open: the pipe of the front, and the end of one that shows whether the guard lives.
        """
        with ExitStack() as sent:
            try:
                self._life_pipe, kept_by_guard = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
                sent.callback(os.close, kept_by_guard)
                folder = os.open(".", os.O_PATH | os.O_CLOEXEC)
                sent.callback(os.close, folder)
                mask = os.umask(0)  # it can only be read by setting it
                os.umask(mask)
                fields = _packed_fields(["agent", str(os.getpid()), str(mask)])
                self._send(fields, folder, self._front_pipe, kept_by_guard)
            except OSError as error:
                raise ServerLost(str(error.strerror)) from None

    @property
    def has_ended(self) -> bool:
        """Whether the guard has ended, and the kernel has killed its workers."""
        with suppress(BlockingIOError):
            return self._life_pipe < 0 or not os.read(self._life_pipe, 1)
        return False

    def fork(self, forks: Sequence[Fork]) -> list[GuardedChild]:
        """Fork workers, which begin together, each with a pipe for how it has ended. Raises StartError, ServerLost."""
        reads: list[int] = []  # our ends of the pipes of workers that have none yet
        writes: list[int] = []

        def adopt(pid: int) -> GuardedChild:  # called for the workers in their order
            child = GuardedChild(pid, os.pidfd_open(pid), guard=self, status=reads[0])
            del reads[0]
            return child

        try:
            try:
                for _ in forks:
                    read, write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
                    reads.append(read)
                    writes.append(write)
            except OSError as error:
                raise StartError(error.errno or errno.EMFILE, "cannot create a pipe", index=len(reads)) from None
            return self._fork(forks, adopt, writes)
        finally:
            for fd in (*reads, *writes):
                os.close(fd)

    def leftovers(self) -> list[Process]:
        """Return the processes below the guard; once the guard was killed, the guard itself until all below it are gone."""
        if self._process is None or self.is_over:
            return []
        return [self._process] if self.has_ended else list(descendants(self.pid))

    def reap(self, pid: int) -> Usage:
        """Have the guard reap a worker; its usage is lost where the guard does not answer."""
        if not self.has_ended:
            with suppress(ServerLost, ValueError):
                what, *fields = self._ask(_packed_fields(["reap", str(pid)]))[-1].split(" ")
                if what == "usage":
                    return Usage(int(fields[0]) * 1024, float(fields[1]))
        return Usage(0, 0.0)

    def close(self) -> None:
        """End the guard, with all processes below it, whatever it is doing."""
        self._socket.close()
        if self._life_pipe >= 0:
            os.close(self._life_pipe)
            self._life_pipe = -1  # the number may soon be another file's


class GuardedChild(Child, kw_only=True):
    """A worker that a guard has forked; the same to its owner as any child."""

    guard: Guard
    status: int  # pipe: the guard writes there how the worker has ended, or closes it when it ends itself
    end: End | None = None

    @property
    def ended(self) -> int:
        """The descriptor that is readable once `look` returns the end."""
        return self.status

    @property
    def is_kept(self) -> bool:
        """Whether no other process can have its pid and group until it is reaped."""
        return not self.guard.has_ended

    def look(self) -> End | None:
        """Return how the worker ended, None while it lives; the worker is not reaped."""
        if self.end is None:
            try:
                status = os.read(self.status, 32)
            except BlockingIOError:
                return None
            self.end = End.of(*map(int, status.split())) if status else End(None, signal.SIGKILL, False)
        return self.end

    @property
    def has_stopped(self) -> bool:
        """Whether the worker is stopped, as by SIGSTOP, or has ended."""
        process = look(self.pid)
        return self.look() is not None or process is None or process.state in "TtZX"

    def rouse_parent(self) -> None:
        """Have the guard go on, if it is stopped: it tells of the end."""
        if not self.guard.has_ended:
            with suppress(ProcessLookupError):
                os.kill(self.guard.pid, signal.SIGCONT)

    def abandon(self) -> None:
        """Close the descriptors of the worker, without reaping it."""
        super().abandon()
        os.close(self.status)

    def reap(self) -> Usage:
        """Reap the worker, which frees its pid, and close its descriptors."""
        self.abandon()
        return self.guard.reap(self.pid)


def _pids(answer: Sequence[str], number: int) -> list[int]:
    """Return the pids of so many workers in the server's answer: a pid each, then `forked`, or why no more could be forked.

    Raises StartError or ServerLost: the answer has not all of them.
    """
    *pids, last = answer
    what, _, text = last.partition(" ")
    if what == "errno" and text.isdecimal():
        # of the server's process, whose limits may not be the agent's
        raise StartError(int(text), _CANNOT_FORK, index=len(pids), elsewhere=True)
    if what != "forked" or not all(pid.isdecimal() for pid in pids):
        raise ServerLost(text or "an imported module has written to the fork server's socket")
    if len(pids) < number:
        # an imported module has reaped the process that forked them, and with it the reason
        raise StartError(errno.EAGAIN, _CANNOT_FORK, index=len(pids))
    return [int(pid) for pid in pids]


def packed_request(*fields: str) -> bytes:
    """Return a request of these fields, the first of which is its kind, as a warm interpreter takes it; it has no descriptors."""
    content = _packed_fields(fields)
    return _packed_number(len(content)) + content


def _packed_number(value: int) -> bytes:
    return value.to_bytes(8, "big")


def _packed_fields(fields: Iterable[str]) -> bytes:
    """Return fields as they are sent, each ended by a zero byte."""
    return b"".join(os.fsencode(field) + b"\0" for field in fields)
