"""The nodes of a generation meet at the first of them, before it begins and while it runs, as the coordinator sees it.

Needed where the coordinator is none of them. `hearing` is each node's part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct

from ddplaunch.launcher.job.orders import Lead, LeadRefused, Leads, Reach, Reached, Unheard
from ddplaunch.system.loop.loop import Loop

SETTLE = 2.0  # seconds for the other nodes that no longer hear the first one to say so, too


class Port(Struct, frozen=True):
    """MASTER_PORT, as it was asked for."""

    number: int  # 0: any
    origin: str  # who asks for it
    again: bool  # it may soon be free


class Meeting:
    """One generation, from the order to its first node until it ends."""

    def __init__(
        self,
        loop: Loop,
        number: int,
        order: Sequence[int],
        names: Mapping[int, str],
        send: Callable[[Sequence[int], Lead | Reach], None],
        decided: Callable[[Leads | LeadRefused, str], None],
        lost: Callable[[Mapping[int, str]], None],
        is_silent: Callable[[int], bool],
    ) -> None:
        """Meet with the agents in `order`, whose hosts have these `names`; `begin` begins with that.

        `decided` gets the first node's reply once all others have reached that node, and the address at which most of them have.
        `lost` gets nodes without which the others go on, each with the reason as a predicate. `is_silent` says whether the
        coordinator itself hears a node no longer.
        """
        self._loop = loop
        self.number = number
        self._order = order
        self._names = names
        self._send = send
        self._decided = decided
        self._lost = lost
        self._is_silent = is_silent
        self._leads: Leads | None = None
        self._reached: dict[int, Reached] = {}
        self._unheard: dict[int, str] = {}  # nodes that do not hear the first one, and why
        self.has_begun = False  # the generation
        self._settle_at = loop.timer(None, self._settle)

    def begin(self, port: Port) -> None:
        """Have the first node reserve MASTER_PORT."""
        first = self._order[0]
        self._send((first,), Lead(self.number, port.number, port.origin, port.again, self._names[first]))

    def take(self, id: int, report: Leads | LeadRefused | Reached | Unheard) -> None:
        """Take a report of one of the nodes; one of another generation, or out of turn, changes nothing."""
        if report.number != self.number or id not in self._order:
            return
        is_first = id == self._order[0]
        match report:
            case LeadRefused() if is_first and self._leads is None:
                self._decided(report, "")
            case Leads() if is_first and self._leads is None:
                self._leads = report
                others = self._order[1:]
                if others:
                    self._send(others, Reach(self.number, report.heard_at, report.addresses))
                self._decide()
            case Reached() if not is_first and self._leads is not None:
                self._reached.setdefault(id, report)
                self._decide()
            case Unheard(_, reason) if not is_first and self.has_begun:
                self._unheard[id] = f"does not hear {self._first}: {reason}"
                if not self._settle_at.is_set:
                    self._settle_at.set(self._loop.now() + SETTLE)

    @property
    def _first(self) -> str:
        return f"node 0 ({self._names[self._order[0]]})"

    def _decide(self) -> None:
        """Go on once all have said whether they reach the first node."""
        if self._leads is None or self.has_begun or len(self._reached) < len(self._order) - 1:
            return
        addresses = Counter(one.address for one in self._reached.values() if one.address is not None)
        for id, one in self._reached.items():
            if one.address is None:
                self._unheard[id] = f"does not reach {self._first}: {one.problem}"
        if self._unheard:
            self._settle()
            return
        self.has_begun = True
        most = addresses.most_common(1)
        self._decided(self._leads, most[0][0] if most else self._leads.addresses[0])

    def _settle(self) -> None:
        """Keep the larger part: those that hear the first node, it among them, or the others; of equal parts the first."""
        if self._is_silent(self._order[0]):  # it may be lost altogether
            self._settle_at.set(self._loop.now() + SETTLE)
            return
        self._settle_at.cancel()
        deaf, self._unheard = self._unheard, {}
        hearing = [id for id in self._order if id not in deaf]
        if len(deaf) > len(hearing):
            reason = f"is not heard by {len(deaf)} of {len(self._order)} nodes: {next(iter(deaf.values()))}"
            self._lost(dict.fromkeys(hearing, reason))
        else:
            self._lost(deaf)

    def close(self) -> None:
        """Take nothing any more: the generation has ended."""
        self._settle_at.cancel()
        self.number = -1
