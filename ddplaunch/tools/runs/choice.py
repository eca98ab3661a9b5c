"""Chooses which run is meant by what was typed: a name, a part of it, a script, a folder, or nothing.

Guesses nothing: of several runs that fit, an error lists all. Each error says what to type.
"""

from __future__ import annotations

import os
import shlex
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from msgspec import Struct

from ddplaunch.record import old_runs, run_socket
from ddplaunch.record.folders import NODE_FOLDER_PREFIXES, node_folders_of, runs_folder, short
from ddplaunch.record.run_socket import SocketPath
from ddplaunch.record.window.questions import AskStatus, WorkerStatus
from ddplaunch.record.window.requests import NodeReply
from ddplaunch.spec.options.parsers import BadValue
from ddplaunch.spec.options.parsers import ranks as parse_ranks
from ddplaunch.system.errors import LaunchError
from ddplaunch.system.fields import line
from ddplaunch.system.words import count, did_you_mean, these_ranks, why_failed
from ddplaunch.tools.runs.client import ask
from ddplaunch.tools.runs.find import (
    ANSWER_WITHIN,
    Known,
    every_run,
    folders,
    look,
    newest_first,
    of_folder,
    of_running,
    running,
)

_MOST_RUNS = 8  # that an error lists
_SHORTEST_END = 3  # characters: every tenth name ends with a given letter
_SHORTEST_NUMBER = 4  # digits: a shorter number is a rank, and no beginning of a date
_HINT_PS = "`ddplaunch ps` shows what runs"


def workers(env: Mapping[str, str], named: str | None) -> list[tuple[NodeReply, WorkerStatus]]:
    """Return the workers of the named run, or of the only run, by rank, each with its node; none if several runs may be meant."""
    runs = [*map(of_running, running(env))]
    found = runs if named is None else best_matches(named, runs)
    if len(found) != 1 or found[0].replies is None:
        return []
    return sorted(found[0].replies.workers, key=lambda pair: pair[1].rank)


def best_matches(typed: str, runs: Sequence[Known]) -> list[Known]:
    """Return the runs that fit best: by their whole name, their short name, the script, or a part of the name, in this order.

    A script fits by its path, its name, or that without `.py`; a part is a beginning, or an end of three characters or more. A
    number of up to three digits is no part: whoever types it means a rank.
    """
    is_part = not (typed.isdigit() and len(typed) < _SHORTEST_NUMBER)
    kinds: tuple[Callable[[Known], bool], ...] = (
        lambda run: run.run_id == typed,
        lambda run: run.name == typed.lower(),
        lambda run: bool(run.script) and typed in _names_of(run),
        lambda run: is_part and (run.run_id.startswith(typed) or run.name.startswith(typed.lower())),
        lambda run: is_part and len(typed) >= _SHORTEST_END and run.run_id.endswith(typed.lower()),
    )
    for fits in kinds:
        if found := [run for run in runs if fits(run)]:
            return found
    return []


def _names_of(run: Known) -> tuple[str, ...]:
    """Return what a script is called by; of a function of `launch()`, "train.py:main", its file and its name, too."""
    return run.script, run.program, run.program.removesuffix(".py"), *run.program.split(":")


class Typed(Struct, frozen=True):
    """The verb that was typed to name a run, and its options: the hints of errors repeat them."""

    verb: str
    options: Sequence[str] = ()

    def words(self, name: str) -> tuple[str, ...]:
        """Return the words behind `ddplaunch`, with this name for the run."""
        return (self.verb, name, *self.options)


def several(what: str, runs: Iterable[Known], typed: Typed) -> LaunchError:
    """Return the error that lists name, script and age of each run that could be meant."""
    listed, now = newest_first(runs), time.time()
    names = _distinct_names(listed)
    rows = [(name, run.program, run.age(now)) for name, run in zip(names, listed, strict=True)][:_MOST_RUNS]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    lines += [f"and {len(listed) - _MOST_RUNS} more"] if len(listed) > _MOST_RUNS else []
    example = shlex.join(("ddplaunch", *typed.words(names[0])))
    return LaunchError("\n  ".join([f"{what}:", *lines]), hint=f"name one: `{example}`")


def _distinct_names(runs: Sequence[Known]) -> list[str]:
    """Return for each run a name that no other run has: the shortest such name, or the folder."""
    used = Counter(name for run in runs for name in {run.name, run.run_id})
    return [
        next((name for name in (run.name, run.run_id) if used[name] == 1), run.folder or run.run_id) for run in runs
    ]


def choose_running(env: Mapping[str, str], named: str | None, verb: str, *options: str) -> Known:
    """Return the running job that was named: by name, script, part of the name, or folder. Without a name: the only job.

    `verb` and `options` were typed with the name; errors repeat them in their hints.

    Raises:
        LaunchError: no job that runs here is meant, or several may be.
    """
    typed = Typed(verb, options)
    _check_name(named)
    found = look(env)
    here = [of_running(replies) for replies in found.here]
    if named is None:
        if not here:
            raise _none_here("none of your jobs runs here", found.there, typed)
        if len(here) > 1:
            raise several(f"{len(here)} of your jobs run here", here, typed)
        return here[0]
    if os.sep in named:
        return _by_folder(named, here)
    going_on = {run.run_id for run in (*here, *found.there)}
    ended = [folder for folder in folders(env) if os.path.basename(folder) not in going_on]
    exact = [run for run in here if named in (run.run_id, run.name)]
    not_here = [*map(os.path.basename, ended), *(run.run_id for run in found.there)]
    removed = removed_run(env, named, exactly=True)
    # whoever types the whole name of a run that does not run here does not mean a job whose name begins so
    is_name_of_another = removed is not None or any(named in (name, short(name)) for name in not_here)
    fitting = exact or ([] if is_name_of_another else best_matches(named, here))
    if len(fitting) > 1:
        raise several(f"{line(named)} may be any of {len(fitting)} jobs that run here", fitting, typed)
    if fitting:
        return fitting[0]
    elsewhere = best_matches(named, [*found.there, *map(of_folder, ended)])
    if on_other_hosts := [run for run in elsewhere if run.host]:
        raise _none_here(f"there is no run {line(named)} here", on_other_hosts, typed)
    if elsewhere:
        # later runs that asked for the same name got a number behind it
        later = [run for run in here if run.run_id.startswith(f"{named}.")]
        raise _has_ended(newest_first(elsewhere)[0], later, typed)
    raise removed or removed_run(env, named) or no_such_run(env, named, here, typed)


def _check_name(named: str | None) -> None:
    """Raise LaunchError for an empty name, as an unset variable of a shell leaves it: it would be a part of every name."""
    if named == "":
        raise LaunchError("no run is named: the argument is empty", hint=_HINT_PS)


def fitting(env: Mapping[str, str], named: str) -> list[Known]:
    """Return all runs that may be meant, running and ended ones: by name, script, part of the name, or folder.

    Raises:
        LaunchError: no run is meant.
    """
    _check_name(named)
    every = every_run(env)
    found = best_matches(named, every)
    if not found and os.sep in named and os.path.isdir(named):
        path = os.path.realpath(named)
        found = [run for run in every if run.folder and os.path.realpath(run.folder) == path]
        is_of_a_run = any(os.path.isfile(f"{path}/{name}.json") for name in ("plan", "summary"))
        found = found or ([of_folder(path)] if is_of_a_run else [])
    if not found:
        raise removed_run(env, named) or no_such_run(env, named, every, Typed("ps"))
    return found


def choose_kept(
    env: Mapping[str, str], named: str | None, verb: str, options: Sequence[str] = (), *, follow: bool = False
) -> tuple[Known, list[Known]]:
    """Return the run whose folder is meant, running or ended, and other jobs that run here where none was named.

    Without a name it is the latest; of those to be followed, the latest that runs, if one does. `verb` and `options` were
    typed with the name; errors repeat them in their hints.

    Raises:
        LaunchError: no run with a folder is meant, or several may be.
    """
    _check_name(named)
    if named is not None and os.sep in named:
        return _in_folder(named, Typed(verb, options)), []
    here = [of_running(replies) for replies in running(env) if replies.run is not None]
    ids = {run.run_id for run in here}
    runs = [*here, *(of_folder(folder) for folder in folders(env) if os.path.basename(folder) not in ids)]
    if named is None:
        latest = _latest([run for run in runs if run.folder], verb, follow=follow)
        return latest, [run for run in here if run is not latest]
    found = best_matches(named, runs)
    if not any(named in (run.run_id, run.name) for run in found):
        if removed := removed_run(env, named, exactly=True):
            raise removed
        found = [
            run for run in found if run.replies is not None
        ] or found  # of runs that fit in part only those that run, if any
    if not found:
        raise removed_run(env, named) or no_such_run(env, named, runs, Typed(verb))
    if len(found) > 1:
        raise several(f"{line(named)} may be any of {len(found)} runs", found, Typed(verb, options))
    if not found[0].folder:
        hint = "see `--log-dir`, and what the command said at its start"
        raise LaunchError(f"run {found[0].name} keeps no logs", hint=hint)
    return found[0], []


def _in_folder(named: str, typed: Typed) -> Known:
    """Return the run in the folder `named`.

    Raises:
        LaunchError: it cannot be read, or holds the folders of runs, as that of --log-dir does.
    """
    folder = os.path.abspath(named)
    try:
        inside = [f"{folder}/{name}" for name in os.listdir(folder) if not name.startswith(NODE_FOLDER_PREFIXES)]
    except OSError as error:
        raise LaunchError(f"{named}: {(error.strerror or '').lower()}", hint="name the folder of a run") from None
    if not _holds_events(folder) and (runs := [of_folder(each) for each in inside if _holds_events(each)]):
        line_of_newest = shlex.join(("ddplaunch", *typed.words(newest_first(runs)[0].folder)))
        raise LaunchError(
            f"{named} is no folder of a run, but holds {count(len(runs), 'run')}", hint=f"type `{line_of_newest}`"
        )
    return of_folder(folder)


def _holds_events(folder: str) -> bool:
    """Whether this is the folder of a run, or of one of its nodes."""
    return any(os.path.isfile(f"{part}/events.jsonl") for part in node_folders_of(folder))


def _latest(runs: Sequence[Known], verb: str, *, follow: bool) -> Known:
    """Return the run that began last; with `follow`, one that still runs comes before all that have ended."""
    if not runs:
        raise LaunchError("there is no run with logs", hint=f"`ddplaunch {verb} FOLDER` reads those of --log-dir")
    return newest_first(runs)[0] if follow else max(runs, key=lambda run: run.began)


def _has_ended(run: Known, later: Sequence[Known], typed: Typed) -> LaunchError:
    """Return the error that this run has ended; its hint leads to the newest of the `later` runs of its name, if one runs."""
    facts = ", ".join(filter(None, (run.program, run.age(time.time()))))
    hint = f"`ddplaunch logs {run.name}` shows its output"
    if later:
        name = newest_first(later)[0].name
        hint = f"{name} runs: type `{shlex.join(('ddplaunch', *typed.words(name)))}`"
    return LaunchError(f"run {run.name} has ended: {facts}", hint=hint)


def no_such_run(env: Mapping[str, str], named: str, runs: Sequence[Known], typed: Typed) -> LaunchError:
    """Return the error that no run has this name; its hint is one of `runs` with a similar name, if there is one."""
    what, verb = f"there is no run {line(named)} here", typed.verb
    if named.isdigit():
        takes_ranks = verb in ("logs", "stacks", "attach", "profile")
        return LaunchError(
            what, hint=f"for rank {named} type `ddplaunch {verb} -r {named}`" if takes_ranks else _HINT_PS
        )
    similar = did_you_mean(named, [name for run in runs for name in (run.name, run.run_id, run.program) if name])
    if not similar and verb in ("logs", "report", "ps"):
        return LaunchError(what, hint="`ddplaunch ps --all` lists your runs")
    return _none_here(what, (), typed, similar)


def _by_folder(named: str, here: Sequence[Known]) -> Known:
    """Return the running job whose folder is `named`: one of those `here`, or one that answers at a socket in that folder.

    Raises:
        LaunchError: no job runs there, or it is another user's.
    """
    path = os.path.realpath(named)
    for known in here:
        run = known.replies.run if known.replies is not None else None
        if run is not None and run.folder and path in map(os.path.realpath, (known.folder, run.folder)):
            return known
    try:
        owner = os.stat(path).st_uid
    except OSError as error:
        raise LaunchError(f"{named}: {why_failed(error)}", hint=_HINT_PS) from None
    socket_path = SocketPath(path, run_socket.NAME)
    # in a folder outside of our folder of runs, as with another XDG_STATE_HOME
    has_socket = os.path.lexists(socket_path.path)
    if has_socket:
        if (replies := ask(socket_path, AskStatus(), ANSWER_WITHIN)) is not None:
            return of_running(replies)
    elif owner not in (os.getuid(), 0) and os.getuid() != 0:
        raise LaunchError(f"{named} is of another user ({owner})", hint="only that user, or root, can look into it")
    raise LaunchError(f"no job runs in {named}", hint=_HINT_PS)


def removed_run(env: Mapping[str, str], named: str, *, exactly: bool = False) -> LaunchError | None:
    """Return the error for a removed run with this name, or, unless `exactly`, this beginning; None if there is none."""
    runs = runs_folder(env)
    removed = old_runs.removals(runs) if runs is not None else {}
    found = [one for name, one in removed.items() if named in (name, short(name))]
    if not found and not exactly:
        found = [one for name, one in removed.items() if name.startswith(named) or short(name).startswith(named)]
    if not found:
        return None
    latest = found[-1]
    what = f"run {line(latest.name)} was removed on {latest.date}: {latest.why}"
    if len(found) > 1:
        what = f"{line(named)} may be any of {len(found)} runs that were removed, the latest on {latest.date}"
    return LaunchError(what, hint="`--keep-runs DAYS` or DDPLAUNCH_KEEP_RUNS keeps runs longer, 0 forever")


def ranks_meant(text: str | None) -> frozenset[int] | None:
    """Read the value of -r; None: all ranks."""
    try:
        return parse_ranks(text) if text is not None else None
    except BadValue as error:
        raise LaunchError(f"-r {text}: {error}", hint="type for example `-r 3` or `-r 0-2,4`") from None


def no_such_ranks(run: str, ranks: Collection[int], world_size: int) -> LaunchError:
    """Say that a run of so many workers has none of these ranks."""
    has = "rank 0 only" if world_size == 1 else f"ranks 0-{world_size - 1}"
    return LaunchError(f"there is no {these_ranks(ranks)} in {run}: it has {has}", hint="type for example `-r 0`")


def _none_here(what: str, there: Sequence[Known], typed: Typed, similar: str | None = None) -> LaunchError:
    """Return the error of a verb that found no job here: `what`, and a hint.

    The hint leads to the last of the runs that were found on other hosts (`there`), else says why sockets cannot be found, else
    names the run with a `similar` name, else `ddplaunch ps`.
    """
    if there:
        run = there[-1]
        return LaunchError(f"{what}; {run.name} runs on {run.host}", hint=f"`{run.line_there(typed.words(run.name))}`")
    if why := run_socket.why_unsafe():
        return LaunchError(
            f"{what}, and {why}", hint="only root can remove that folder. Jobs with --log-dir are reached through it"
        )
    return LaunchError(what, hint=f"did you mean {similar}?" if similar else _HINT_PS)
