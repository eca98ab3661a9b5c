"""Finds where ranks disagree about their collectives: the first call at which the job would stand still. Pure.

The job is played: a collective of a group is done once all checked members of the group have come to it, and each rank does one
after the other. Where nothing goes on any more, the ranks disagree. A rank whose check ended early, at a save say, is not waited
for. Sends and receives do not hold their ranks up, and are paired.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct

from ddplaunch.record.seen.merge import own_frame
from ddplaunch.record.seen.stack import location
from ddplaunch.spec.outcome import Frame
from ddplaunch.system.words import these_ranks
from ddplaunch.tools.check.notes import P2P, Call, Trace

_MOST = 8  # disagreements that are named
_MOST_SIDES = 6  # of each
_LONGEST = 30  # characters


class Side(Struct, frozen=True, kw_only=True):
    """Ranks that did the same."""

    ranks: tuple[int, ...]
    does: str  # "calls all_reduce (float32 [4096])", "ends in step 2"
    where: str = ""  # "train.py:88 in train"


class Mismatch(Struct, frozen=True, kw_only=True):
    """Something about which ranks disagree."""

    step: int
    group: str  # "group 3 (tp, ranks 0-7)"; "" for the group of all ranks
    sides: tuple[Side, ...]

    @property
    def text(self) -> str:
        """Return the mismatch as text: "step 1: rank 0 calls all_reduce (float32 [8]), rank 1 ends in step 2: train.py:88"."""
        shown = self.sides[:_MOST_SIDES]
        places = {side.where for side in shown if side.where}
        said = [
            f"{these_ranks(side.ranks)} {_plural(side)}{f' at {side.where}' if side.where and len(places) > 1 else ''}"
            for side in shown
        ]
        rest = sum(len(side.ranks) for side in self.sides[_MOST_SIDES:])
        more = f", {rest} others do something else" if rest else ""
        where = f": {places.pop()}" if len(places) == 1 else ""
        return f"step {self.step}: {f'in {self.group}, ' if self.group else ''}{', '.join(said)}{more}{where}"


def _plural(side: Side) -> str:
    verb, _, rest = side.does.partition(" ")
    return f"{verb.removesuffix('s')} {rest}" if len(side.ranks) > 1 else side.does


class Compared(Struct, frozen=True, kw_only=True):
    """What a comparison found."""

    mismatches: tuple[Mismatch, ...]
    calls: int  # collectives that were done by all checked members of their group, two or more
    groups: int  # in which these were
    alone: tuple[tuple[int, ...], ...]  # the members of groups of which one rank was checked


_Key = tuple[str, tuple[int, ...]]  # of a group: torch's name, and its members


def compare(traces: Sequence[Trace], cwd: str) -> Compared:
    """Return where these ranks disagree about their collectives, the earliest first; paths are relative to `cwd`."""
    played = _Play(traces, cwd)
    done = played.play()
    found = [*played.stuck(), *_unpaired(traces, cwd)]
    groups = {key for trace in traces for call in trace.calls if (key := played.key(trace, call))}
    return Compared(
        mismatches=tuple(sorted(found, key=lambda one: one.step)[:_MOST]),
        calls=sum(done.values()),
        groups=len(done),
        alone=tuple(sorted({key[1] for key in groups if len(key[1]) > 1 and len(played.checked(key)) == 1})),
    )


class _Play:
    """The job of the checked ranks, each at one of its collectives."""

    def __init__(self, traces: Sequence[Trace], cwd: str) -> None:
        self._cwd = cwd
        self._traces = {trace.rank: trace for trace in traces}
        self._calls = {trace.rank: [call for call in trace.calls if call.operation not in P2P] for trace in traces}
        self._at = dict.fromkeys(self._traces, 0)
        self._checked: dict[_Key, tuple[int, ...]] = {}

    def key(self, trace: Trace, call: Call) -> _Key:
        """Return which group a call is for."""
        group = trace.groups.get(call.group)
        return call.group, group.members if group is not None else (trace.rank,)

    def checked(self, key: _Key) -> tuple[int, ...]:
        """Return the members of a group that are checked."""
        if key not in self._checked:
            members = set(key[1])
            self._checked[key] = tuple(rank for rank in self._traces if rank in members)
        return self._checked[key]

    def head(self, rank: int) -> Call | None:
        """Return the call that a rank is at; None if it makes no more."""
        calls, at = self._calls[rank], self._at[rank]
        return calls[at] if at < len(calls) else None

    def _is_at(self, rank: int, key: _Key) -> bool:
        head = self.head(rank)
        return head is not None and self.key(self._traces[rank], head) == key

    def _is_awaited(self, rank: int) -> bool:
        """Whether it is known that the rank calls something else, or nothing more."""
        return self.head(rank) is not None or self._traces[rank].is_complete

    def play(self) -> Mapping[_Key, int]:
        """Let the ranks do every collective on which its members agree; return the number of each group.

        Only collectives of two or more checked ranks are counted.
        """
        done: dict[_Key, int] = defaultdict(int)
        ready = set(self._traces)
        while ready:
            rank = min(ready)
            ready.discard(rank)
            if (call := self.head(rank)) is None:
                continue
            key = self.key(self._traces[rank], call)
            here = [one for one in self.checked(key) if self._is_at(one, key)]
            missing = [one for one in self.checked(key) if one not in here and self._is_awaited(one)]
            if missing or len({self._head(one).text for one in here}) > 1:
                continue
            for one in here:
                self._at[one] += 1
            # a rank that makes no more calls holds up no group any longer, so look at all ranks again
            ready.update(self._traces if any(self.head(one) is None for one in here) else here)
            if len(here) > 1:
                done[key] += 1
        return done

    def _head(self, rank: int) -> Call:
        head = self.head(rank)
        assert head is not None
        return head

    def stuck(self) -> list[Mismatch]:
        """Return why ranks stand at a collective: members call something else, or nothing more; else each waits for the next."""
        waiting: dict[_Key, list[int]] = {}
        for rank in self._traces:
            if (call := self.head(rank)) is not None:
                waiting.setdefault(self.key(self._traces[rank], call), []).append(rank)
        different, ended = [], []
        for key, ranks in waiting.items():
            missing = [rank for rank in self.checked(key) if rank not in ranks and self._is_awaited(rank)]
            gone = [rank for rank in missing if self.head(rank) is None]
            sides = list(self._sides(ranks))
            step = min(self._head(rank).step for rank in ranks)
            if len({side.does for side in sides}) > 1:
                different.append(Mismatch(step=step, group=self._named(key, ranks[0]), sides=tuple(sides)))
            elif gone:
                sides += self._ends(gone)
                ended.append(Mismatch(step=step, group=self._named(key, ranks[0]), sides=tuple(sides)))
        if different or ended or not waiting:
            return [*different, *ended]
        everyone = sorted(rank for ranks in waiting.values() for rank in ranks)
        sides = list(self._sides(everyone, with_group=True))
        return [Mismatch(step=min(self._head(rank).step for rank in everyone), group="", sides=tuple(sides))]

    def _sides(self, ranks: Sequence[int], *, with_group: bool = False) -> Iterator[Side]:
        found: dict[tuple[str, str], list[int]] = {}
        for rank in ranks:
            call = self._head(rank)
            of = f" of {self._named(self.key(self._traces[rank], call), rank) or 'all ranks'}" if with_group else ""
            found.setdefault((f"calls {call.text}{of}", where(call.frames, self._cwd)), []).append(rank)
        for (does, place), who in found.items():
            yield Side(ranks=tuple(who), does=does, where=place)

    def _ends(self, ranks: Sequence[int]) -> Iterator[Side]:
        found: dict[str, list[int]] = {}
        for rank in ranks:
            trace = self._traces[rank]
            does = f"has done step {trace.steps}" if trace.end == "steps" else _ended(trace)
            found.setdefault(does, []).append(rank)
        for does, who in found.items():
            yield Side(ranks=tuple(who), does=does)

    def _named(self, key: _Key, rank: int) -> str:
        """Name a group; "" for that of all ranks."""
        name, members = key
        trace = self._traces[rank]
        if len(members) == max((len(group.members) for group in trace.groups.values()), default=0):
            return ""
        group = trace.groups.get(name)
        title = f"{group.title}, " if group is not None and group.title else ""
        return f"group {name} ({title}{in_short(members)})"


def in_short(members: Sequence[int]) -> str:
    """Name the ranks of a group: "ranks 0-7"; of many that are no range, "64 ranks from 0 to 504"."""
    text = these_ranks(members)
    return text if len(text) <= _LONGEST else f"{len(members)} ranks from {members[0]} to {members[-1]}"


def _ended(trace: Trace) -> str:
    return f"ends after step {trace.steps}" if trace.steps else "ends before a step"


def _unpaired(traces: Sequence[Trace], cwd: str) -> Iterator[Mismatch]:
    """Yield, for each two checked ranks, the first send or receive without a counterpart of the same tensors."""
    sent: dict[tuple[int, int, str, int], list[Call]] = defaultdict(list)  # by sender, receiver, group and tag
    got: dict[tuple[int, int, str, int], list[Call]] = defaultdict(list)
    takes_any = {trace.rank for trace in traces for call in trace.calls if call.operation == "recv_any_source"}
    by_rank = {trace.rank: trace for trace in traces}
    for trace in traces:
        for call in trace.calls:
            if call.operation == "send" and call.peer in by_rank and call.peer not in takes_any:
                sent[trace.rank, call.peer, call.group, call.tag].append(call)
            elif call.operation == "recv" and call.peer in by_rank and trace.rank not in takes_any:
                got[call.peer, trace.rank, call.group, call.tag].append(call)
    for key in sorted({*sent, *got}):
        source, target = key[:2]
        for at in range(max(len(sent[key]), len(got[key]))):
            one, other = (calls[at] if at < len(calls) else None for calls in (sent[key], got[key]))
            if one is not None and other is not None and one.inputs == other.outputs:
                continue
            ends = ((source, one, f"to rank {target}"), (target, other, f"from rank {source}"))
            if all(call is not None or by_rank[rank].is_complete for rank, call, _ in ends):
                yield _mismatch_of_pair(ends, cwd)
            break


def _mismatch_of_pair(ends: Sequence[tuple[int, Call | None, str]], cwd: str) -> Mismatch:
    """Return the mismatch of two ranks of which one calls no more, or whose calls have different tensors.

    Each end is a rank, its call (None: no more calls) and "to rank 3" or "from rank 3".
    """
    sides = []
    for rank, call, way in ends:
        verb = "sends" if way.startswith("to") else "receives"
        if call is None:
            sides.append(Side(ranks=(rank,), does=f"{verb} no more {way}"))
        else:
            tensors = call.inputs or call.outputs
            sides.append(Side(ranks=(rank,), does=f"{verb} {tensors} {way}", where=where(call.frames, cwd)))
    return Mismatch(step=min(call.step for _, call, _ in ends if call is not None), group="", sides=tuple(sides))


def where(frames: Sequence[Frame], cwd: str) -> str:
    """Return where in the program's own code a stack is: "train.py:88 in train"; "" for no stack."""
    frame = own_frame(frames)
    return location(frame, cwd) if frame is not None else ""
