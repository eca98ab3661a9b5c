"""A coordinator that has taken over looks for one that was started again in the first one's place, and sends it to this job."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddplaunch.launcher.job.orders import JobEnd
from ddplaunch.launcher.job.remote_link import RemoteLink

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ddplaunch.launcher.job import messages
    from ddplaunch.launcher.job.link import JoinRequest
    from ddplaunch.launcher.job.orders import Order
    from ddplaunch.system.loop.loop import Loop
    from ddplaunch.system.net.resolver import Answer

AGAIN = 4.0  # seconds from one look to the next: less than --last-call, after which a new coordinator begins


class Redirector(RemoteLink):
    """Keeps a connection to such a coordinator; while there is none, looks for it from time to time."""

    _resolve_again = AGAIN

    def __init__(
        self, request: JoinRequest, message: messages.GoesOn, loop: Loop, print_line: Callable[[str], None]
    ) -> None:
        """Begin to look, where the first coordinator was to listen; `message` is what the new one gets."""
        super().__init__(
            loop,
            key=request.key,
            hello=lambda _: message,
            source=request.rendezvous.source,
            heartbeat_timeout=request.spec.heartbeat_timeout,
            rdzv_timeout=request.spec.rdzv_timeout,
        )
        self._print = print_line
        self._number = 0  # of addresses in this look, or of names that lead nowhere
        self._failed: set[str] = set()  # of these
        self._has_warned = False
        self._stop_waiting()
        self.aim(request.rendezvous.addresses, request.rendezvous.ports)

    def _on_resolved(self, answers: Sequence[Answer]) -> None:
        self._number, self._failed = sum(max(1, len(answer.targets)) for answer in answers), set()
        super()._on_resolved(answers)

    def _on_refused(self, where: str, reason: str) -> None:
        self._failed.add(where)
        if len(self._failed) >= self._number:
            self._look_again()

    def _look_again(self) -> None:
        self._disconnect()
        self._stop_waiting()
        self._resolve_at.set(self._loop.now() + AGAIN)

    def _on_anew(self) -> None:
        """Warn, once, that the other coordinator has begun something too."""
        if not self._has_warned:
            self._has_warned = True
            self._print("warning: where node 0 was, another ddplaunch has begun this job too: end one of both")
        self._look_again()

    def take(self, order: Order) -> None:
        """Take no order but the end of the other one, or of the connection to it."""
        if isinstance(order, JobEnd):
            self._look_again()
