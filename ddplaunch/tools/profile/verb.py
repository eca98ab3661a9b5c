"""`ddplaunch profile`: profiles ranks of a running job, writes one trace of all, and says how their steps divide."""

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
from ddplaunch.system.errors import LaunchError, below, say
from ddplaunch.system.exitcodes import NODE_LOST
from ddplaunch.system.fields import Malformed
from ddplaunch.system.fields import line as printable
from ddplaunch.system.process.ending import after_cleanup
from ddplaunch.system.process.files import replaced
from ddplaunch.system.process.user_files import result_file
from ddplaunch.system.words import count, duration, size, these_ranks
from ddplaunch.tools.page.trace import entries_of
from ddplaunch.tools.profile.division import Division, Joined, Last, divide, join
from ddplaunch.tools.profile.merged import entries
from ddplaunch.tools.profile.ranks import LONGEST_TRACE, Alignment, Rank, Wish, align, record
from ddplaunch.tools.profile.recorded import Recorded, read, unpacked
from ddplaunch.tools.runs import find
from ddplaunch.tools.runs.find import Known, heading

SECONDS = 10.0
_MOST_SECONDS, _MOST_STEPS = 300.0, 1000
_STEPS_WITHIN = 60.0  # seconds
_MOST_RANKS = 256
_MOVED = 1_000_000  # nanoseconds by which a clock may have been corrected in a profile
_WORTH_SAYING = 0.05  # of the time
_SLOWER = 0.02  # below which nothing is said
_FAILED = 1  # the exit status where no rank could be profiled


class _Profiled(Struct):
    """What became of one rank: `found` where its trace could be read."""

    rank: Rank
    host: str
    alignment: Alignment
    found: Recorded | None = None


def wanted(seconds: str | None, steps: str | None, *, memory: bool) -> Wish:
    """Return what is asked of each rank, from the options as they were typed.

    Raises:
        LaunchError: a number is none, or out of range.
    """
    try:
        number = int(steps) if steps is not None else 0
    except ValueError:
        number = -1
    if steps is not None and not 1 <= number <= _MOST_STEPS:
        raise LaunchError(f"--steps {printable(steps)}: expected a number from 1 to {_MOST_STEPS}", hint="--steps 5")
    try:
        within = float(seconds) if seconds is not None else _STEPS_WITHIN if steps is not None else SECONDS
    except ValueError:
        within = -1.0
    if not 0.1 <= within <= _MOST_SECONDS:
        raise LaunchError(
            f"--seconds {printable(seconds or '')}: expected seconds from 0.1 to {_MOST_SECONDS:.0f}",
            hint="--seconds 10",
        )
    return Wish(within, number, memory)


def show(
    env: Mapping[str, str],
    named: str | None,
    ranks: str | None,
    wish: Wish,
    out: str | None,
) -> str:
    """Profile ranks of the job that is meant, and return what is for stdout."""
    asked = find.ranks_meant(ranks)
    run = find.choose(env, named, "profile", *(["-r", ranks] if ranks is not None else []))
    assert run.replies is not None
    hosts = {worker.rank: node.host for node, worker in run.replies.workers}
    silent = find.silent(run.replies.nodes)
    chosen = _chosen(run, asked, hosts, silent)
    for problem in silent:
        say(f"warning: {problem}, so its ranks are left out")
    path = os.path.abspath(out) if out is not None else _path(run)
    with after_cleanup(), result_file(path, "name another file: --out FILE") as file, ExitStack() as stack:
        say(heading(run))
        recorded = record(run.replies.socket_path, chosen, wish, os.path.dirname(path), stack)
        profiled = _read(recorded, hosts)
        found = [one.found for one in profiled if one.found is not None]
        if not found:
            problems = [f"{who} {why}" for who, why in _failures(profiled)]
            raise LaunchError(
                f"no rank could be profiled: {'; '.join(problems)}",
                hint=f"`ddplaunch stacks {run.name}` shows where the ranks are",
                status=_FAILED,
            )
        aligned = {one.rank.rank for one in profiled if one.found is not None and one.alignment.steady}
        joined = join(found, aligned=aligned)
        divisions, last = divide(found, joined)
        about = {
            "run": run.run_id,
            "clocks": _clocks(profiled),
            "left out": {str(one.rank.rank): one.rank.why for one in profiled if one.rank.why},
        }
        ours = entries_of(run.folder) if run.folder else ()
        trace.write(file, entries(found, joined, ours), about, packed=path.endswith(".gz"))
        memory = _keep_memory(profiled, path) if wish.memory else []
    look = Look.of_stdout(env)
    parts = [
        _table(divisions, hosts, look),
        *([_sentences(_about_last(last), look)] if last is not None else []),
        _sentences(_notes(profiled, found, divisions, joined, wish), look),
        section(
            line((path, NAME)),
            line((f"{size(os.path.getsize(path))}, to be opened in https://ui.perfetto.dev", NOTE)),
            *(line((text, NOTE)) for text in memory),
        ),
    ]
    return written(parts, look)


def _chosen(run: Known, asked: Collection[int] | None, hosts: Mapping[int, str], silent: Sequence[str]) -> list[int]:
    """Return the ranks to be profiled."""
    assert run.replies is not None
    told = run.replies.run
    if not hosts:
        why = run.replies.problem or "; ".join(silent) or "has no worker now"
        raise LaunchError(f"run {run.name} {below(why)}", status=NODE_LOST)
    if asked is not None and (unknown := set(asked) - hosts.keys()):
        world_size = told.world_size if told is not None else len(hosts)
        if never := {rank for rank in unknown if rank >= world_size}:
            raise find.no_such_ranks(run.name, never, world_size)
        raise LaunchError(
            f"{these_ranks(unknown)} of {run.name} cannot be reached: {'; '.join(silent)}", status=NODE_LOST
        )
    chosen = sorted(hosts if asked is None else asked)
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
    """Read what the ranks have sent, with times on the clock of the first rank; a rank whose trace is malformed has failed."""
    made = [rank for rank in recorded if rank.phase == "sent"]
    boots = {rank.hello.boot for rank in made}
    profiled = []
    for rank in recorded:
        # of several machines, each is compared with ours by all its ranks; the best comparison counts
        peers = [one for one in made if one.hello.boot and one.hello.boot == rank.hello.boot] or [rank]
        best = min((align(one.before, one.after, same=len(boots) == 1) for one in peers), key=lambda each: each.error)
        one = _Profiled(rank, hosts.get(rank.rank, ""), best)
        profiled.append(one)
        if rank.phase != "sent":
            continue
        try:
            data = unpacked(rank.trace, LONGEST_TRACE + (64 << 20))
            one.found = read(data, rank=rank.rank, host=one.host, ahead=best.ahead)
        except Malformed as error:
            rank.phase, rank.why = "failed", f"has sent a trace that {below(str(error))}"
        else:
            if one.found.clock_moved > _MOVED:
                one.alignment = Alignment(best.ahead, best.error, steady=False)
    return profiled


def _keep_memory(profiled: Sequence[_Profiled], path: str) -> list[str]:
    """Write the history of each allocator beside the trace, unread; return lines about that."""
    base = path.removesuffix(".gz").removesuffix(".json")
    lines = []
    for one in profiled:
        if one.rank.memory.tell():
            one.rank.memory.seek(0)
            name = f"{base}-memory-{one.rank.rank}.pickle"
            with replaced(name) as file:
                shutil.copyfileobj(one.rank.memory, file)
            lines.append(f"{name}, to be opened in https://pytorch.org/memory_viz")
    return lines


# --- the screen


def _table(divisions: Sequence[Division], hosts: Mapping[int, str], look: Look, *, has_times: bool = True) -> Block:
    """Return how the steps divide: as shares, and unless there is no room, in time per step where steps are known."""
    header = ("rank", "host", "steps", "step", "compute", "communication", "waiting", "data", "other")
    rows = []
    for one in divisions:
        parts = (one.computes, one.communicates, one.waits, one.loads, one.other)
        shares = [f"{part / max(1, one.whole):4.0%}" for part in parts]
        times = [f"{_short(part / max(1, one.steps))} " if has_times else "" for part in parts]
        cells = map("".join, zip(times, shares, strict=True))
        step = _short(one.whole / one.steps) if one.steps else "?"
        rows.append((str(one.rank), hosts.get(one.rank, ""), str(one.steps or "?"), step, *cells))
    made = table(rows, header=header, styles=(NAME,), right=set(header) - {"host"})
    return made if not has_times or fits(made, look) else _table(divisions, hosts, look, has_times=False)


def _short(nanoseconds: float) -> str:
    """Write a time so that those of a column compare."""
    return duration(nanoseconds / 1e9) if nanoseconds >= 1e10 else f"{nanoseconds / 1e6:.0f} ms"


def _sentences(told: Iterable[tuple[str, str]], look: Look) -> Block:
    """Return sentences with their styles below each other; one that the screen has no room for is broken between words."""
    lines = [(line((text, style)), text, style) for text, style in told]
    return section(*(shown if fits(shown, look) else sentence("", text, style) for shown, text, style in lines))


def _about_last(last: Last) -> Iterator[tuple[str, str]]:
    """Say which rank the others wait for, and what it did meanwhile, each sentence with its style."""
    per_step = f", {_short(last.per_step)} of each step" if last.per_step else ""
    head = f"the others wait for rank {last.rank} for {last.share:.0%} of the time{per_step}: "
    yield f"{head}it is the last in {last.times} of {count(last.of, 'collective')}", ODD
    does = ", ".join(f"{name} {share:.0%}" for name, share in last.meanwhile.items() if share >= _WORTH_SAYING)
    yield f"  meanwhile it {does}", ""
    cwd = working_directory() or ""
    lines = [f"{where.removeprefix(f'{cwd}/')} {share:.0%}" for where, share in last.lines if share >= _WORTH_SAYING]
    if lines:
        yield f"  at {', '.join(lines)}", ""


def _failures(profiled: Sequence[_Profiled]) -> list[tuple[str, str]]:
    """Return which ranks failed, and why, each reason once."""
    by_reason: dict[str, list[int]] = {}
    for one in profiled:
        if one.found is None:
            by_reason.setdefault(one.rank.why, []).append(one.rank.rank)
    return [(_each(ranks), why) for why, ranks in by_reason.items()]


def _each(ranks: Collection[int]) -> str:
    """Name ranks as the subject of a predicate that is of one."""
    return f"{'each of ' if len(ranks) > 1 else ''}{these_ranks(ranks)}"


def _notes(
    profiled: Sequence[_Profiled],
    found: Sequence[Recorded],
    divisions: Sequence[Division],
    joined: Sequence[Joined],
    wish: Wish,
) -> Iterator[tuple[str, str]]:
    """Say what is to be known about the figures, each sentence with its style."""
    for who, why in _failures(profiled):
        yield f"{who} {why}", ODD
    for note in dict.fromkeys(one.rank.note for one in profiled if one.found is not None and one.rank.note):
        yield f"{these_ranks([one.rank.rank for one in profiled if one.rank.note == note])}: {note}", ODD
    if wish.memory:
        reasons = {one.rank.hello.memory for one in profiled if isinstance(one.rank.hello.memory, str)} - {"yes"}
        for why in reasons:
            without = [one.rank.rank for one in profiled if one.rank.hello.memory == why]
            yield f"no history of memory: {_each(without)} {why}", ODD
    known = [call for one in found for call in one.collectives]
    everything = len(known) + sum(one.unmatched for one in found)
    together = sum(len(each.calls) for each in joined)
    if not any(one.steps for one in divisions):
        yield "no step of an optimizer began and ended in that time, so all of it is divided", ODD
    if everything and len(found) > 1 and not any(each.last >= 0 for each in joined):
        why = (
            "not all ranks of their groups are here"
            if known
            else "torch has not numbered them (of gloo it does from 2.13 on)"
        )
        yield f"communication includes waiting: no collective could be joined, since {why}", ODD
    elif everything > together and len(found) > 1:
        yield (
            f"{together} of {everything} calls of collectives are joined, and in the others communication includes waiting",
            NOTE,
        )
    yield f"clocks: {_clocks(profiled)}", NOTE
    stood = max(one.stopping for one in found) / 1e9, max(one.starting for one in found) / 1e9
    cost = f"overhead: each rank was held for at most {duration(stood[1])} at the start and {duration(stood[0])} at the end"
    slower = [one.slowdown for one in found if one.slowdown is not None]
    if slower:
        share = statistics.median(slower)
        is_small = share < _SLOWER
        between = (
            "its steps took no longer than before" if is_small else f"steps took about {share:.0%} longer than before"
        )
        cost += f"; in between {between}"
    yield cost, NOTE


def _clocks(profiled: Sequence[_Profiled]) -> str:
    """Say how far the clocks of the ranks can be compared."""
    read_ones = [one for one in profiled if one.found is not None]
    machines = {one.rank.hello.boot for one in read_ones}
    moved = [one.rank.rank for one in read_ones if not one.alignment.steady]
    if moved:
        return f"the clock of {these_ranks(moved)} was set meanwhile, so these are not compared with the others"
    if len(machines) == 1:
        return "one, since all ranks are on one machine"
    error = sum(sorted({one.rank.hello.boot: one.alignment.error for one in read_ones}.values())[-2:])
    return f"{len(machines)} machines, aligned to within {error / 1e6:.2f} ms (half of the quickest round trips)"
