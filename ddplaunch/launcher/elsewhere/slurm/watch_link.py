"""The link of the command that has started a step: it follows whichever coordinator there is. Takes over nothing itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddplaunch.launcher.job import messages
from ddplaunch.launcher.job.orders import CoordinatorLost, JobEnd
from ddplaunch.launcher.job.remote_link import RemoteLink
from ddplaunch.reach.silence import seconds_to_follow
from ddplaunch.spec.outcome import Why

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddplaunch.launcher.job.orders import Order
    from ddplaunch.reach.channel.handshake import Key
    from ddplaunch.reach.channel.peer import Peer
    from ddplaunch.system.loop.loop import Loop

FOREVER = float("inf")


class WatchLink(RemoteLink):
    """A link that looks for the node that takes over once the coordinator is lost, or has ended because it lost the others."""

    def __init__(self, loop: Loop, *, key: Key, heartbeat_timeout: float, may_shorten_silence: bool) -> None:
        """Prepare to look for node 0, for as long as it takes: the step may have to wait for others to end."""
        self._candidates: Sequence[messages.Candidate] = ()  # none, if no node takes over
        self._if_in_vain: JobEnd | None = None  # how the job ends unless a coordinator is found; None: one is followed
        super().__init__(
            loop,
            key=key,
            hello=lambda _: messages.Watch(),
            source=None,
            heartbeat_timeout=heartbeat_timeout,
            may_shorten_silence=may_shorten_silence,
            rdzv_timeout=FOREVER,
        )
        self._give_up_at = loop.timer(None, self.give_up)

    def _on_succession(self, succession: messages.Succession) -> None:
        self._candidates = succession.candidates

    def take(self, order: Order) -> None:
        """Take an order; a coordinator that ends because other nodes are lost is not believed before these were looked for."""
        if not isinstance(order, JobEnd) or order.why not in ("lost", Why.NODE_LOST.value) or self._has_ended:
            super().take(order)
            return
        has_said_so = order.why == Why.NODE_LOST.value
        others = [one for one in self._candidates if not (has_said_so and self._is_followed(one))]
        if others and not self.is_looking:
            self._look_for_successor(others, order)
        else:
            super().take(order)

    def _is_followed(self, candidate: messages.Candidate) -> bool:
        reached = self._dialer.reached
        return reached is not None and reached[1][:2] == (candidate.address, candidate.port)

    @property
    def is_looking(self) -> bool:
        """Whether the coordinator is lost, and the next one is looked for."""
        return self._if_in_vain is not None

    def _look_for_successor(self, candidates: Sequence[messages.Candidate], if_in_vain: JobEnd) -> None:
        self._if_in_vain = if_in_vain
        self._disconnect()
        self._give_up_at.set(self._loop.now() + seconds_to_follow(self._heartbeat_timeout))
        self.aim_at(candidates)
        self._loop.post(CoordinatorLost(if_in_vain.text))

    def _on_opened(self, peer: Peer) -> None:
        self._if_in_vain = None
        super()._on_opened(peer)

    def give_up(self) -> None:
        """Look for a coordinator no longer, if one is looked for: the job has ended as it would have without successors."""
        if (end := self._if_in_vain) is not None:
            super().take(end)

    def _stop_waiting(self) -> None:
        super()._stop_waiting()
        self._give_up_at.cancel()
