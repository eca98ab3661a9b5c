"""Who waits in which collective for whom: what the recorders of all ranks tell, joined by group and number. Pure.

Collectives of a group are numbered, and all its ranks have to call the same ones in the same order. So a rank that has not
reached the number that others wait in is the one that they wait for, and two that differ about a number explain a hang too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from msgspec import Struct

from ddplaunch.record.seen import NOT_BEGUN, Call, Group, Sample, Whereabouts
from ddplaunch.record.seen.merge import is_waiting, merge, own_location, where
from ddplaunch.record.seen.reasons import ended_well, reasons
from ddplaunch.system.words import these_ranks

# whose tensors have equal sizes on all ranks; of others, such as gather, scatter and all_to_all, they may differ
_EQUAL_SIZES = {
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
_MOST = 16  # groups, or locations, that are named
_MOST_LINES = 80  # of RAS


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
    """Say in sentences who waits for whom; nothing where no rank waits in a collective."""
    ranks = {sample.rank: sample for sample in samples if not sample.child}
    groups = _groups(ranks)
    waits = _waits(groups, ranks)
    lines = [line for wait in waits[:_MOST] for line in _lines_of(wait, groups, waits, ranks, cwd)[0]]
    return [*_cycle(waits), *lines, *_point_to_point(ranks)]


def awaited(samples: Iterable[Sample]) -> tuple[frozenset[int], str]:
    """Return the ranks that other ranks wait for while they are in no collective, and a sentence about them; "" for none."""
    ranks = {sample.rank: sample for sample in samples if not sample.child}
    groups = _groups(ranks)
    waits = _waits(groups, ranks)
    waiting = {rank for wait in waits for rank in wait.waiting}
    for wait in waits:
        if free := [rank for rank in wait.missing if rank not in waiting]:
            of_rank = groups[wait.name]
            call = next(call for call in _calls(of_rank[wait.waiting[0]]) if call.number == wait.number)
            what = f"{_named(call)} of {_group(wait.name, of_rank, ranks)}"
            has, verb = "has" if len(free) == 1 else "have", "waits" if len(wait.waiting) == 1 else "wait"
            text = f"{these_ranks(free)} {has} not reached {what}, in which {these_ranks(wait.waiting)} {verb}"
            return frozenset(free), text
    return frozenset(), ""


def waits(samples: Iterable[Sample]) -> list[Wait]:
    """Return in which collectives ranks wait."""
    ranks = {sample.rank: sample for sample in samples if not sample.child}
    return _waits(_groups(ranks), ranks)


def _groups(ranks: dict[int, Sample]) -> dict[str, dict[int, Group]]:
    """The groups by name, each by rank; in one pass, for thousands of ranks have thousands of groups."""
    found: dict[str, dict[int, Group]] = {}
    for rank, sample in sorted(ranks.items()):
        for group in sample.groups or ():
            found.setdefault(group.name, {})[rank] = group
    return dict(sorted(found.items(), key=lambda item: (len(item[0]), item[0])))


def _waits(groups: dict[str, dict[int, Group]], ranks: dict[int, Sample]) -> list[Wait]:
    return [wait for name, of_rank in groups.items() if (wait := _wait(name, of_rank, ranks)) is not None]


def _calls(group: Group) -> list[Call]:
    return [call for call in group.calls if not call.is_p2p]


def _wait(name: str, of_rank: dict[int, Group], ranks: dict[int, Sample]) -> Wait | None:
    """Return who waits in the first unfinished call of a group, and who has not come to that call; None if nobody waits."""
    pending = {
        rank: next((call.number for call in _calls(group) if not call.done), None) for rank, group in of_rank.items()
    }
    numbers = [number for number in pending.values() if number is not None]
    if not numbers:
        return None
    number = min(numbers)
    waiting = tuple(rank for rank, at in pending.items() if at == number)
    missing = tuple(rank for rank in _members(of_rank) if _reached(rank, of_rank) < number and _is_known(rank, ranks))
    operation = next(call.operation for call in _calls(of_rank[waiting[0]]) if call.number == number)
    return Wait(name=name, operation=operation, number=number, waiting=waiting, missing=missing)


def _members(of_rank: dict[int, Group]) -> list[int]:
    distinct = {
        group.members: group for group in of_rank.values()
    }  # ranks agree, as they should, and one of them is read
    return sorted(set(of_rank).union(*(group.ranks for group in distinct.values())))


def _reached(rank: int, of_rank: dict[int, Group]) -> int:
    """The number of the last collective that a rank has called."""
    return max((call.number for call in _calls(of_rank[rank])), default=0) if rank in of_rank else 0


def _is_known(rank: int, ranks: dict[int, Sample]) -> bool:
    """Whether it is known of a rank that it has called nothing more: torch tells of it, or it has ended."""
    return rank in ranks and (ranks[rank].groups is not None or ranks[rank].ended)


def _lines_of(
    wait: Wait,
    groups: dict[str, dict[int, Group]],
    waits: Sequence[Wait],
    ranks: dict[int, Sample],
    cwd: str,
    *,
    located: bool = False,
) -> tuple[list[str], frozenset[int]]:
    """Return lines about one wait, and the ranks whose location the lines name; `located`: also where the waiting ranks are."""
    of_rank = groups[wait.name]
    calls = {rank: call for rank, group in of_rank.items() for call in _calls(group) if call.number == wait.number}
    first = calls[wait.waiting[0]]
    group = _group(wait.name, of_rank, ranks)
    verb = "waits" if len(wait.waiting) == 1 else "wait"
    if kinds := _differences(calls):
        called = "; ".join(f"{these_ranks(who)} called {text}" for text, who in kinds)
        lines = [f"{_DISAGREE} about collective #{wait.number} of {group}: {called}"]
        named: set[int] = set()
    else:
        locations = {own_location(ranks[rank], cwd) for rank in wait.waiting} if located else set()
        named = set(wait.waiting) if len(locations) == 1 else set()
        here = f", {locations.pop()}" if named else ""
        lines = [f"{these_ranks(wait.waiting)} {verb} in {_named(first)} of {group}{here}"]
    instead: dict[str, list[int]] = {}
    for rank in wait.missing:
        instead.setdefault(_instead(rank, wait, of_rank, waits, groups, ranks, cwd), []).append(rank)
    for text, who in list(instead.items())[:_MOST]:
        if len(who) > 1:
            they = _instead(who[0], wait, of_rank, waits, groups, ranks, cwd, many=True)
            lines.append(f"  {these_ranks(who)} have not reached it: {they}")
        else:
            lines.append(f"  {these_ranks(who)} has not reached it: {text}")
        named.update(who)
    return lines, frozenset(named)


def _differences(calls: dict[int, Call]) -> list[tuple[str, list[int]]]:
    """What was called under one number, and by whom, where that is not one thing."""
    kinds: dict[tuple[str, ...], list[int]] = {}
    for rank, call in calls.items():
        sizes = (call.inputs, call.outputs) if call.operation in _EQUAL_SIZES else ()
        kinds.setdefault((call.operation, *sizes), []).append(rank)
    if len(kinds) < 2:
        return []
    return [(_call_text(calls[who[0]]), who) for who in sorted(kinds.values(), key=lambda who: (-len(who), who))]


def _call_text(call: Call) -> str:
    tensors = call.inputs or call.outputs
    return f"{call.operation} ({tensors})" if tensors else call.operation


def _named(call: Call) -> str:
    """Write a call: "broadcast #412 (float32 [4096, 4096])"."""
    tensors = call.inputs or call.outputs
    return f"{call.operation} #{call.number}" + (f" ({tensors})" if tensors else "")


def _group(name: str, of_rank: dict[int, Group], ranks: dict[int, Sample]) -> str:
    """Write a group: "group 1 (tensor parallel, ranks 0-3)"; ranks are named where they are not all."""
    title = next((group.title for group in of_rank.values() if group.title), "")
    members = next((group.ranks for group in of_rank.values() if group.members), [])
    facts = [*([title] if title else []), *([these_ranks(members)] if members and len(members) < len(ranks) else [])]
    return f"group {name}" + (f" ({', '.join(facts)})" if facts else "")


def _instead(
    rank: int,
    wait: Wait,
    of_rank: dict[int, Group],
    waits: Sequence[Wait],
    groups: dict[str, dict[int, Group]],
    ranks: dict[int, Sample],
    cwd: str,
    *,
    many: bool = False,
) -> str:
    """Return what a missing rank, or `many` like it, did last in the group, and where the rank is: "it has ended"."""
    it_has, it_is, it_waits, its = (
        ("they have", "they are", "they wait", "their") if many else ("it has", "it is", "it waits", "its")
    )
    if ranks[rank].ended:
        return f"{it_has} ended"
    calls = _calls(of_rank[rank]) if rank in of_rank else []
    if calls:
        done = "completed" if calls[-1].done else "not completed"
        last = f"{its} last was {calls[-1].operation} #{calls[-1].number}, {done}"
    else:
        last = f"{it_has} called none of this group"
    elsewhere = next((one for one in waits if one.name != wait.name and rank in one.waiting), None)
    if elsewhere is None:
        return f"{last}; {it_is} in {where(ranks[rank], cwd)}"
    call = next(call for call in _calls(groups[elsewhere.name][rank]) if call.number == elsewhere.number)
    return f"{last}; {it_waits} in {_named(call)} of group {elsewhere.name}, {own_location(ranks[rank], cwd)}"


def _cycle(waits: Sequence[Wait]) -> list[str]:
    """Find ranks that wait for each other in a circle, each in another group."""
    edges = {rank: (wait.missing, wait.name) for wait in waits for rank in wait.waiting if wait.missing}
    seen: set[int] = set()  # no circle begins there
    for start in sorted(edges):
        path: dict[int, None] = {}  # in order
        rank: int | None = start
        while rank is not None and rank not in seen and rank not in path:
            path[rank] = None
            rank = next((one for one in edges[rank][0] if one in edges), None)
        if rank in path:
            circle = [*path][[*path].index(rank) :]
            steps = (
                f"rank {one} for rank {other} in group {edges[one][1]}"
                for one, other in zip(circle, [*circle[1:], circle[0]], strict=True)
            )
            return [f"{_DEADLOCK}: each waits for the next: {', '.join(steps)}"]
        seen.update(path)
    return []


def _point_to_point(ranks: dict[int, Sample]) -> list[str]:
    """Return lines about unfinished sends and receives of NCCL; gloo records none."""
    pending: dict[str, list[int]] = {}
    for rank, sample in sorted(ranks.items()):
        for group in sample.groups or ():
            for call in group.calls:
                if call.is_p2p and not call.done:
                    pending.setdefault(f"{_named(call)} of group {group.name}", []).append(rank)
                    break
    return [
        f"{these_ranks(who)} wait{'s' if len(who) == 1 else ''} in {text}"
        for text, who in list(pending.items())[:_MOST]
    ]


def at_the_end(samples: Sequence[Sample], cwd: str) -> list[str]:
    """Return where the last living ranks were when they had to end, and who waited for whom; each rank's location once."""
    # NOT_BEGUN says only that our handler of stacks is not there, which is so at the end of a process, too
    alive = [sample for sample in samples if not (sample.ended or sample.child or sample.state == NOT_BEGUN)]
    ranks = {sample.rank: sample for sample in alive}
    groups = _groups(ranks)
    waits = _waits(groups, ranks)
    explained = [_lines_of(wait, groups, waits, ranks, cwd, located=True) for wait in waits[:_MOST]]
    named = frozenset[int]().union(*(of_ranks for _, of_ranks in explained))
    elsewhere: dict[tuple[str, str], list[int]] = {}
    for sample in alive:
        # by a stack, or by a sentence in place of one: "its script has ended"
        is_known = bool(sample.main or sample.state)
        if is_known and sample.rank not in named:
            elsewhere.setdefault((sample.state, where(sample, cwd)), []).append(sample.rank)
    locations = [
        these_ranks(who) + (f": {state}" if state else f" {'was' if len(who) == 1 else 'were'} in {text}")
        for (state, text), who in list(elsewhere.items())[:_MOST]
    ]
    if more := [rank for who in list(elsewhere.values())[_MOST:] for rank in who]:
        locations.append(f"{these_ranks(more)} {'was' if len(more) == 1 else 'were'} elsewhere")
    return [*locations, *_cycle(waits), *(line for lines, _ in explained for line in lines), *_point_to_point(ranks)]


def describe_end(samples: Sequence[Sample], cwd: str, *, of_hang: bool, ended: Collection[int] = ()) -> Whereabouts:
    """Return what `describe` gives of a job that hangs; of others nothing is wrong but the failure, and who was where.

    Of the ranks that ended by themselves too the report says how: where they were while they ended explains nothing.
    """
    if of_hang:
        return describe(samples, cwd)
    others = [sample for sample in samples if sample.rank not in ended]
    return Whereabouts(locations=tuple(at_the_end(others, cwd)))


def describe(samples: Sequence[Sample], cwd: str) -> Whereabouts:
    """Return why the workers of a hanging job may hang, where they are, and for whom they wait."""
    workers = [sample for sample in samples if not (sample.child or sample.ended)]
    waits, why = explain(samples, cwd), reasons(samples, cwd)
    first, head = awaited(samples)
    if not head and waits:
        head = waits[0]
    elif not head:
        # torch does not number the collectives, but the stacks show who is in one
        waiting = {sample.rank for sample in workers if is_waiting(sample)}
        first = frozenset(sample.rank for sample in workers) - waiting
        if first and waiting:
            are, wait = "is" if len(first) == 1 else "are", "waits" if len(waiting) == 1 else "wait"
            head = f"{these_ranks(first)} {are} in no collective, {these_ranks(waiting)} {wait} in one"
        elif why:
            head, *why = why
    groups = sorted(merge(workers), key=lambda group: first.isdisjoint(group.ranks))
    locations = (f"{group.who}: {where(group.samples[0], cwd)}" for group in groups[:_MOST])
    facts = (*why, *locations, *ended_well(samples), *waits, *ras_lines(samples))
    is_explained = bool(reasons(samples, cwd)) or any(line.startswith((_DISAGREE, _DEADLOCK)) for line in waits)
    return Whereabouts(what=head, locations=facts, awaited=tuple(sorted(first)), is_explained=is_explained)


def ras_lines(samples: Sequence[Sample]) -> list[str]:
    """Return what NCCL's RAS service says of the whole job, if a worker listens for it."""
    asked = next((sample for sample in samples if sample.ras), None)
    if asked is None:
        return []
    lines = [line.rstrip() for line in asked.ras.splitlines() if line.strip()][:_MOST_LINES]
    return [f"NCCL's RAS service, asked at rank {asked.rank}:", *(f"  {line}" for line in lines)]
