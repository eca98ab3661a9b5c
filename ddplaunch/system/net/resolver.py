"""Looks up a host name in a child, since getaddrinfo may take a minute. Has no timeout: the caller closes it."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from ddplaunch.system.loop.loop import Loop

if TYPE_CHECKING:
    from ddplaunch.system.loop.loop import Pending

Target = tuple[int, tuple[Any, ...]]  # address family and sockaddr, as getaddrinfo gives them
Found = Sequence[Target] | str  # the addresses of a host, or why there are none

_SLOW = 3.0  # seconds after which a line says that a name is being looked up


class Answer(Struct, frozen=True):
    """The addresses of a host, or why there are none."""

    host: str
    targets: tuple[Target, ...] = ()  # with 0 for a port, in the order in which they are to be tried (RFC 6724)
    error: str = ""  # why there is none, as getaddrinfo reports it


class Resolver:
    """The lookup of one host name.

    `answered` is called once: at once, before this object is made, if the name is numeric or the machine has no room for a
    child, else from the loop.
    """

    def __init__(self, loop: Loop, host: str, answered: Callable[[Answer], None]) -> None:
        """Look the host up in a child; `answered` gets the answer."""
        self._host = host
        self._answered = answered
        self._pending: Pending[Found] | None = None
        # an address in digits needs no lookup, and reading it never blocks; for a name, the result is a text that says why not
        numeric = _look_up(host, socket.AI_NUMERICHOST)
        if isinstance(numeric, str):
            killed = "the lookup was killed, or could not be started"
            self._pending = loop.ask(lambda: _look_up(host), killed, self._answer)
        else:
            self._answer(numeric)

    def close(self) -> None:
        """End a lookup that is still under way; `answered` will not be called any more."""
        self._answered = lambda _: None
        if self._pending is not None:
            self._pending.give_up()

    def _answer(self, found: Found) -> None:
        if isinstance(found, str):
            self._answered(Answer(self._host, error=found))
        else:
            self._answered(Answer(self._host, tuple(found)))


def look_up(host: str, slow: Callable[[], None]) -> Answer:
    """Look a host up where no loop runs yet; `slow` is called if that takes seconds."""
    answers: list[Answer] = []
    loop = Loop()
    resolver = Resolver(loop, host, answers.append)
    loop.timer(loop.now() + _SLOW, slow)
    try:
        while not answers:
            loop.run_once()
    finally:
        resolver.close()
        loop.close()
    return answers[0]


def leads_to(host: str, address: str) -> bool:
    """Whether a name of a host leads to this numeric address; may take long. Of this host's addresses only its own names do."""
    from ddplaunch.system.net.addresses import is_own  # few jobs need it

    if is_own(address):
        return host.partition(".")[0].lower() == socket.gethostname().partition(".")[0].lower()
    found = _look_up(host)
    return not isinstance(found, str) and address in [str(sockaddr[0]) for _, sockaddr in found]


def _look_up(host: str, flags: int = 0) -> Found:
    """Return the addresses of a host, or why there are none; `flags` are those of getaddrinfo."""
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
