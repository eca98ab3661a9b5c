"""The runs that a command may mean, and which of them is meant by what was typed. Guesses nothing: it lists those that fit.

Whatever a run says of itself, and whatever its folder is called, takes one line of printable characters here.
"""

from __future__ import annotations

import json
import os
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ddplaunch import fields
from ddplaunch.errors import LaunchError
from ddplaunch.process.files import open_regular
from ddplaunch.runlog import folders, run_socket
from ddplaunch.runlog.folders import OF_A_NODE, parts_of
from ddplaunch.runs.client import RunReplies
from ddplaunch.words import duration

_HEAD = 1 << 14  # bytes of the events of a run in which its start stands
_SHOWN = 8  # runs that an error lists
_SHORTEST_END = 3  # characters: every tenth name ends with a given letter
_SHORTEST_NUMBER = 4  # digits: a shorter number is a rank, and no beginning of a date


class Known(Struct, frozen=True, kw_only=True):
    """A run that goes on here, or that has left its folder."""

    run_id: str
    script: str = ""  # the program, as it was named; "": not known
    began: float = 0.0  # seconds since 1970
    folder: str = ""  # of the whole run; "": nothing is kept
    replies: RunReplies | None = None  # None: it does not run here

    @property
    def name(self) -> str:
        """The name that people see and type."""
        return folders.short(self.run_id)

    @property
    def program(self) -> str:
        """The name of the script alone."""
        return os.path.basename(self.script) or self.script

    def age(self, now: float) -> str:
        """Say since when it runs, or how long ago it began."""
        if self.replies is not None and self.replies.run is None:
            return "does not answer"
        if not self.began:
            return ""
        for_how_long = duration(now - self.began)
        return f"running for {for_how_long}" if self.replies is not None else f"began {for_how_long} ago"


def name_of(replies: RunReplies) -> str:
    """Return the whole name of a run that runs here, as that of its folder, which no other has, unless --log-dir has another."""
    if replies.place.name == run_socket.NAME:
        return fields.line(os.path.basename(whole(replies.place.folder)))
    return fields.line(replies.run.run_id if replies.run is not None else replies.place.name.rpartition(".")[0])


def whole(folder: str) -> str:
    """Return the folder of a run, given that of one of its nodes."""
    above, name = os.path.split(folder)
    # a run may have the name node-1 itself
    return above if name.startswith(OF_A_NODE) and os.path.basename(above) != "runs" else folder


def of_running(replies: RunReplies) -> Known:
    """Return a run that has answered, or did not in time."""
    run = replies.run
    if run is None:
        return replace(of_folder(whole(replies.place.folder)), run_id=name_of(replies), replies=replies)
    known = Known(run_id=name_of(replies), replies=replies, folder=whole(run.folder))
    try:
        script = shlex.split(run.command)[0]
    except (ValueError, IndexError):  # the command was cut
        script = run.command.partition(" ")[0]
    return replace(known, script=fields.line(script), began=time.time() - run.seconds)


def of_folder(folder: str) -> Known:
    """Return the run that has left this folder; of one that wrote no events only its name and when it was made."""
    known = Known(run_id=fields.line(os.path.basename(folder)), folder=folder)
    started = start_of(folder)
    script, began = started.get("program"), started.get("at")
    if not isinstance(began, float | int) or not 0 < began < time.time():
        try:
            began = os.stat(folder).st_mtime
        except OSError:
            began = 0.0
    return replace(known, script=fields.line(script) if isinstance(script, str) else "", began=began)


def start_of(folder: str) -> dict[str, Any]:
    """Return the event with which the job in this folder started; empty if there is none."""
    for part in sorted(parts_of(folder)):
        with suppress(OSError, ValueError, RecursionError), open_regular(f"{part}/events.jsonl") as file:
            for text in file.read(_HEAD).split(b"\n")[:-1]:
                event = json.loads(text)
                if isinstance(event, dict) and event.get("event") == "job_started":
                    return event
    return {}


# --- which is meant


def meant(typed: str, runs: Sequence[Known]) -> list[Known]:
    """Return the runs that fit best: by their whole name, their short name, the script, or a part of the name, in this order.

    A script fits by its path, its name, or that without `.py`; a part is a beginning, or an end of three characters or more. A
    number of up to three digits is no part: whoever types it means a rank.
    """
    is_part = not (typed.isdigit() and len(typed) < _SHORTEST_NUMBER)
    kinds: tuple[Callable[[Known], bool], ...] = (
        lambda run: run.run_id == typed,
        lambda run: run.name == typed.lower(),
        lambda run: bool(run.script) and typed in (run.script, run.program, run.program.removesuffix(".py")),
        lambda run: is_part and (run.run_id.startswith(typed) or run.name.startswith(typed.lower())),
        lambda run: is_part and len(typed) >= _SHORTEST_END and run.run_id.endswith(typed.lower()),
    )
    for fits in kinds:
        if found := [run for run in runs if fits(run)]:
            return found
    return []


def newest_first(runs: Iterable[Known]) -> list[Known]:
    """Return the runs in the order in which they are listed: those that run, then the others, each the newest first."""
    return sorted(runs, key=lambda run: (run.replies is None, -run.began, run.run_id))


def several(what: str, runs: Iterable[Known], verb: str, *options: str) -> LaunchError:
    """Return the error where several runs could be meant: it lists name, script and age of each; `options` were typed, too."""
    listed, now = newest_first(runs), time.time()
    names = list(_unlike(listed))
    rows = [(name, run.program, run.age(now)) for name, run in zip(names, listed, strict=True)][:_SHOWN]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    lines += [f"and {len(listed) - _SHOWN} more"] if len(listed) > _SHOWN else []
    typed = shlex.join(("ddplaunch", verb, names[0], *options))
    return LaunchError("\n  ".join([f"{what}:", *lines]), hint=f"name one: `{typed}`")


def _unlike(runs: Sequence[Known]) -> Iterator[str]:
    """Return for each run a name that no other of them has: the shortest of its names, or its folder."""
    for run in runs:
        names = (run.name, run.run_id, run.folder or run.run_id)
        yield next(
            (
                name
                for at, name in enumerate(names[:2])
                if sum((each.name, each.run_id)[at] == name for each in runs) == 1
            ),
            names[2],
        )


def heading(run: Known) -> str:
    """Say which run is shown: "k7qx, train.py, running for 3 min"."""
    return ", ".join(filter(None, (run.name, run.program, run.age(time.time()))))
