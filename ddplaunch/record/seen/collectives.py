"""Who waits in which collective for whom: what the recorders of all ranks tell, joined by group and number. Pure.

Collectives of a group are numbered, and all its ranks have to call the same ones in the same order. So a rank that has not
reached the number that others wait in is the one that they wait for, and two that differ about a number explain a hang too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from msgspec import Struct

from ddplaunch.record.seen import NOT_BEGUN, Call, Group, Sample, Whereabouts
from ddplaunch.record.seen.merge import is_waiting, merge, own_location, where
from ddplaunch.record.seen.reasons import reasons, sentences_on_ended_children
from ddplaunch.system.words import these_ranks

# whose tensors have equal sizes on all ranks; of others, such as gather, scatter and all_to_all, they may differ
_OPERATIONS_OF_EQUAL_SIZES = {
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather",
    "_all_gather_base",
    "reduce_scatter",
    "_reduce_scatter_base",
}
_DISAGREE = "the ranks disagree"
_DEADLOCK = "deadlock"
_MOST_NAMED = 16  # groups, or locations, that are named
_MOST_RAS_LINES = 80  # of RAS


class Wait(Struct, frozen=True, kw_only=True):
    """The oldest collective of a group in which some rank waits."""

    name: str  # of the group
    operation: str  # "all_reduce"
    number: int
    waiting: tuple[int, ...]
    missing: tuple[int, ...]  # members that have not reached it

    @property
    def collective(self) -> str:
        """Name the collective: "all_reduce #412"."""
        return f"{self.operation} #{self.number}"


def explain(samples: Iterable[Sample], cwd: str) -> list[str]:
    """Say in sentences who waits for whom; nothing where no rank waits in a collective. Paths are shown relative to `cwd`."""
    return _Joined(samples, cwd).explain()


def waits(samples: Iterable[Sample]) -> list[Wait]:
    """Return in which collectives ranks wait."""
    return _Joined(samples, "").waits


class _Explained(NamedTuple):
    """Lines about one wait, and the ranks whose location these lines name."""

    lines: list[str]
    located: frozenset[int]


class _Joined:
    """What the recorders of all ranks told at one moment, joined by group: who waits in which collective, and sentences on it."""

    def __init__(self, samples: Iterable[Sample], cwd: str) -> None:
        """Join the samples of workers; children of workers are in no group."""
        self._cwd = cwd
        self._samples = {sample.rank: sample for sample in samples if not sample.child}
        found: dict[str, dict[int, Group]] = {}
        for rank, sample in sorted(self._samples.items()):  # one pass: thousands of ranks have thousands of groups
            for group in sample.groups or ():
                found.setdefault(group.name, {})[rank] = group
        # what each rank tells of a group, by the group's name; group 2 comes before group 10
        self._groups = dict(sorted(found.items(), key=lambda item: (len(item[0]), item[0])))
        self.waits = [wait for name in self._groups if (wait := self._wait(name)) is not None]

    def explain(self) -> list[str]:
        """Say who waits for whom: a deadlock first, then each group, then sends and receives."""
        lines = [line for wait in self.waits[:_MOST_NAMED] for line in self._explained(wait).lines]
        return [*self._cycle(), *lines, *self._point_to_point()]

    def awaited(self) -> tuple[frozenset[int], str]:
        """Return the ranks that others wait for while they are in no collective themselves, and a sentence; "" for none."""
        waiting = {rank for wait in self.waits for rank in wait.waiting}
        for wait in self.waits:
            if free := [rank for rank in wait.missing if rank not in waiting]:
                what = f"{self._call_text(wait.waiting[0], wait)} of {self._group_text(wait.name)}"
                has, verb = "has" if len(free) == 1 else "have", "waits" if len(wait.waiting) == 1 else "wait"
                text = f"{these_ranks(free)} {has} not reached {what}, in which {these_ranks(wait.waiting)} {verb}"
                return frozenset(free), text
        return frozenset(), ""

    def at_the_end(self) -> list[str]:
        """Say where the ranks were when they had to end, and who waited for whom; each rank's location once."""
        explained = [self._explained(wait, located=True) for wait in self.waits[:_MOST_NAMED]]
        already_located = frozenset[int]().union(*(each.located for each in explained))
        elsewhere: dict[tuple[str, str], list[int]] = {}  # ranks, by their state and location
        for sample in self._samples.values():
            # by a stack, or by a sentence in place of one: "its script has ended"
            is_known = bool(sample.main or sample.state)
            if is_known and sample.rank not in already_located:
                elsewhere.setdefault((sample.state, where(sample, self._cwd)), []).append(sample.rank)
        locations = [
            these_ranks(who) + (f": {state}" if state else f" {'was' if len(who) == 1 else 'were'} in {text}")
            for (state, text), who in list(elsewhere.items())[:_MOST_NAMED]
        ]
        if more := [rank for who in list(elsewhere.values())[_MOST_NAMED:] for rank in who]:
            locations.append(f"{these_ranks(more)} {'was' if len(more) == 1 else 'were'} elsewhere")
        lines = [line for each in explained for line in each.lines]
        return [*locations, *self._cycle(), *lines, *self._point_to_point()]

    def _wait(self, name: str) -> Wait | None:
        """Return who waits in the first unfinished call of a group, and who has not come to that call; None if nobody waits."""
        of_rank = self._groups[name]
        pending = {rank: call for rank, group in of_rank.items() for call in _first_pending(group)}
        if not pending:
            return None
        number = min(call.number for call in pending.values())
        waiting = tuple(rank for rank, call in pending.items() if call.number == number)
        missing = tuple(rank for rank in _members(of_rank) if self._has_not_reached(number, rank, of_rank.get(rank)))
        operation = pending[waiting[0]].operation
        return Wait(name=name, operation=operation, number=number, waiting=waiting, missing=missing)

    def _has_not_reached(self, number: int, rank: int, group: Group | None) -> bool:
        """Whether a rank is known not to have called this collective; `group` is what it tells of the group, None for nothing."""
        if rank not in self._samples:
            return False
        last = max((call.number for call in _calls(group)), default=0) if group is not None else 0
        # a rank of which torch tells nothing may have called anything, unless it has ended
        tells_all = self._samples[rank].groups is not None or self._samples[rank].ended
        return last < number and tells_all

    def _explained(self, wait: Wait, *, located: bool = False) -> _Explained:
        """Explain one wait: who is in it, or who called what under its number, and what the missing ranks do instead.

        With `located` the lines also say where the waiting ranks are, if all are at one location.
        """
        of_rank = self._groups[wait.name]
        calls = {rank: call for rank, group in of_rank.items() for call in _calls(group) if call.number == wait.number}
        group, located_ranks = self._group_text(wait.name), set[int]()
        if kinds := _differences(calls):
            called = "; ".join(f"{these_ranks(who)} called {text}" for text, who in kinds)
            lines = [f"{_DISAGREE} about collective #{wait.number} of {group}: {called}"]
        else:
            locations = {own_location(self._samples[rank], self._cwd) for rank in wait.waiting} if located else set()
            here = ""
            if len(locations) == 1:
                here = f", {locations.pop()}"
                located_ranks.update(wait.waiting)
            verb = "waits" if len(wait.waiting) == 1 else "wait"
            call = self._call_text(wait.waiting[0], wait)
            lines = [f"{these_ranks(wait.waiting)} {verb} in {call} of {group}{here}"]
        by_text: dict[str, list[int]] = {}
        for rank in wait.missing:
            by_text.setdefault(self._what_instead(rank, wait), []).append(rank)
        for text, who in list(by_text.items())[:_MOST_NAMED]:
            if len(who) > 1:
                they = self._what_instead(who[0], wait, many=True)
                lines.append(f"  {these_ranks(who)} have not reached it: {they}")
            else:
                lines.append(f"  {these_ranks(who)} has not reached it: {text}")
            located_ranks.update(who)
        return _Explained(lines, frozenset(located_ranks))

    def _what_instead(self, rank: int, wait: Wait, *, many: bool = False) -> str:
        """Say what a missing rank, or `many` like it, did last in the group, and where the rank is: "it has ended"."""
        it_has, it_is, it_waits, its = (
            ("they have", "they are", "they wait", "their") if many else ("it has", "it is", "it waits", "its")
        )
        sample, group = self._samples[rank], self._groups[wait.name].get(rank)
        if sample.ended:
            return f"{it_has} ended"
        last = f"{it_has} called none of this group"
        if group is not None and (calls := _calls(group)):
            done = "completed" if calls[-1].done else "not completed"
            last = f"{its} last was {calls[-1].operation} #{calls[-1].number}, {done}"
        other = next((one for one in self.waits if one.name != wait.name and rank in one.waiting), None)
        if other is None:
            return f"{last}; {it_is} in {where(sample, self._cwd)}"
        call = self._call_text(rank, other)
        return f"{last}; {it_waits} in {call} of group {other.name}, {own_location(sample, self._cwd)}"

    def _call_text(self, rank: int, wait: Wait) -> str:
        """Write the call that a rank waits in."""
        return _numbered(next(call for call in _calls(self._groups[wait.name][rank]) if call.number == wait.number))

    def _group_text(self, name: str) -> str:
        """Write a group: "group 1 (tensor parallel, ranks 0-3)"; ranks are named where they are not all."""
        of_rank = self._groups[name].values()
        title = next((group.title for group in of_rank if group.title), "")
        members = next((group.ranks for group in of_rank if group.members), [])
        facts = [title] if title else []
        if members and len(members) < len(self._samples):
            facts.append(these_ranks(members))
        return f"group {name}" + (f" ({', '.join(facts)})" if facts else "")

    def _cycle(self) -> list[str]:
        """Return a sentence on ranks that wait for each other in a circle, each in another group; [] if there are none."""
        waits = {rank: wait for wait in self.waits for rank in wait.waiting if wait.missing}
        lead_to_no_circle: set[int] = set()
        for start in sorted(waits):
            path: dict[int, None] = {}  # in order: each waits for the next
            rank: int | None = start
            while rank is not None and rank not in lead_to_no_circle and rank not in path:
                path[rank] = None
                rank = next((missing for missing in waits[rank].missing if missing in waits), None)
            if rank in path:
                circle = [*path][[*path].index(rank) :]
                steps = (
                    f"rank {one} for rank {other} in group {waits[one].name}"
                    for one, other in zip(circle, [*circle[1:], circle[0]], strict=True)
                )
                return [f"{_DEADLOCK}: each waits for the next: {', '.join(steps)}"]
            lead_to_no_circle.update(path)
        return []

    def _point_to_point(self) -> list[str]:
        """Return lines about unfinished sends and receives of NCCL, the first one of each rank and group; gloo records none."""
        pending: dict[str, list[int]] = {}
        for rank, sample in sorted(self._samples.items()):
            for group in sample.groups or ():
                first = next((call for call in group.calls if call.is_p2p and not call.done), None)
                if first is not None:
                    pending.setdefault(f"{_numbered(first)} of group {group.name}", []).append(rank)
        return [
            f"{these_ranks(who)} wait{'s' if len(who) == 1 else ''} in {text}"
            for text, who in list(pending.items())[:_MOST_NAMED]
        ]


def _calls(group: Group) -> list[Call]:
    return [call for call in group.calls if not call.is_p2p]


def _first_pending(group: Group) -> list[Call]:
    return [call for call in _calls(group) if not call.done][:1]


def _members(of_rank: dict[int, Group]) -> list[int]:
    # ranks that agree, as they should, are read once
    distinct = {group.members: group for group in of_rank.values()}
    return sorted(set(of_rank).union(*(group.ranks for group in distinct.values())))


def _differences(calls: dict[int, Call]) -> list[tuple[str, list[int]]]:
    """Return what was called under one number, and by which ranks; [] if all ranks called the same."""
    kinds: dict[tuple[str, ...], list[int]] = {}
    for rank, call in calls.items():
        sizes = (call.inputs, call.outputs) if call.operation in _OPERATIONS_OF_EQUAL_SIZES else ()
        kinds.setdefault((call.operation, *sizes), []).append(rank)
    if len(kinds) < 2:
        return []
    return [
        (_with_tensors(calls[who[0]].operation, calls[who[0]]), who)
        for who in sorted(kinds.values(), key=lambda who: (-len(who), who))
    ]


def _numbered(call: Call) -> str:
    """Write a call: "broadcast #412 (float32 [4096, 4096])"."""
    return _with_tensors(f"{call.operation} #{call.number}", call)


def _with_tensors(what: str, call: Call) -> str:
    tensors = call.inputs or call.outputs
    return f"{what} ({tensors})" if tensors else what


def describe_end(samples: Sequence[Sample], cwd: str, *, of_hang: bool, ended: Collection[int] = ()) -> Whereabouts:
    """Return what `describe` gives of a job that hangs; of others who waited for whom, and who was where.

    Of the ranks that `ended` by themselves the failure summary says how: where they were while they ended explains nothing.
    """
    if of_hang:
        return describe(samples, cwd)
    # NOT_BEGUN says only that our handler of stacks is not there, which is so at the end of a process, too
    alive = [sample for sample in samples if not (sample.ended or sample.child or sample.state == NOT_BEGUN)]
    others = [sample for sample in alive if sample.rank not in ended]
    locations = tuple(_Joined(others, cwd).at_the_end())
    return Whereabouts(explanation=describe(others, cwd).explanation, locations=locations)


def describe(samples: Sequence[Sample], cwd: str) -> Whereabouts:
    """Return why the workers of a hanging job may hang, where they are, and for whom they wait.

    The first sentence is about the ranks that others wait for, else about the first wait, else the first thing a rank printed.
    """
    workers = [sample for sample in samples if not (sample.child or sample.ended)]
    joined = _Joined(samples, cwd)
    waits, printed = joined.explain(), reasons(samples, cwd)
    is_explained = bool(printed) or any(line.startswith((_DISAGREE, _DEADLOCK)) for line in waits)
    awaited, what = joined.awaited()
    if not what and waits:
        what = waits[0]
    elif not what:
        # torch does not number the collectives, but the stacks show who is in one
        waiting = {sample.rank for sample in workers if is_waiting(sample)}
        awaited = frozenset(sample.rank for sample in workers) - waiting
        if awaited and waiting:
            are, wait = "is" if len(awaited) == 1 else "are", "waits" if len(waiting) == 1 else "wait"
            what = f"{these_ranks(awaited)} {are} in no collective, {these_ranks(waiting)} {wait} in one"
        elif printed:
            what, *printed = printed
    groups = sorted(merge(workers), key=lambda group: awaited.isdisjoint(group.ranks))
    locations = (f"{group.who}: {where(group.samples[0], cwd)}" for group in groups[:_MOST_NAMED])
    facts = (*printed, *locations, *sentences_on_ended_children(samples), *waits, *lines_of_nccl_ras(samples))
    return Whereabouts(explanation=what, locations=facts, awaited=tuple(sorted(awaited)), is_explained=is_explained)


def lines_of_nccl_ras(samples: Sequence[Sample]) -> list[str]:
    """Return what NCCL's RAS service says of the whole job, if a worker listens for it."""
    asked = next((sample for sample in samples if sample.ras), None)
    if asked is None:
        return []
    lines = [line.rstrip() for line in asked.ras.splitlines() if line.strip()][:_MOST_RAS_LINES]
    return [f"NCCL's RAS service, asked at rank {asked.rank}:", *(f"  {line}" for line in lines)]
