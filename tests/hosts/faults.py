"""A bed behind a switch with faults (switch.c): each way between each two hosts drops, delays, loses, doubles or reorders frames.

It takes the place of the bridge of the first network, until it is closed.
"""

import itertools
from collections.abc import Sequence
from pathlib import Path

from tests.hosts.bed import Bed


class Faults:
    """The faults of the links between the hosts of a bed; at first there is none."""

    def __init__(self, bed: Bed, switch: Path) -> None:
        """`switch` is switch.c, compiled."""
        self._bed = bed
        self._carrier = bed.carry(switch)
        self._is_answered("ready")

    def close(self) -> None:
        """Plug the hosts into the bridge again, and prove that nothing of the switch is left."""
        self._bed.mend()
        left = self._bed.left_of_carriers()
        assert not left, f"the switch has left {left}"

    def cut(self, source: str, target: str) -> None:
        """Drop all that a host sends to another, but not what comes back."""
        self._tell(source, target, drops=1)

    def part(self, some: Sequence[str], others: Sequence[str]) -> None:
        """Drop all between some hosts and others, both ways."""
        for one, other in itertools.product(some, others):
            self.cut(one, other)
            self.cut(other, one)

    def everywhere(self, *, delay: float = 0, jitter: float = 0, loss: float = 0, doubles: float = 0) -> None:
        """Give each way between each two hosts these faults, in the place of all that it had.

        delay: milliseconds; jitter: up to so many more, at random, by which later frames overtake earlier ones.
        loss, doubles: of 100 frames, so many are lost, or come twice.
        """
        for source, target in itertools.permutations(self._bed.hosts, 2):
            self._tell(source, target, delay=delay, jitter=jitter, loss=loss, doubles=doubles)

    def heal(self) -> None:
        """Undo all faults. What is late still comes."""
        self.everywhere()

    def _tell(
        self,
        source: str,
        target: str,
        *,
        drops: int = 0,
        delay: float = 0,
        jitter: float = 0,
        loss: float = 0,
        doubles: float = 0,
    ) -> None:
        ends = (self._bed.number(source), self._bed.number(target))
        rule = " ".join(map(str, (*ends, drops, delay, jitter, loss, doubles)))
        assert self._carrier.stdin is not None
        self._carrier.stdin.write(f"{rule}\n".encode())
        self._carrier.stdin.flush()
        self._is_answered("done")

    def _is_answered(self, word: str) -> None:
        assert self._carrier.stdout is not None
        assert self._carrier.stdout.readline().decode().strip() == word, "the switch has ended"
