"""`ddplaunch profile`: torch.profiler in the ranks of a running job; one trace of all, and how their steps divide.

`ranks` speaks with the workers, and the command is here. `recorded` reads what a rank has sent, `division` says where the time
went, and `merged` writes the trace: these three are pure but for the files that they are given.
"""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack

from msgspec import Struct

from ddplaunch.record import trace
from ddplaunch.spec.program import working_directory
from ddplaunch.system.console.tables import NAME, NOTE, ODD, Block, Look, fits, line, section, sentence, table, written
from ddplaunch.system.errors import LaunchError, indented, say
from ddplaunch.system.exitcodes import NODE_LOST
from ddplaunch.system.fields import Malformed
from ddplaunch.system.fields import line as printable
from ddplaunch.system.process.command import after_cleanup
from ddplaunch.system.process.files import replaced, result_file
from ddplaunch.system.words import count, duration, size, these_ranks
from ddplaunch.tools.page.trace import entries_of
from ddplaunch.tools.profile.division import Division, Joined, Last, divide, join_collectives
from ddplaunch.tools.profile.merged import entries
from ddplaunch.tools.profile.ranks import LONGEST_TRACE, Alignment, Rank, Wish, align, record
from ddplaunch.tools.profile.recorded import Recorded, read, unpacked
from ddplaunch.tools.runs import choice, find
from ddplaunch.tools.runs.find import Known, heading

SECONDS = 10.0
_MOST_SECONDS, _MOST_STEPS = 300.0, 1000
_STEPS_WITHIN = 60.0  # seconds for the steps that --steps names
_MOST_RANKS = 256
_MOST_UNPACKED = LONGEST_TRACE + (64 << 20)  # bytes of a trace
_MOST_MOVED = 1_000_000  # nanoseconds by which a clock may have been corrected in a profile
_WORTH_SAYING = 0.05  # of the time
_NOTABLE_SLOWDOWN = 0.02  # of the time of steps: less is within the noise
_STATUS_FAILED = 1  # the exit status where no rank could be profiled


class _Profiled(Struct):
    """What became of one rank."""

    conversation: Rank
    host: str
    alignment: Alignment
    found: Recorded | None = None  # what its trace tells; None: the conversation has failed, or the trace is malformed

    @property
    def rank(self) -> int:
        """The number of the rank."""
        return self.conversation.rank


class _Result(Struct, frozen=True, kw_only=True):
    """What a profile tells, of each rank and of all together."""

    profiled: Sequence[_Profiled]
    found: Sequence[Recorded]  # of the ranks whose trace could be read, at least one
    joined: Sequence[Joined]
    divisions: Sequence[Division]
    last: Last | None


def wanted(seconds: str | None, steps: str | None, *, memory: bool) -> Wish:
    """Return what is asked of each rank, from --seconds and --steps as they were typed; None: not typed.

    Raises:
        LaunchError: a number is none, or out of range.
    """
    number, within = 0, SECONDS
    if steps is not None:
        try:
            number = int(steps)
        except ValueError:
            number = -1
        if not 1 <= number <= _MOST_STEPS:
            message = f"--steps {printable(steps)}: expected a number from 1 to {_MOST_STEPS}"
            raise LaunchError(message, hint="--steps 5")
        within = _STEPS_WITHIN
    if seconds is not None:
        try:
            within = float(seconds)
        except ValueError:
            within = -1.0
        if not 0.1 <= within <= _MOST_SECONDS:
            message = f"--seconds {printable(seconds)}: expected seconds from 0.1 to {_MOST_SECONDS:.0f}"
            raise LaunchError(message, hint="--seconds 10")
    typed = [
        word
        for option, text in (("--seconds", seconds), ("--steps", steps))
        if text is not None
        for word in (option, text)
    ]
    return Wish(within, number, memory, (*typed, *(["--memory"] if memory else [])))


def show(
    env: Mapping[str, str],
    named: str | None,
    ranks: str | None,
    wish: Wish,
    out: str | None,
) -> str:
    """Profile ranks of the job that is meant, and return what is for stdout.

    `named` is the run, `ranks` the value of -r and `out` that of --out, as they were typed; None: not typed.
    """
    wanted_ranks = choice.ranks_meant(ranks)
    of_ranks = ("-r", ranks) if ranks is not None else ()
    of_file = ("--out", out) if out is not None else ()
    # where several runs may be meant, the words stand in the hint that says what to type
    run = choice.choose_running(env, named, "profile", *of_ranks, *wish.typed, *of_file)
    assert run.replies is not None
    hosts = {worker.rank: node.host for node, worker in run.replies.workers}
    silent = find.silent(run.replies.nodes)
    chosen = _chosen(run, wanted_ranks, hosts, silent)
    for problem in silent:
        say(f"warning: {problem}, so its ranks are left out")
    path = os.path.abspath(out) if out is not None else _path(run)
    # a signal ends this process after the unfinished file is removed
    with after_cleanup(), result_file(path, "name another file: --out FILE") as file, ExitStack() as stack:
        say(heading(run))
        recorded = record(run.replies.socket_path, chosen, wish, os.path.dirname(path), stack)
        result = _result(run, _read(recorded, hosts))
        about = {
            "run": run.run_id,
            "clocks": _clocks(result.profiled),
            "left out": {str(one.rank): one.conversation.why for one in result.profiled if one.conversation.why},
        }
        of_run = entries_of(run.folder) if run.folder else ()
        trace.write(file, entries(result.found, result.joined, of_run), about, packed=path.endswith(".gz"))
        memory = _keep_memory(result.profiled, path) if wish.memory else []
    look = Look.of_stdout(env)
    parts = [
        _table(result.divisions, hosts, look),
        *([_sentences(_about_last(result.last), look)] if result.last is not None else []),
        _sentences(_notes(result), look),
        section(
            line((path, NAME)),
            line((f"{size(os.path.getsize(path))}, to be opened in https://ui.perfetto.dev", NOTE)),
            *(line((text, NOTE)) for text in memory),
        ),
    ]
    return written(parts, look)


def _result(run: Known, profiled: Sequence[_Profiled]) -> _Result:
    """Return what the ranks tell together; raise LaunchError if no rank could be profiled."""
    found = [one.found for one in profiled if one.found is not None]
    if not found:
        problems = [f"{who} {why}" for who, why in _failures(profiled)]
        raise LaunchError(
            f"no rank could be profiled: {'; '.join(problems)}",
            hint=f"`ddplaunch stacks {run.name}` shows where the ranks are",
            status=_STATUS_FAILED,
        )
    aligned = {one.rank for one in profiled if one.found is not None and one.alignment.steady}
    joined = join_collectives(found, aligned=aligned)
    divisions, last = divide(found, joined)
    return _Result(profiled=profiled, found=found, joined=joined, divisions=divisions, last=last)


def _chosen(
    run: Known, wanted_ranks: Collection[int] | None, hosts: Mapping[int, str], silent: Sequence[str]
) -> list[int]:
    """Return the ranks to be profiled: those `wanted_ranks` for, None for all.

    `hosts` has the ranks whose nodes have answered, and `silent` says which nodes have not.

    Raises:
        LaunchError: no rank can be reached, or one that was asked for cannot, or there are too many.
    """
    assert run.replies is not None
    if not hosts:
        why = run.replies.problem or "; ".join(silent) or "has no worker now"
        raise LaunchError(f"run {run.name} {indented(why)}", status=NODE_LOST)
    unknown = set(wanted_ranks or ()) - hosts.keys()
    if unknown:
        about_run = run.replies.run
        world_size = about_run.world_size if about_run is not None else len(hosts)
        never = {rank for rank in unknown if rank >= world_size}
        if never:
            raise choice.no_such_ranks(run.name, never, world_size)
        unreached = f"{these_ranks(unknown)} of {run.name} cannot be reached"
        raise LaunchError(f"{unreached}: {'; '.join(silent)}", status=NODE_LOST)
    chosen = sorted(hosts if wanted_ranks is None else wanted_ranks)
    if len(chosen) > _MOST_RANKS:
        raise LaunchError(
            f"run {run.name} has {count(len(chosen), 'rank')}, and at most {_MOST_RANKS} are profiled at once",
            hint=f"choose some: `ddplaunch profile {run.name} -r 0-{_MOST_RANKS - 1}`",
        )
    return chosen


def _path(run: Known) -> str:
    """Return where the trace goes if no file is named: into the folder of the run, or here if that is on another host."""
    folder = run.folder if run.folder and os.path.isdir(run.folder) and os.access(run.folder, os.W_OK) else os.getcwd()
    return os.path.join(folder, f"profile-{run.name}-{time.strftime('%H%M%S')}.json.gz")


def _read(recorded: Sequence[Rank], hosts: Mapping[int, str]) -> list[_Profiled]:
    """Read what the ranks have sent, with times on our clock, or on that of the machine if all ranks are on one.

    A rank whose trace is malformed has failed.
    """
    sent = [rank for rank in recorded if rank.phase == "sent"]
    boots = {rank.boot_id for rank in sent}  # an id of the machine's last start: machines differ in it
    are_on_one_machine = len(boots) == 1 and "" not in boots  # "": not known. Then no time has to be shifted
    profiled = []
    for rank in recorded:
        # all ranks of a machine have the same clock: the best of their comparisons with ours counts
        same_machine = [other for other in sent if other.boot_id and other.boot_id == rank.boot_id] or [rank]
        alignments = [
            align(one.pings_before, one.pings_after, ranks_share_clock=are_on_one_machine) for one in same_machine
        ]
        best = min(alignments, key=lambda alignment: alignment.error)
        one = _Profiled(rank, hosts.get(rank.rank, ""), best)
        profiled.append(one)
        if rank.phase != "sent":
            continue
        try:
            data = unpacked(rank.trace, _MOST_UNPACKED)
            one.found = read(data, rank=rank.rank, host=one.host, ahead=best.ahead)
        except Malformed as error:
            rank.phase, rank.why = "failed", f"has sent a trace that {indented(str(error))}"
        else:
            if one.found.clock_moved > _MOST_MOVED:  # somebody has set it
                one.alignment = Alignment(best.ahead, best.error, steady=False)
    return profiled


def _keep_memory(profiled: Sequence[_Profiled], path: str) -> list[str]:
    """Write the history of each rank's allocator beside the trace, as it came, for its viewer; return lines about that."""
    base = path.removesuffix(".gz").removesuffix(".json")
    lines = []
    for one in profiled:
        memory = one.conversation.memory
        has_come = memory.tell() > 0
        if has_come:
            memory.seek(0)
            name = f"{base}-memory-{one.rank}.pickle"
            with replaced(name) as file:
                shutil.copyfileobj(memory, file)
            lines.append(f"{name}, to be opened in https://pytorch.org/memory_viz")
    return lines


# --- the screen


def _table(divisions: Sequence[Division], hosts: Mapping[int, str], look: Look) -> Block:
    """Return how the steps divide: as times per step and shares, or as shares alone if there is no room for both.

    If there is no room for the names of the hosts either, these stand below the table.
    """
    for has_times in (True, False):
        made = _columns(divisions, hosts, has_times=has_times)
        if fits(made, look):
            return made
    ranks = _by_text((one.rank, hosts.get(one.rank, "")) for one in divisions)
    named = _sentences(((f"{these_ranks(of_host)}: {host}", NOTE) for host, of_host in ranks.items() if host), look)
    return section(_columns(divisions, hosts=None, has_times=False), "", named)


def _columns(divisions: Sequence[Division], hosts: Mapping[int, str] | None, *, has_times: bool) -> Block:
    """Return the table of how the steps divide; without `hosts`, it has no column for them."""
    header = ["rank", "steps", "step", "compute", "communication", "waiting", "data", "other"]
    if hosts is not None:
        header.insert(1, "host")
    rows = []
    for one in divisions:
        parts = (one.computes, one.communicates, one.waits, one.loads_data, one.other)
        shares = [f"{part / max(1, one.whole):4.0%}" for part in parts]
        times = [f"{_short(part / max(1, one.steps))} " if has_times else "" for part in parts]
        cells = map("".join, zip(times, shares, strict=True))
        step = _short(one.whole / one.steps) if one.steps else "?"
        host = [hosts.get(one.rank, "")] if hosts is not None else []
        rows.append((str(one.rank), *host, str(one.steps or "?"), step, *cells))
    return table(rows, header=header, styles=(NAME,), right=set(header) - {"host"})


def _short(nanoseconds: float) -> str:
    """Write a time so that those of a column compare."""
    return duration(nanoseconds / 1e9) if nanoseconds >= 1e10 else f"{nanoseconds / 1e6:.0f} ms"


def _sentences(told: Iterable[tuple[str, str]], look: Look) -> Block:
    """Return sentences with their styles below each other; one that the screen has no room for is broken between words."""
    lines = [(line((text, style)), text, style) for text, style in told]
    return section(*(shown if fits(shown, look) else sentence("", text, style) for shown, text, style in lines))


def _about_last(last: Last) -> Iterator[tuple[str, str]]:
    """Say which rank the others wait for, and what it did meanwhile, each sentence with its style ("": plain)."""
    unit = "step" if last.by_step else "collective"
    per_step = f", {_short(last.per_step)} of each step" if last.per_step else ""
    head = f"the others wait for rank {last.rank} for {last.share:.0%} of the time{per_step}: "
    yield f"{head}it is the last in {last.times} of {count(last.compared, unit)}", ODD
    does = ", ".join(f"{name} {share:.0%}" for name, share in last.meanwhile.items() if share >= _WORTH_SAYING)
    yield f"  meanwhile it {does}", ""
    cwd = working_directory() or ""
    lines = [f"{where.removeprefix(f'{cwd}/')} {share:.0%}" for where, share in last.lines if share >= _WORTH_SAYING]
    if lines:
        yield f"  at {', '.join(lines)}", ""


def _failures(profiled: Sequence[_Profiled]) -> list[tuple[str, str]]:
    """Return which ranks failed, and why, each reason once."""
    reasons = _by_text((one.rank, one.conversation.why) for one in profiled if one.found is None)
    return [(_each(ranks), why) for why, ranks in reasons.items()]


def _by_text(told: Iterable[tuple[int, str]]) -> dict[str, list[int]]:
    """Return the ranks of which each text is told."""
    ranks: dict[str, list[int]] = {}
    for rank, text in told:
        ranks.setdefault(text, []).append(rank)
    return ranks


def _each(ranks: Collection[int]) -> str:
    """Name ranks as the subject of a predicate that is of one."""
    return f"{'each of ' if len(ranks) > 1 else ''}{these_ranks(ranks)}"


def _notes(result: _Result) -> Iterator[tuple[str, str]]:
    """Say what is to be known about the figures, each sentence with its style."""
    profiled = result.profiled
    for who, why in _failures(profiled):
        yield f"{who} {why}", ODD
    recorded_less = _by_text((one.rank, one.conversation.why_less) for one in profiled if one.conversation.why_less)
    have_trace = {one.rank for one in profiled if one.found is not None}
    for why, ranks in recorded_less.items():
        if not have_trace.isdisjoint(ranks):
            yield f"{these_ranks(ranks)}: {why}", ODD
    without_memory = [(one.rank, one.conversation.why_no_memory) for one in profiled if one.conversation.why_no_memory]
    for why, ranks in _by_text(without_memory).items():
        yield f"no history of memory: {_each(ranks)} {why}", ODD
    if not any(one.steps for one in result.divisions):
        yield "no step of an optimizer began and ended in that time, so all of it is divided", ODD
    yield from _about_joining(result)
    yield f"clocks: {_clocks(profiled)}", NOTE
    yield _overhead(result.found), NOTE


def _about_joining(result: _Result) -> Iterator[tuple[str, str]]:
    """Say of how many collectives it is not known who came last: in these, communication includes waiting."""
    numbered = sum(len(one.collectives) for one in result.found)
    all_calls = numbered + sum(one.unnumbered for one in result.found)
    joined_calls = sum(len(each.calls) for each in result.joined)
    if not all_calls or len(result.found) == 1:
        return
    if all(each.last is None for each in result.joined):
        why = (
            "not all ranks of their groups are here"
            if numbered
            else "torch has not numbered them (of gloo it does from 2.13 on)"
        )
        yield f"communication includes waiting: no collective could be joined, since {why}", ODD
    elif all_calls > joined_calls:
        yield (
            f"{joined_calls} of {all_calls} calls of collectives are joined, and in the others communication includes waiting",
            NOTE,
        )


def _overhead(found: Sequence[Recorded]) -> str:
    """Say what the profile has cost the ranks."""
    at_start = duration(max(one.starting for one in found) / 1e9)
    at_end = duration(max(one.stopping for one in found) / 1e9)
    cost = f"overhead: each rank was held for at most {at_start} at the start and {at_end} at the end"
    slowdowns = [one.slowdown for one in found if one.slowdown is not None]
    if not slowdowns:
        return cost
    share = statistics.median(slowdowns)
    between = (
        "its steps took no longer than before"
        if share < _NOTABLE_SLOWDOWN
        else f"steps took about {share:.0%} longer than before"
    )
    return f"{cost}; in between {between}"


def _clocks(profiled: Sequence[_Profiled]) -> str:
    """Say how far the clocks of the ranks can be compared."""
    with_trace = [one for one in profiled if one.found is not None]
    moved = [one.rank for one in with_trace if not one.alignment.steady]
    if moved:
        return f"the clock of {these_ranks(moved)} was set meanwhile, so these are not compared with the others"
    error_of_machine = {one.conversation.boot_id: one.alignment.error for one in with_trace}
    if len(error_of_machine) == 1:
        return "one, since all ranks are on one machine"
    error = sum(sorted(error_of_machine.values())[-2:])  # of the two worst ones: each is compared with ours
    return (
        f"{len(error_of_machine)} machines, aligned to within {error / 1e6:.2f} ms (half of the quickest round trips)"
    )
