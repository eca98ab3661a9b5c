"""Tells the nodes that look for a node 0 which is not fit, for a short time, why it is not: they end, and no job begins."""

from __future__ import annotations

from ddplaunch.launcher.job import messages
from ddplaunch.launcher.job.connections import Connections, Terms
from ddplaunch.launcher.job.orders import HINT_WITHOUT_NODE_0, JobEnd
from ddplaunch.system import exitcodes
from ddplaunch.system.errors import LaunchError
from ddplaunch.system.loop.loop import Loop

# seconds in which other nodes are awaited: they were started at the same time, and run their checks as well
WITHIN = 10.0


def turn_away(terms: Terms, why: LaunchError, reason: str, others: int) -> None:
    """Tell so many other nodes, or those that come in time, that this node 0 is not fit; `terms` say where it listens for them.

    Nodes that have not lost a node 0 before get `why`. Those that have go on waiting for another one, and get the `reason`.

    Raises LaunchError: no port is free.
    """
    loop = Loop()
    turns_away = TurnAway(why, reason, others)
    connections = turns_away.connections = Connections(loop, terms, turns_away)
    loop.timer(loop.now() + WITHIN, turns_away.end)
    while not turns_away.is_over:
        loop.run_once()
    connections.close()
    loop.close()


class TurnAway:
    """What node 0, unfit, tells the nodes that look for it, and how many have yet to come; the receiver of their messages."""

    connections: Connections

    def __init__(self, why: LaunchError, reason: str, others: int) -> None:
        said = LaunchError(f"node 0 does not take part: {why.message}", hint=HINT_WITHOUT_NODE_0)
        self._end_of_job = messages.fitted(JobEnd(exitcodes.NODE_LOST, "unfit", said.render()))
        self._wait_for_another = messages.LeftByNode0(0, reason)
        self._missing = others  # so many have neither been told nor withdrawn
        self._told = set[int]()  # those that close their connections now
        self._is_awaited_again = False
        self.is_over = False

    def end(self) -> None:
        """Wait for no further node."""
        self.is_over = True

    def on_message(self, id: int, message: messages.ToCoordinator) -> None:
        """Tell a node, which then closes the connection; one that itself does not take part is let go at once."""
        match message:
            case messages.Hello():
                # it has lost a node 0, and looks for one again once it is told this: then no other node is awaited
                if message.was_left:
                    self._is_awaited_again = True
                answer = self._wait_for_another if message.was_left else self._end_of_job
                self._told.add(id)  # it is counted when it has closed its connection
                self.connections.send(id, messages.encode(answer))
            case messages.Withdrawal():  # in place of a hello
                self.connections.drop(id)
                self._await_one_less()

    def on_lost(self, id: int, reason: str, renewed_at: float) -> None:
        """Count a node that was told, and not who only asks whether node 0 is here."""
        if id in self._told:
            self._await_one_less()

    def _await_one_less(self) -> None:
        """Await one node less, and none any more if one awaits another node 0: it looks again, and would be back at once."""
        self._missing -= 1
        self.is_over = self.is_over or self._missing <= 0 or self._is_awaited_again

    def on_pong(self) -> None:
        """Hear what says nothing here."""

    def on_part_dropped(self, id: int, reason: str) -> None:
        """Hear what says nothing here."""

    def on_refused(self, address: str, reason: str) -> None:
        """Hear what says nothing here."""
