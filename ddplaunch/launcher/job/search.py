"""How a node is looked for: its names are looked up, and its addresses dialed, until a connection to it is open."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import inf

from ddplaunch.reach.channel.dialer import Dialer, Target
from ddplaunch.reach.channel.handshake import UNPROVEN, WRONG_KEY, Key
from ddplaunch.reach.channel.peer import Peer
from ddplaunch.system.loop.loop import Loop
from ddplaunch.system.net.addresses import is_numeric
from ddplaunch.system.net.resolver import Answer, Resolver

LOOK_UP_AGAIN = 1.0  # seconds until a name that was not known is looked up again
NUMERIC_AFTER = 3.0  # seconds in which names are looked up before the numeric addresses are dialed alone
_CONNECTION_REFUSED = "connection refused"

Place = tuple[str, int]  # a name or an address of a host, and a port


class Search:
    """One search for a node, and the next one if it is lost.

    `opened` gets the connection, and the name or address under which the node was found. Until then, `refusals` says why not.
    """

    def __init__(self, loop: Loop, key: Key, opened: Callable[[Peer, str], None], *, user_timeout: float) -> None:
        """Prepare to look for a node that proves this key; `user_timeout` is that of its connection, see `Dialer`."""
        self._loop = loop
        self._opened = opened
        self.refusals = Refusals()
        self.places: tuple[Place, ...] = ()
        self._moves_within = inf  # seconds after which names are looked up again: the node may have moved; inf: never
        self._names: dict[str, str] = {}  # what the targets were called, by numeric address
        self._targets: list[Target] = []  # the addresses that are being dialed
        self._resolver: Resolver | None = None  # of the last look-up
        self._look_up_at = loop.timer(None, self._look_up)
        self._numeric_at = loop.timer(None, self._dial_numeric)  # set until the first look-up is over
        self._dialer = Dialer(loop, key, opened=self._on_opened, refused=self.refusals.add, user_timeout=user_timeout)

    def begin(self, places: Iterable[Place], *, moves_within: float = inf) -> None:
        """Look for the node at these places, in this order; look names up again after so many seconds: it may have moved."""
        self.places, self._moves_within = tuple(places), moves_within
        self.refusals.forget()
        self._names.clear()
        self._numeric_at.set(self._loop.now() + NUMERIC_AFTER)
        self._look_up()

    def stop(self) -> None:
        """Look for the node no longer."""
        self._look_up_at.cancel()
        self._numeric_at.cancel()
        if self._resolver is not None:
            self._resolver.close()
        self._dialer.stop()
        self._targets = []

    def _look_up(self) -> None:
        """Look up all names again, in place of a look-up that is under way."""
        self._look_up_at.cancel()
        if self._resolver is not None:
            self._resolver.close()
        self._resolver = Resolver(self._loop, self.places, self._on_looked_up)

    def _on_looked_up(self, answers: Sequence[Answer]) -> None:
        """Dial the addresses that were found; if a name was not, look all up again soon. Called by the resolver."""
        self._numeric_at.cancel()
        for answer in answers:
            if answer.error:
                self.refusals.add(answer.host, answer.error)
                self._look_up_at.set(self._loop.now() + LOOK_UP_AGAIN)
        if self._moves_within < inf:
            self._look_up_at.set_by(self._loop.now() + self._moves_within)
        self._dial(answers)

    def _dial_numeric(self) -> None:
        """Dial the numeric addresses without the names: a dead name server answers too late. Called by the loop."""
        numeric = [(host, port) for host, port in self.places if is_numeric(host)]
        Resolver(self._loop, numeric, self._dial)  # which answers at once

    def _dial(self, answers: Sequence[Answer]) -> None:
        """Dial these addresses, unless they are dialed already."""
        for answer in answers:
            for _, sockaddr in answer.targets:
                self._names.setdefault(str(sockaddr[0]), answer.host)
        targets = list(dict.fromkeys(target for answer in answers for target in answer.targets))
        if targets and targets != self._targets:
            self._targets = targets
            self._dialer.set_targets(targets)

    def _on_opened(self, peer: Peer) -> None:
        """Hand the connection to `opened`, and end the search. Called by the dialer."""
        self.stop()
        self._opened(peer, self._names.get(peer.address, peer.address))


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
