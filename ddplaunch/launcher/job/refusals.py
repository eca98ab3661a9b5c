"""Why a node is not reached."""

from __future__ import annotations

from ddplaunch.reach.channel.handshake import UNPROVEN, WRONG_KEY

_CONNECTION_REFUSED = "connection refused"


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
