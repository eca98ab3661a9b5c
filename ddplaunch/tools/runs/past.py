"""`ddplaunch ps --all`: the runs of this user, running and ended, newest first, as a table or as JSON."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from msgspec import Struct

from ddplaunch.record.folders import goes_on
from ddplaunch.record.run import NO_END, Run
from ddplaunch.system.console.tables import BAD, GOOD, NAME, ODD, Block, Look, Words, line, table, written
from ddplaunch.system.exitcodes import OK, of_signal
from ddplaunch.system.fields import line as printable
from ddplaunch.system.words import duration, signal_name, size
from ddplaunch.tools.runs import choice, find
from ddplaunch.tools.runs.find import Known

_SIGNALS_ABOVE = of_signal(0)  # the exit status above which a status stands for a signal
_IN_WORDS = {"front_lost": "ddplaunch was killed"}  # where the reason as it stands in the summary says it to nobody
_HEADER = ("run", "script", "began", "took", "size", "how it ended")


class _End(Struct, frozen=True):
    """What the summary of a run says of its end."""

    how: str
    style: str = ""
    # of the command; None: the run goes on, or was killed before it could write a summary
    status: int | None = None
    seconds: float | None = None  # that the job took


def show(env: Mapping[str, str], named: str | None, *, as_json: bool) -> str:
    """List all runs, or those that `named` may mean (a script, say), and return the text for stdout.

    Raises:
        LaunchError: no run has the name.
    """
    runs = find.every_run(env) if named is None else choice.fitting(env, named)
    newest = sorted(runs, key=lambda run: (-run.began, run.run_id))
    if as_json:
        import json

        return json.dumps([*map(_data, newest)], indent=1)
    if not newest:
        return "you have no runs here"
    return written([_table(newest, time.time())], Look.of_stdout(env))


def _table(runs: Sequence[Known], now: float) -> Block:
    return table(
        [_row(run, now) for run in runs], header=_HEADER, styles=(NAME,), right=("began", "took", "size"), wraps=True
    )


def _row(run: Known, now: float) -> Sequence[str | Words]:
    end = _end_of(run)
    began = f"{duration(max(0.0, now - run.began))} ago" if run.began else ""
    took = duration(end.seconds) if end.seconds is not None else ""
    return run.name, run.program, began, took, size(_bytes_in(run.folder)), line((end.how, end.style))


def _end_of(run: Known) -> _End:
    """Return how a run ended, from the summary in its folder; of one that runs, here or elsewhere, that it does."""
    if run.replies is not None:
        answers = run.replies.run is not None
        return _End("running", GOOD) if answers else _End("does not answer", ODD)
    if run.host:
        return _End(f"runs on {run.host}", GOOD)
    record = Run(run.folder)
    status = record.status
    if status is None:
        # the folder of a run that goes on is locked, though nobody answers for it here
        return _End("does not answer" if goes_on(run.folder) else NO_END, ODD)
    if status == OK:
        return _End("finished", status=status, seconds=record.seconds)
    why = str(record.summary.get("why", ""))
    why = _IN_WORDS.get(why, why.replace("_", " "))
    if why == "signalled" and status > _SIGNALS_ABOVE:
        why = signal_name(status - _SIGNALS_ABOVE)
    because = printable(record.first_failure or why)
    how = f"status {status}: {because}" if because else f"status {status}"
    return _End(how, BAD, status=status, seconds=record.seconds)


def _bytes_in(folder: str) -> int:
    """Return how much all files of a run take, those of its nodes too; what cannot be looked at counts nothing."""
    if not folder:
        return 0
    return sum(map(_bytes_of, (f"{above}/{name}" for above, _, names in os.walk(folder) for name in names)))


def _bytes_of(path: str) -> int:
    with suppress(OSError):
        return os.lstat(path).st_size
    return 0


def _data(run: Known) -> dict[str, Any]:
    """Return what --json prints about one run."""
    end = _end_of(run)
    return {
        "run_id": run.run_id,
        "script": run.script,
        "began": run.began or None,
        "folder": run.folder or None,
        "host": run.host or None,
        "running": run.replies is not None or bool(run.host),
        "status": end.status,
        "seconds": end.seconds,
        "how": end.how,
        "bytes": _bytes_in(run.folder),
    }
