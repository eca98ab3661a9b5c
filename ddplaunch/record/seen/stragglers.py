"""Which rank all others wait for, by when each came to the same collectives, and how long a step takes. Pure.

`compare` joins one reading of all ranks by group and number; `History` keeps what several of them have shown.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from ddplaunch.record.seen import Arrivals
from ddplaunch.system.words import duration

LEAST_STEPS = 20  # that are compared before anything is said
_MOST_STEPS = 800
_WINDOW = 600.0  # seconds; older steps count only as long as there are fewer than LEAST_STEPS
_LEAST_SHARE = 0.05  # of a step, that all wait
_LEAST_LAST = 0.7  # of the steps: of two equal ranks each is the last in half of them
_STANDS = 10  # periods without a collective after which a job makes no steps any more


class Late(Struct, frozen=True, kw_only=True):
    """The last rank to a collective of one step: where it was the latest."""

    step: int  # its number
    rank: int
    seconds: float  # after the median of the others, less what the clocks may be wrong by


class Steps(Struct, frozen=True, kw_only=True):
    """What one reading shows of a group."""

    group: tuple[str, str]  # its name and its ranks
    ranks: int  # that were compared
    length: int  # collectives of a step
    period: float  # seconds of a step
    newest: int  # number of a collective
    newest_at: float  # seconds of the clock that the times are brought to
    late: tuple[Late, ...]  # by step


class Straggler(Struct, frozen=True, kw_only=True):
    """A rank that most steps wait for."""

    rank: int
    host: str = ""
    last_in: float  # share of the steps
    steps: int
    seconds: float  # after the median of the others
    share: float  # of a step

    def __str__(self) -> str:
        on = f" on {self.host}" if self.host else ""
        return (
            f"rank {self.rank}{on} came last to the collectives in {self.last_in:.0%} of the last {self.steps} steps, "
            f"{duration(self.seconds)} after the median rank: {self.share:.0%} of a step"
        )


class Clock(Struct, frozen=True, kw_only=True):
    """How the times of a node are brought to one clock."""

    ahead: int  # nanoseconds to be subtracted
    error: int = 0  # nanoseconds that this may be wrong by


def compare(found: Iterable[Arrivals], clocks: Mapping[int, Clock]) -> list[Steps]:
    """Compare when ranks came to the same collectives; `clocks` are those of their nodes, by rank."""
    groups: dict[tuple[str, str], dict[int, Arrivals]] = {}
    for each in sorted(found, key=lambda each: each.rank):
        if each.length:
            groups.setdefault((each.group, each.members), {})[each.rank] = each
    return [_compared(group, ranks, clocks) for group, ranks in groups.items()]


def _compared(group: tuple[str, str], ranks: Mapping[int, Arrivals], clocks: Mapping[int, Clock]) -> Steps:
    """Return the steps of a group, with the rank that came last in each and by how many seconds."""
    times = {rank: {number: at - clocks[rank].ahead for number, at in each.calls} for rank, each in ranks.items()}
    common = sorted(set.intersection(*map(set, times.values())))
    length = Counter(each.length for each in ranks.values()).most_common(1)[0][0]
    newest_at = max((each.newest_at - clocks[rank].ahead) / 1e9 for rank, each in ranks.items())
    period = middle(each.period for each in ranks.values())
    steps = Steps(
        group=group,
        ranks=len(ranks),
        length=length,
        period=period,
        newest=max(each.newest for each in ranks.values()),
        newest_at=newest_at,
        late=(),
    )
    if len(ranks) < 2 or not common:
        return steps
    latest: dict[int, Late] = {}
    for number in common:
        came = sorted((of_rank[number], rank) for rank, of_rank in times.items())
        (at, rank), others = came[-1], came[:-1]
        median, other = others[len(others) // 2]
        seconds = (at - median - max(clocks[rank].error, clocks[other].error)) / 1e9
        late = Late(step=number // length, rank=rank, seconds=max(0.0, seconds))
        if late.step not in latest or late.seconds > latest[late.step].seconds:
            latest[late.step] = late
    latest.pop((common[-1] + 1) // length, None)  # it is not complete
    return replace(steps, late=tuple(latest.values()))


class History:
    """The steps of one generation, reading after reading."""

    def __init__(self) -> None:
        self._late: dict[tuple[str, str], deque[tuple[float, Late]]] = {}
        self._known: dict[tuple[str, str], Steps] = {}
        self._read: dict[tuple[str, str], float] = {}  # when, the last time
        self._read_at = 0.0

    def add(self, read: Sequence[Steps], at: float) -> None:
        """Add a reading; steps that an earlier reading has shown are not added again."""
        self._read_at = at
        for steps in read:
            before, self._known[steps.group] = self._known.get(steps.group), steps
            kept = self._late.setdefault(steps.group, deque(maxlen=_MOST_STEPS))
            if before is None or steps.newest < before.newest or steps.length != before.length:
                kept.clear()  # a group that was made again counts from the start; a step may be something else now
            last = kept[-1][1].step if kept else -1
            kept.extend((at, late) for late in steps.late if late.step > last)
            while len(kept) > LEAST_STEPS and kept[0][0] < at - _WINDOW:
                kept.popleft()
            self._read[steps.group] = at
        for group in [group for group, read_at in self._read.items() if read_at < at - _WINDOW]:
            del self._read[group], self._known[group], self._late[group]

    @property
    def straggler(self) -> Straggler | None:
        """The rank that costs most, if any costs as much as is worth a word."""
        found = [one for group in self._known if (one := self._of_group(group)) is not None]
        return max(found, key=lambda one: one.share, default=None)

    def _of_group(self, group: tuple[str, str]) -> Straggler | None:
        """Return the rank that came last in most steps of a group, if it costs enough time; else None."""
        late = [each for _, each in self._late[group]]
        period = self._known[group].period
        if len(late) < LEAST_STEPS or period <= 0:
            return None
        rank, last = Counter(each.rank for each in late).most_common(1)[0]
        # where another was the last it may have been late too, but that is not known
        seconds = middle(each.seconds if each.rank == rank else 0.0 for each in late)
        if last < _LEAST_LAST * len(late) or seconds < _LEAST_SHARE * period:
            return None
        return Straggler(
            rank=rank, last_in=last / len(late), steps=len(late), seconds=seconds, share=min(1.0, seconds / period)
        )

    @property
    def pace(self) -> float | None:
        """Steps in a second, by the largest group; None where none are made, or none are known."""
        largest = self._largest
        return None if largest is None else 1 / largest.period

    @property
    def steps(self) -> int | None:
        """About how many steps that group had made at the last reading: its collectives by those of a step."""
        largest = self._largest
        return None if largest is None else largest.newest // largest.length

    @property
    def _largest(self) -> Steps | None:
        """The largest group that makes steps."""
        going = [
            steps
            for steps in self._known.values()
            if steps.period > 0 and self._read_at - steps.newest_at <= _STANDS * steps.period
        ]
        return max(going, key=lambda steps: (steps.ranks, steps.newest), default=None)


def middle(values: Iterable[float]) -> float:
    """The median, of an even number the larger one of two; `statistics` takes 10 ms to import."""
    ordered = sorted(values)
    return ordered[len(ordered) // 2]
