"""One try to bring the nodes of a generation together, before any of them is told to begin: no worker runs yet.

It is needed where the coordinator is on none of these nodes: the first one has to reserve MASTER_PORT, the others to reach it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from ddplaunch.launcher.job.orders import MAX_ADDRESSES, CannotLead, Lead, Leads, Reach, Reached, Unheard
from ddplaunch.plan.cluster.endpoints import LOOPBACK


class Meeting:
    """What the nodes have answered so far."""

    def __init__(
        self, number: int, order: Sequence[int], names: Sequence[str], ask: Callable[[int, Lead | Reach], None]
    ) -> None:
        """Begin with `lead`; `order` are ids, the first node's first, and `names` are those that it is looked for under first."""
        self.number = number
        self.order = tuple(order)
        self._names = tuple(names)
        self._ask = ask
        self.again = False
        self.leads: Leads | None = None  # once the first node is ready
        self.refusal: CannotLead | None = None  # why it cannot
        self._addresses: tuple[str, ...] = ()
        self._missing = set(self.order[1:])  # those that have not answered
        self._reached: dict[int, str] = {}  # under which address, by id
        self.unreached: dict[int, str] = {}  # why not, by id

    def lead(self, port: int, origin: str, *, again: bool) -> None:
        """Have the first node make ready; `again`: the coordinator tries again if the port is taken."""
        self.again = again
        self._ask(self.order[0], Lead(self.number, port, origin, again))

    def on_report(self, id: int, report: Leads | CannotLead | Reached | Unheard) -> None:
        """Take what a node has come to; drop what was not asked of it."""
        match report:
            case CannotLead() if id == self.order[0] and self.leads is None:
                self.refusal = report
            case Leads() if id == self.order[0] and self.leads is None:
                self.leads = report
                self._addresses = tuple(dict.fromkeys((*self._names, *report.addresses)))[:MAX_ADDRESSES]
                for other in self.order[1:]:
                    self._ask(other, Reach(self.number, self._addresses, report.heard_at))
            case Reached(address=address, reason=reason) if id in self._missing and self.leads is not None:
                self._missing.remove(id)
                if address in self._addresses:
                    self._reached[id] = address
                else:
                    self.unreached[id] = f"at {address}, which is none of its addresses" if address else reason
            case Unheard(reason=reason) if id in self._reached:
                del self._reached[id]
                self.unreached[id] = reason

    @property
    def is_over(self) -> bool:
        """Whether all nodes have answered, or the first one cannot make ready."""
        return self.refusal is not None or (self.leads is not None and not self._missing)

    @property
    def address(self) -> str:
        """The address under which most have reached the first node; of a node alone, that of its loopback interface."""
        return Counter(self._reached.values() or [LOOPBACK]).most_common(1)[0][0]
