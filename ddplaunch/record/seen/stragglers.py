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
LEAST_LAST_IN = 0.7  # of the steps: of two equal ranks each is the last in half of them
_STANDS_AFTER = 10  # periods without a collective after which a job makes no steps any more


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
    """Return the steps of a group, with the rank that came last in each and by how many seconds.

    A step has several collectives: the one counts whose last rank was the latest. All ranks' times are brought to one clock.
    """
    # by rank and number: nanoseconds of one clock
    times = {rank: {number: at - clocks[rank].ahead for number, at in each.calls} for rank, each in ranks.items()}
    common_numbers = sorted(set.intersection(*map(set, times.values())))
    length = Counter(each.length for each in ranks.values()).most_common(1)[0][0]  # of a step, in collectives
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
    if len(ranks) < 2 or not common_numbers:
        return steps
    latest: dict[int, Late] = {}  # by step
    for number in common_numbers:
        *others, (at, rank) = sorted((of_rank[number], rank) for rank, of_rank in times.items())
        median_at, median_rank = others[len(others) // 2]
        error = max(clocks[rank].error, clocks[median_rank].error)
        seconds = (at - median_at - error) / 1e9  # at least so late, whatever the clocks are wrong by
        late = Late(step=number // length, rank=rank, seconds=max(0.0, seconds))
        if late.step not in latest or late.seconds > latest[late.step].seconds:
            latest[late.step] = late
    # of the newest step more collectives may come; if the last one ended a step, this is the next, of which there is none
    incomplete_step = (common_numbers[-1] + 1) // length
    latest.pop(incomplete_step, None)
    return replace(steps, late=tuple(latest.values()))


class _Known(Struct):
    """What readings have shown of one group."""

    latest: Steps  # by the last reading that had the group
    read_at: float  # when that was
    late: deque[tuple[float, Late]]  # by step, each with the time of the reading that showed the step first


class History:
    """The steps of one generation, reading after reading; all times are seconds of one clock."""

    def __init__(self) -> None:
        self._groups: dict[tuple[str, str], _Known] = {}
        self._read_at = 0.0  # when the last reading was

    def add(self, read: Sequence[Steps], at: float) -> None:
        """Add a reading; steps that an earlier reading has shown are not added again."""
        self._read_at = at
        for steps in read:
            known = self._groups.get(steps.group)
            if known is None or steps.newest < known.latest.newest or steps.length != known.latest.length:
                # a group that was made again counts from the start, and collectives of another step are not compared
                known = self._groups[steps.group] = _Known(steps, at, deque(maxlen=_MOST_STEPS))
            known.latest, known.read_at = steps, at
            last_step = known.late[-1][1].step if known.late else -1
            known.late.extend((at, late) for late in steps.late if late.step > last_step)
            while len(known.late) > LEAST_STEPS and known.late[0][0] < at - _WINDOW:
                known.late.popleft()
        self._groups = {group: known for group, known in self._groups.items() if known.read_at >= at - _WINDOW}

    @property
    def straggler(self) -> Straggler | None:
        """The rank that costs most, if any costs as much as is worth a word."""
        found = [one for known in self._groups.values() if (one := _straggler_of(known)) is not None]
        return max(found, key=lambda one: one.share, default=None)

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
            for steps in (known.latest for known in self._groups.values())
            if steps.period > 0 and self._read_at - steps.newest_at <= _STANDS_AFTER * steps.period
        ]
        return max(going, key=lambda steps: (steps.ranks, steps.newest), default=None)


def _straggler_of(known: _Known) -> Straggler | None:
    """Return the rank that came last in most steps of a group, if it costs enough time; else None."""
    late = [each for _, each in known.late]
    period = known.latest.period
    if len(late) < LEAST_STEPS or period <= 0:
        return None
    rank, times_last = Counter(each.rank for each in late).most_common(1)[0]
    # a step in which another rank was the last counts as none: how late this rank was then is not known
    seconds = middle(each.seconds if each.rank == rank else 0.0 for each in late)
    last_in = times_last / len(late)
    if last_in < LEAST_LAST_IN or seconds < _LEAST_SHARE * period:
        return None
    return Straggler(rank=rank, last_in=last_in, steps=len(late), seconds=seconds, share=min(1.0, seconds / period))


def middle(values: Iterable[float]) -> float:
    """The median, of an even number the larger one of two; `statistics` takes 10 ms to import."""
    ordered = sorted(values)
    return ordered[len(ordered) // 2]
