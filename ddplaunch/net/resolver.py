"""Looks up host names in a child, since getaddrinfo may take a minute. Has no timeout: the caller closes it."""

from __future__ import annotations

import errno
import json
import os
import selectors
import signal
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from ddplaunch.process.linux import detach, signal_at_end_of
from ddplaunch.process.tree import ends_within
from ddplaunch.record import record

Target = tuple[int, tuple[Any, ...]]  # address family and sockaddr, as getaddrinfo gives them

_CHUNK = 65536  # bytes
_KILL_TIMEOUT = 1.0  # seconds to wait for SIGKILL to work
_SLOW = 3.0  # seconds after which a line says that a name is being looked up


@record
class Answer:
    """The result of one query."""

    host: str
    port: int
    targets: tuple[Target, ...] = ()  # in the order in which they are to be tried (RFC 6724)
    error: str = ""  # why there is none, as getaddrinfo reports it


class Resolver:
    """One lookup of several host names.

    `answered` is called once with an answer to each query, in their order: at once, before this object is made, if all
    are numeric, else from the loop.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        queries: Sequence[tuple[str, int]],
        answered: Callable[[Sequence[Answer]], None],
    ) -> None:
        self._selector = selector
        self._queries = tuple(queries)
        self._answered = answered
        self._pid: int | None = None
        self._pipe = -1
        self._received = b""
        hosts = dict.fromkeys(host for host, _ in queries)
        # to read a numeric address never blocks
        self._known = {
            host: found for host in hosts if not isinstance(found := _look_up(host, socket.AI_NUMERICHOST), str)
        }
        unknown = [host for host in hosts if host not in self._known]
        if not unknown:
            self._answer({})
            return
        try:
            self._pid, self._pipe = _fork(unknown)
        except OSError as error:
            self._answer(dict.fromkeys(unknown, os.strerror(error.errno or errno.EAGAIN)))
        else:
            selector.register(self._pipe, selectors.EVENT_READ, self._readable)

    @property
    def pid(self) -> int | None:
        """The pid of the child, which only this object may reap; None without one."""
        return self._pid

    def close(self) -> None:
        """End a lookup that is still under way; `answered` will not be called any more."""
        if self._pid is None:
            return
        self._selector.unregister(self._pipe)
        os.close(self._pipe)
        os.kill(self._pid, signal.SIGKILL)
        # one that reads /etc/hosts from a disk that hangs ends when that answers; it is reaped with all else then
        if ends_within(self._pid, _KILL_TIMEOUT):
            os.waitpid(self._pid, 0)
        self._pid = None

    def _readable(self) -> None:
        if data := os.read(self._pipe, _CHUNK):
            self._received += data
            return
        self.close()
        try:
            found = json.loads(self._received)
        except ValueError:
            found = {}
        self._answer(found)

    def _answer(self, looked_up: Mapping[str, Any]) -> None:
        """Answer all queries; `looked_up` holds for each host that is not numeric what `_look_up` gives."""
        found = {**looked_up, **self._known}
        self._answered([_answer(host, port, found.get(host, "the lookup was killed")) for host, port in self._queries])


def look_up(host: str, slow: Callable[[], None]) -> Answer:
    """Look a host up where no loop runs yet; `slow` is called if that takes seconds."""
    answers: list[Answer] = []
    with selectors.DefaultSelector() as selector:
        resolver = Resolver(selector, [(host, 0)], answers.extend)
        try:
            patience: float | None = _SLOW
            while not answers:
                ready = selector.select(patience)
                if not ready:
                    slow()
                    patience = None
                for key, _ in ready:
                    key.data()
        finally:
            resolver.close()
    return answers[0]


def _answer(host: str, port: int, found: Any) -> Answer:
    if isinstance(found, str):
        return Answer(host, port, error=found)
    return Answer(host, port, tuple((family, (address, port, *more)) for family, (address, _, *more) in found))


def _look_up(host: str, flags: int = 0) -> Sequence[Target] | str:
    """The addresses of a host, or why there are none."""
    try:
        # ASCII passes as bytes: for a str, Python would load its tables of Unicode
        name = host.encode("ascii" if host.isascii() else "idna")
        found = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM, flags=flags)
    except OSError as error:
        return error.strerror or str(error)
    except ValueError:  # beyond ASCII, and a label is empty or too long
        return "not a valid host name"
    # a line that is in /etc/hosts twice is found twice
    return tuple(dict.fromkeys((int(family), sockaddr) for family, _, _, _, sockaddr in found))


def _fork(hosts: Iterable[str]) -> tuple[int, int]:
    """Start a child that looks these up; give its pid and the pipe that it writes to.

    Raises:
        OSError: the machine cannot create another process or pipe.
    """
    us = os.getpid()
    ours, its = os.pipe2(os.O_CLOEXEC)
    # blocked in the child from its beginning: only SIGKILL is meant for it, and a handler of ours would write to our wakeup pipe
    before = signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())
    try:
        pid = os.fork()
        if pid == 0:
            _serve(us, hosts, its)
    except OSError:
        os.close(ours)
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(its)
    return pid, ours


def _serve(parent: int, hosts: Iterable[str], pipe: int) -> NoReturn:
    """Run in the child: look up, write the answers, exit."""
    try:
        signal_at_end_of(parent, signal.SIGKILL)
        detach(pipe)
        with open(3, "wb") as file:
            file.write(json.dumps({host: _look_up(host) for host in hosts}).encode())
    finally:
        os._exit(0)  # the parent sees that there is no answer
