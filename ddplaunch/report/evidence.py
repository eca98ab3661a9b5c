"""The facts about a worker's end, and the predicates on them of the table of causes. Pure; advises nothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from msgspec import Struct

from ddplaunch.supervise.first_failure import failure_text, follows, searchable
from ddplaunch.supervise.outcome import WorkerExit

_HANDLED = "\nDuring handling of the above exception, another exception occurred:\n"
_FRAME = r'^  File "[^"\n]{1,999}", line \d{1,9}.*\n(?:    .*\n)*'
_RENDEZVOUS = r'torch/distributed/rendezvous\.py"|\bDist(?:Network|Store)Error: |\[c10d\]|\bTCPStore\('
_PORT = r"\bport: (\d{1,5})\b|connect to \([^()\n]{1,99}, (\d{1,5})\)"
_SMALL_SHM = 64 * 1024**2  # bytes; what Docker gives a container by default


class Evidence(Struct, frozen=True, kw_only=True):
    """What is known about the node of the first failure."""

    oom_kills: int = 0  # processes that the kernel killed for memory since the job began
    oom_kills_of_machine: bool = False  # not of the job's cgroup alone, which does not tell
    shm_size: int | None = None  # bytes of /dev/shm; None: not known
    shm_free: int | None = None  # bytes, when the worker had ended
    interpreter: str | None = None  # that ran the workers
    workers: int = 1  # of the job
    master_port: int | None = None  # of the generation; None: not known
    port_given: bool = False  # the user has chosen it
    debugging: bool = False  # a worker has the terminal (--debug)
    chaos: bool = False  # --chaos was to kill this worker
    preempted: bool = False  # the scheduler has preempted the job
    walltime_over: bool = False  # the time that the scheduler granted is over

    @property
    def shm_full(self) -> bool:
        """Whether /dev/shm is full."""
        return self.shm_free is not None and self.shm_size is not None and self.shm_free < self.shm_size / 50

    @property
    def shm_small(self) -> bool:
        """Whether /dev/shm is so small that it may have been full: a dead worker's part of it is free again at once."""
        return self.shm_size is not None and self.shm_size <= _SMALL_SHM


Found = Mapping[str, str]  # values for the advice
Predicate = Callable[[WorkerExit, Evidence], Found | None]


class Row(Struct, frozen=True):
    """One line of the table of causes."""

    name: str
    predicate: Predicate
    advice: str


def matches(pattern: str) -> Predicate:
    """Fit by what the failure says, with all that led to it; the groups that took part are values for the advice.

    The lines of code in a traceback do not count: they may name an error that they handle.
    """
    return lambda end, _: _search(pattern, failure_text(end), without=_FRAME)


def says_itself(pattern: str) -> Predicate:
    """Return a test of what a failure says itself, or names as its cause; an exception handled before does not count.

    A program that tries to import a module and goes on without is not ended by that.
    """

    def fits(end: WorkerExit, _: Evidence) -> Found | None:
        error = end.error
        if error is not None and error.type != "SystemExit":
            last = error.traceback.rpartition(_HANDLED)[2]
            return _search(pattern, f"{error.type}: {error.message}\n{last}", without=_FRAME)
        return _search(pattern, failure_text(end).rpartition(_HANDLED)[2], without=_FRAME)

    return fits


def code_matches(pattern: str) -> Predicate:
    """Fit by the whole text of the failure, the files and lines of code in its traceback included."""
    return lambda end, _: _search(pattern, failure_text(end))


def of_rendezvous(end: WorkerExit, facts: Evidence) -> Found | None:
    """Fit a failure of torch's rendezvous at MASTER_ADDR and MASTER_PORT, not that of another connection of the program.

    torch's store raises exceptions of its own, or its frames are in the traceback; a port in the text has to be MASTER_PORT. gloo
    connects the ranks with each other, at other addresses.
    """
    text = searchable(failure_text(end))
    if not text or "gloo/transport" in text or not re.search(_RENDEZVOUS, text):
        return None
    ports = {int(one or other) for one, other in re.findall(_PORT, text)}
    return {} if facts.master_port is None or not ports or facts.master_port in ports else None


def stderr_matches(pattern: str) -> Predicate:
    """Fit by the end of its stderr, beside the exception."""
    return lambda end, _: _search(pattern, end.stderr_tail)


def _search(pattern: str, text: str, without: str = "") -> Found | None:
    """Return what `pattern` found in a text: the whole line, and each named group; None if nothing."""
    if not text:
        return None  # many workers say nothing, and to compile all patterns takes 6 ms of the end of a job
    text = searchable(text)
    if without:
        text = re.sub(without, "", text, flags=re.MULTILINE)
    match = re.search(pattern, text, re.MULTILINE)
    if match is None:
        return None
    end = text.find("\n", match.end())
    line = text[text.rfind("\n", 0, match.end()) + 1 : end if end >= 0 else None]
    return {"line": line} | {name: found for name, found in match.groupdict().items() if found}


def killed_by(*signals: int) -> Predicate:
    """Fit an end by one of these signals, unless ddplaunch sent it."""
    return lambda end, _: {} if end.signal in signals and end.signal != end.stopped_with else None


def both(first: Predicate, second: Predicate) -> Predicate:
    """Fit where both do."""

    def fits(end: WorkerExit, facts: Evidence) -> Found | None:
        one, other = first(end, facts), second(end, facts)
        return None if one is None or other is None else {**one, **other}

    return fits


def fact(holds: Callable[[Evidence], bool]) -> Predicate:
    """Fit by the facts alone."""
    return lambda _, facts: {} if holds(facts) else None


def no_exception(end: WorkerExit, _: Evidence) -> Found | None:
    """Fit an end without an exception: a signal from outside raises none."""
    return {} if end.error is None else None


def lost_peer(end: WorkerExit, _: Evidence) -> Found | None:
    """Fit a failure that merely follows another."""
    return {} if follows(end) else None
