"""How a node is looked for: its names are looked up, and its addresses dialed, until a connection to it is open."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import Protocol

from ddplaunch.reach.channel.dialer import Dialer, Target
from ddplaunch.reach.channel.handshake import UNPROVEN, WRONG_KEY, Key
from ddplaunch.reach.channel.peer import Peer
from ddplaunch.system.loop.loop import Loop
from ddplaunch.system.net.addresses import Answer, Resolver, is_numeric

LOOK_UP_AGAIN_AFTER = 1.0  # seconds until a name that was not known is looked up again
# seconds for which known addresses are not dialed while a name is still being looked up: it may be the better one
STOP_AWAITING_NAMES_AFTER = 0.5
_CONNECTION_REFUSED = "connection refused"

Place = tuple[str, int]  # a name or an address of a host, and a port


class Searcher(Protocol):
    """Who looks for a node."""

    def on_found(self, peer: Peer, found_as: str) -> None:
        """Take the connection to the node; `found_as` is the name or address under which the node was found."""


class Search:
    """One search for a node, and the next one if it is lost. Until the node is found, `refusals` says why not."""

    def __init__(self, loop: Loop, key: Key, searcher: Searcher, *, tcp_user_timeout: float) -> None:
        """Prepare to look for a node that proves this key; `tcp_user_timeout` is that of its connection, in seconds."""
        self._loop = loop
        self._searcher = searcher
        self.refusals = Refusals()
        self.places: tuple[Place, ...] = ()
        self._names: dict[str, _Name] = {}  # of the places, in their order
        self._targets: list[Target] = []  # the addresses that are being dialed
        # when to dial the addresses that are known by then; not set any more: each is dialed as soon as it is known
        self._stop_awaiting_names_at = loop.timer(None, self._dial)
        self._dialer = Dialer(loop, key, self, tcp_user_timeout=tcp_user_timeout)

    def begin(self, places: Iterable[Place], *, again_after: float = inf) -> None:
        """Look for the node at these places, in this order; look names up again after so many seconds: it may have moved."""
        self.places = tuple(places)
        self.refusals.forget()
        self._forget_names()
        hosts = dict.fromkeys(host for host, _ in self.places)
        self._names = {host: _Name(self._loop, host, self, again_after) for host in hosts}
        # until then, no address is dialed while a name, which may be a better place, is being looked up
        self._stop_awaiting_names_at.set(self._loop.now() + STOP_AWAITING_NAMES_AFTER)
        for name in self._names.values():
            name.look_up()

    def stop(self) -> None:
        """Look for the node no longer."""
        self._stop_awaiting_names_at.cancel()
        self._forget_names()
        self._dialer.stop()
        self._targets = []

    def _forget_names(self) -> None:
        for name in self._names.values():
            name.forget()

    def on_answer(self, answer: Answer) -> None:
        """Dial the addresses that are known, unless names that are better may still be known in time. Called by a name."""
        if answer.error:
            self.refusals.add(answer.host, answer.error)
        if all(name.is_answered for name in self._names.values()):
            self._stop_awaiting_names_at.cancel()
        if not self._stop_awaiting_names_at.is_set:
            self._dial()

    def _dial(self) -> None:
        """Dial the addresses that are known, in the order of their places, unless they are dialed already."""
        targets = list(dict.fromkeys(each for host, port in self.places for each in self._names[host].at(port)))
        if targets and targets != self._targets:
            self._targets = targets
            self._dialer.set_targets(targets)

    def on_refused(self, who: str, reason: str) -> None:
        """Note why an address is not the node. Called by the dialer."""
        self.refusals.add(who, reason)

    def on_opened(self, peer: Peer) -> None:
        """End the search, since the node is found. Called by the dialer."""
        self.stop()
        found_as = (host for host, name in self._names.items() if peer.address in name.addresses)
        self._searcher.on_found(peer, next(found_as, peer.address))


class _Name:
    """A name of the node, or an address: looked up until it is known, and again where the node may have moved."""

    def __init__(self, loop: Loop, host: str, search: Search, again_after: float) -> None:
        """`search` gets each answer; a known name is looked up again after `again_after` seconds."""
        self._loop = loop
        self._host = host
        self._search = search
        self._again_after = again_after
        self._targets: tuple[Target, ...] = ()  # with 0 for a port, as last known
        self.is_answered = False  # whether a look-up has ended, whatever it has found
        self._resolver: Resolver | None = None  # of the last look-up
        self._again_at = loop.timer(None, self.look_up)

    @property
    def addresses(self) -> frozenset[str]:
        """The numeric addresses of the name."""
        return frozenset(str(address) for _, (address, *_) in self._targets)

    def at(self, port: int) -> Iterable[Target]:
        """Return the addresses with this port."""
        return [(family, (address, port, *more)) for family, (address, _, *more) in self._targets]

    def look_up(self) -> None:
        """Ask for the addresses."""
        self._resolver = Resolver(self._loop, self._host, self._on_answer)

    def forget(self) -> None:
        """End a look-up that is under way, and look the name up no more."""
        self._again_at.cancel()
        if self._resolver is not None:
            self._resolver.close()

    def _on_answer(self, answer: Answer) -> None:
        """Keep the addresses, of a name server that fails the ones before; plan the next look-up. Called by the resolver."""
        self.is_answered = True
        self._targets = answer.targets or self._targets
        if answer.error:
            self._again_at.set(self._loop.now() + LOOK_UP_AGAIN_AFTER)
        elif self._again_after < inf and not is_numeric(self._host):
            self._again_at.set(self._loop.now() + self._again_after)
        self._search.on_answer(answer)


class Refusals:
    """The most telling reason of all attempts to reach a node: the latest of equal ones, but the first of refused connections."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin anew: nothing was tried yet."""
        self.text = "it has not answered"
        self._tells = -1

    def expire(self) -> None:
        """Let the next reason replace this one, whatever it tells: this one has been reported."""
        self._tells = -1

    def add(self, where: str, reason: str) -> None:
        """Take the reason of an attempt. `where` is the address or the name that was tried."""
        tells = _telling(reason)
        if tells > self._tells or tells == self._tells > 0:
            self.text, self._tells = f"{where}: {reason}", tells


def _telling(reason: str) -> int:
    """How much this tells: most what a ddplaunch there finds wrong, least that nobody listens."""
    if reason in (WRONG_KEY, UNPROVEN) or reason.startswith("protocol "):
        return 2
    return 0 if reason == _CONNECTION_REFUSED else 1
