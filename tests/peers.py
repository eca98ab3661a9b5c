"""Who waits for peers, in tests of those that bring them."""

from __future__ import annotations

from collections.abc import Callable

from ddplaunch.reach.channel.peer import Peer


class PeerRecorder:
    """Keeps the peers of a greeting, a dialer or a listener, and who was refused why."""

    def __init__(self, then: Callable[[Peer], object] = lambda _: None) -> None:
        """`then` takes each peer as well."""
        self.peers: list[Peer] = []
        self.refusals: list[tuple[str, str]] = []
        self._then = then
        self.then_refused: Callable[[], object] = lambda: None  # what else is done at each refusal

    def on_opened(self, peer: Peer) -> None:
        self.peers.append(peer)
        self._then(peer)

    def on_refused(self, who: str, reason: str) -> None:
        self.refusals.append((who, reason))
        self.then_refused()
