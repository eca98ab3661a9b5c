"""Finds where ranks disagree about their collectives: the first call at which the job would stand still. Pure.

The job is replayed from what each rank has noted: a collective of a group is done once all checked members of the group have
come to it, and each rank does one after the other. Where nothing goes on any more, the ranks disagree. A rank whose check ended
early, at a save say, is not waited for. Sends and receives do not hold their ranks up, and are paired.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple

from msgspec import Struct

from ddplaunch.record.seen.merge import own_frame
from ddplaunch.record.seen.stack import location
from ddplaunch.spec.outcome import Frame
from ddplaunch.system.words import these_ranks
from ddplaunch.tools.check.notes import P2P, Call, Trace

_MOST_MISMATCHES = 8  # disagreements that are named
_MOST_SIDES = 6  # of each
_LONGEST_LIST = 30  # characters of a list of ranks


class Side(Struct, frozen=True, kw_only=True):
    """Ranks that did the same."""

    ranks: tuple[int, ...]
    does: str  # "calls all_reduce (float32 [4096])", "ends in step 2"
    where: str = ""  # "train.py:88 in train"


class Mismatch(Struct, frozen=True, kw_only=True):
    """Something about which ranks disagree: what each side of them does."""

    step: int  # of the rank that has come least far
    group: str  # "group 3 (tp, ranks 0-7)"; "" for the group of all ranks, and where several groups or none are meant
    sides: tuple[Side, ...]

    @property
    def text(self) -> str:
        """Return the mismatch as text: "step 1: rank 0 calls all_reduce (float32 [8]), rank 1 ends in step 2: train.py:88"."""
        shown, others = self.sides[:_MOST_SIDES], self.sides[_MOST_SIDES:]
        locations = {side.where for side in shown if side.where}
        parts = []
        for side in shown:
            at = f" at {side.where}" if side.where and len(locations) > 1 else ""
            parts.append(f"{these_ranks(side.ranks)} {_does_in_singular_or_plural(side)}{at}")
        number = sum(len(side.ranks) for side in others)
        more = f", {number} others do something else" if number else ""
        group = f"in {self.group}, " if self.group else ""
        only_location = f": {locations.pop()}" if len(locations) == 1 else ""
        return f"step {self.step}: {group}{', '.join(parts)}{more}{only_location}"


def _does_in_singular_or_plural(side: Side) -> str:
    """Return what the ranks of a side do, with the verb of one rank or of several: "calls ..." or "call ..."."""
    verb, _, rest = side.does.partition(" ")
    return f"{verb.removesuffix('s')} {rest}" if len(side.ranks) > 1 else side.does


class Compared(Struct, frozen=True, kw_only=True):
    """What a comparison found."""

    mismatches: tuple[Mismatch, ...]
    calls: int  # collectives that were done by all checked members of their group, two or more
    groups: int  # in which these were
    uncompared: tuple[tuple[int, ...], ...]  # the members of groups of which one rank was checked


class _GroupId(NamedTuple):
    """A process group. Its name alone does not tell it: ranks that make different groups may give these the same name."""

    name: str  # torch's
    members: tuple[int, ...]


def compare(traces: Sequence[Trace], cwd: str) -> Compared:
    """Return where these ranks disagree about their collectives, the earliest first; paths are relative to `cwd`."""
    replay = _Replay(traces, cwd)
    done_by_group = replay.play()
    found = [*replay.find_stuck(), *_unpaired_sends_and_receives(traces, cwd)]
    groups = {replay.group_of(trace, call) for trace in traces for call in trace.calls}
    of_one_checked = [group for group in groups if len(group.members) > 1 and len(replay.checked_members(group)) == 1]
    return Compared(
        mismatches=tuple(sorted(found, key=lambda one: one.step)[:_MOST_MISMATCHES]),
        calls=sum(done_by_group.values()),
        groups=len(done_by_group),
        uncompared=tuple(sorted({group.members for group in of_one_checked})),
    )


class _Replay:
    """Has the checked ranks do the collectives that they have noted, as in the job, until none can go on."""

    def __init__(self, traces: Sequence[Trace], cwd: str) -> None:
        self._cwd = cwd
        self._traces = {trace.rank: trace for trace in traces}
        self._calls = {trace.rank: [call for call in trace.calls if call.operation not in P2P] for trace in traces}
        self._position = dict.fromkeys(self._traces, 0)  # by rank: the index of the call at which it stands
        self._checked: dict[_GroupId, tuple[int, ...]] = {}  # cache of `checked_members`

    def group_of(self, trace: Trace, call: Call) -> _GroupId:
        """Return which group a call is for."""
        group = trace.groups.get(call.group)
        return _GroupId(call.group, group.members if group is not None else (trace.rank,))

    def checked_members(self, group: _GroupId) -> tuple[int, ...]:
        """Return the members of a group that are checked."""
        if group not in self._checked:
            members = set(group.members)
            self._checked[group] = tuple(rank for rank in self._traces if rank in members)
        return self._checked[group]

    def _next_call(self, rank: int) -> Call | None:
        """Return the call at which a rank stands; None if it makes no more."""
        calls, position = self._calls[rank], self._position[rank]
        return calls[position] if position < len(calls) else None

    def _call_of(self, rank: int) -> Call:
        """Return the call at which a rank stands, which makes one."""
        call = self._next_call(rank)
        assert call is not None
        return call

    def _is_at(self, rank: int, group: _GroupId) -> bool:
        call = self._next_call(rank)
        return call is not None and self.group_of(self._traces[rank], call) == group

    def _is_known_elsewhere(self, rank: int) -> bool:
        """Return whether a rank that is not at a group's call is known to do something else: another call, or none any more.

        What a rank would do whose check ended early is not known.
        """
        return self._next_call(rank) is not None or self._traces[rank].is_complete

    def play(self) -> Mapping[_GroupId, int]:
        """Let the ranks do every collective on which its members agree; return how many each group did.

        Only collectives of two or more checked ranks are counted.
        """
        done: dict[_GroupId, int] = defaultdict(int)
        to_look_at = set(self._traces)  # ranks that may be able to go on by now
        while to_look_at:
            rank = min(to_look_at)
            to_look_at.discard(rank)
            call = self._next_call(rank)
            if call is None:
                continue
            group = self.group_of(self._traces[rank], call)
            here = [one for one in self.checked_members(group) if self._is_at(one, group)]
            # a rank whose check ended early may have come here as well, and is not waited for
            elsewhere = [
                one for one in self.checked_members(group) if one not in here and self._is_known_elsewhere(one)
            ]
            agree = len({self._call_of(one).text for one in here}) == 1
            if elsewhere or not agree:
                continue
            for one in here:
                self._position[one] += 1
            # a rank that makes no more calls holds up no group any longer, so look at all ranks again
            has_one_ended = any(self._next_call(one) is None for one in here)
            to_look_at.update(self._traces if has_one_ended else here)
            if len(here) > 1:
                done[group] += 1
        return done

    def find_stuck(self) -> list[Mismatch]:
        """Return why ranks stand at a collective after `play`.

        Members call something else, or nothing more. If that is so nowhere, each group waits for a rank that waits for another
        group, in a circle.
        """
        waiting: dict[_GroupId, list[int]] = {}
        for rank in self._traces:
            call = self._next_call(rank)
            if call is not None:
                waiting.setdefault(self.group_of(self._traces[rank], call), []).append(rank)
        different, ended = [], []
        for group, ranks in waiting.items():
            name = self._name_of_group(group, ranks[0])
            sides = list(self._sides_at_calls(ranks))
            # members that make no more calls; what one would do whose check ended early is not known
            finished = [
                rank
                for rank in self.checked_members(group)
                if self._next_call(rank) is None and self._traces[rank].is_complete
            ]
            if len({side.does for side in sides}) > 1:
                different.append(self._mismatch(ranks, name, sides))
            elif finished:
                ended.append(self._mismatch(ranks, name, [*sides, *self._sides_of_ended(finished)]))
        if different or ended or not waiting:
            return [*different, *ended]
        everyone = sorted(rank for ranks in waiting.values() for rank in ranks)
        return [self._mismatch(everyone, "", list(self._sides_at_calls(everyone, with_group=True)))]

    def _mismatch(self, ranks: Sequence[int], group: str, sides: Sequence[Side]) -> Mismatch:
        step = min(self._call_of(rank).step for rank in ranks)
        return Mismatch(step=step, group=group, sides=tuple(sides))

    def _sides_at_calls(self, ranks: Sequence[int], *, with_group: bool = False) -> Iterator[Side]:
        """Yield what ranks that stand at a call do there, those together that do the same at the same line."""
        ranks_by_call: dict[tuple[str, str], list[int]] = {}
        for rank in ranks:
            call = self._call_of(rank)
            does = f"calls {call.text}"
            if with_group:
                does += f" of {self._name_of_group(self.group_of(self._traces[rank], call), rank) or 'all ranks'}"
            ranks_by_call.setdefault((does, where(call.frames, self._cwd)), []).append(rank)
        for (does, line_of_program), who in ranks_by_call.items():
            yield Side(ranks=tuple(who), does=does, where=line_of_program)

    def _sides_of_ended(self, ranks: Sequence[int]) -> Iterator[Side]:
        """Yield how ranks ended that make no more calls, those together that ended in the same way."""
        ranks_by_end: dict[str, list[int]] = {}
        for rank in ranks:
            trace = self._traces[rank]
            does = f"has done step {trace.steps}" if trace.end == "steps" else _ended(trace)
            ranks_by_end.setdefault(does, []).append(rank)
        for does, who in ranks_by_end.items():
            yield Side(ranks=tuple(who), does=does)

    def _name_of_group(self, group: _GroupId, rank: int) -> str:
        """Name a group of this rank; "" for that of all ranks."""
        of_rank = self._traces[rank].groups
        largest = max((len(one.members) for one in of_rank.values()), default=0)
        if len(group.members) == largest:
            return ""
        found = of_rank.get(group.name)
        title = f"{found.title}, " if found is not None and found.title else ""
        return f"group {group.name} ({title}{in_short(group.members)})"


def in_short(members: Sequence[int]) -> str:
    """Name the ranks of a group: "ranks 0-7"; of many that are no range, "64 ranks from 0 to 504"."""
    text = these_ranks(members)
    return text if len(text) <= _LONGEST_LIST else f"{len(members)} ranks from {members[0]} to {members[-1]}"


def _ended(trace: Trace) -> str:
    return f"ends after step {trace.steps}" if trace.steps else "ends before a step"


class _Route(NamedTuple):
    """Sends and receives on the same route are paired in their order."""

    sender: int
    receiver: int
    group: str
    tag: int


def _unpaired_sends_and_receives(traces: Sequence[Trace], cwd: str) -> Iterator[Mismatch]:
    """Yield, for each two checked ranks, the first send or receive without a counterpart of the same tensors.

    A rank that receives from any sender takes sends that nobody can tell from here, so those to it are left out.
    """
    by_rank = {trace.rank: trace for trace in traces}
    takes_any = {trace.rank for trace in traces for call in trace.calls if call.operation == "recv_any_source"}
    sent: dict[_Route, list[Call]] = defaultdict(list)
    received: dict[_Route, list[Call]] = defaultdict(list)
    for trace in traces:
        for call in trace.calls:
            if call.peer is None or call.peer not in by_rank:
                continue
            if call.operation == "send" and call.peer not in takes_any:
                sent[_Route(trace.rank, call.peer, call.group, call.tag)].append(call)
            elif call.operation == "recv" and trace.rank not in takes_any:
                received[_Route(call.peer, trace.rank, call.group, call.tag)].append(call)
    for route in sorted({*sent, *received}):
        for send, receive in zip_longest(sent[route], received[route]):  # None: there are no more
            if send is not None and receive is not None and send.inputs == receive.outputs:
                continue
            ends = (
                _PairEnd(route.sender, send, does="sends", peer=f"to rank {route.receiver}"),
                _PairEnd(route.receiver, receive, does="receives", peer=f"from rank {route.sender}"),
            )
            # a rank whose check ended early might have made the call
            is_certain = all(end.call is not None or by_rank[end.rank].is_complete for end in ends)
            if is_certain:
                yield _mismatch_of_pair(ends, cwd)
            break


class _PairEnd(NamedTuple):
    """One of the two ranks of a send and its receive."""

    rank: int
    call: Call | None  # None: the rank makes no more such calls
    does: str  # "sends"
    peer: str  # "to rank 3"


def _mismatch_of_pair(ends: Sequence[_PairEnd], cwd: str) -> Mismatch:
    """Return the mismatch of two ranks of which one calls no more, or whose calls have different tensors."""
    sides = []
    for end in ends:
        if end.call is None:
            sides.append(Side(ranks=(end.rank,), does=f"{end.does} no more {end.peer}"))
        else:
            tensors = end.call.inputs or end.call.outputs
            does = f"{end.does} {tensors} {end.peer}"
            sides.append(Side(ranks=(end.rank,), does=does, where=where(end.call.frames, cwd)))
    return Mismatch(step=min(end.call.step for end in ends if end.call is not None), group="", sides=tuple(sides))


def where(frames: Sequence[Frame], cwd: str) -> str:
    """Return where in the program's own code a stack is: "train.py:88 in train"; "" for no stack."""
    frame = own_frame(frames)
    return location(frame, cwd) if frame is not None else ""
