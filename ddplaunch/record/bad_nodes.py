"""Nodes whose machine has failed, remembered for a week, in a file of the state folder that all hosts with this home share.

Each line is one failure. Whoever adds one holds a lock, and leaves out what is old, so the file stays small. A reader needs no
lock: a line that another host is writing cannot be read, and is left out like any other that is none of ours.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from shlex import quote
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from ddplaunch.plan.cluster.endpoints import is_same_host
from ddplaunch.record.folders import BAD_NODES, make_all
from ddplaunch.record.run import lines_of
from ddplaunch.system.errors import LaunchError
from ddplaunch.system.fields import Host, Piece
from ddplaunch.system.net.addresses import leads_to
from ddplaunch.system.process.files import ask_disk, open_regular, time_of_disk
from ddplaunch.system.words import count, duration, some, why_failed

KINDS = {
    "lost": "was lost",
    "gpu": "had a fault of a GPU",
    "memory": "ran out of memory",
    "unfit": "was found unfit",
    "slow": "was slow in a check",
    "unreachable": "could not be reached",
}
OF_DOCTOR = ("slow", "unreachable")  # no longer so, once the doctor finds nothing wrong with the node
KEPT = 7 * 86400.0  # seconds
_MOST_FAILURES = 500  # failures
_LARGEST_FILE = 1 << 20  # bytes of the file that are read
_AHEAD = 3600.0  # seconds that the clock of another host may be ahead
_DISK_WITHIN = 1.0  # seconds that the disk has to answer


class Failure(Struct, frozen=True, kw_only=True):
    """A failure that was the machine's."""

    host: Host
    kind: Annotated[str, Meta(max_length=20)]  # of KINDS
    at: Annotated[float, Meta(ge=0, le=1e12)]  # seconds of the time of day
    run: Piece = ""  # its name; "" if the doctor has found it
    why: Piece = ""  # in a line: "silent for 10 s"
    in_slurm: bool = False


def read(path: str, now: float) -> list[Failure]:
    """Return the failures that are remembered, the oldest first; none if there is no such file.

    Raises:
        LaunchError: the file cannot be used, or its disk hangs.
    """
    return ask_disk(partial(_read, path, now), path, BAD_NODES)


def _read(path: str, now: float) -> list[Failure]:
    """Return the failures in the file that are not too old, the oldest first. Raises LaunchError: it cannot be used."""
    try:
        with open_regular(path) as file:
            owner, text = os.fstat(file.fileno()).st_uid, file.read(_LARGEST_FILE)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise _unusable(path, "a symbolic link" if error.errno == errno.ELOOP else why_failed(error)) from None
    if owner != os.getuid():
        raise _unusable(path, f"it belongs to user {owner}")
    found = _decoded(text)
    if text and not found:
        raise _unusable(path, "no line of it was written by ddplaunch")
    return _recent(found, now)


def _unusable(path: str, why: str) -> LaunchError:
    return LaunchError(
        f"{BAD_NODES} cannot be used: {path}: {why}",
        hint=f"`mv {quote(path)} {quote(f'{path}.old')}` begins a new list",
    )


def _decoded(text: bytes) -> list[Failure]:
    """Return the lines that are failures."""
    return [one for one in lines_of(text, Failure) if one is not None]


def _recent(failures: Sequence[Failure], now: float) -> list[Failure]:
    kept = [one for one in failures if one.kind in KINDS and now - KEPT <= one.at <= now + _AHEAD]
    return sorted(kept, key=lambda one: one.at)[-_MOST_FAILURES:]


def _without_old(failures: Sequence[Failure], now: float) -> list[Failure]:
    """Leave out what is too old. What is still to come stays, for this clock may be behind."""
    return sorted((one for one in failures if one.kind in KINDS and one.at >= now - KEPT), key=lambda one: one.at)


def _agreed(now: float, path: str) -> float:
    """Return the earlier of this time and that of the disk: a clock that is ahead is to make nobody else's failures old."""
    return min(now, time_of_disk(os.path.dirname(path)))


def remember(path: str, failures: Sequence[Failure], now: float, well: Sequence[str] = ()) -> None:
    """Add these as `add` does, as far as that is possible; a disk that hangs holds nobody up for longer than a second."""
    from ddplaunch.system.process.ask import AskedEnded, ask

    with suppress(OSError, AskedEnded):  # of which TimeoutError is one
        ask(partial(_remember, path, failures, now, well), _DISK_WITHIN)


def _remember(path: str, failures: Sequence[Failure], now: float, well: Sequence[str]) -> None:
    if failures:
        make_all(os.path.dirname(path))
    elif not os.path.lexists(path):
        return
    add(path, failures, _agreed(now, path), well)


def remember_suspects(path: str, failures: Sequence[tuple[Failure, str | None]], now: float) -> None:
    """Remember failures of nodes that gave their names themselves, each with the address from which it reached this host.

    A failure is dropped unless its name leads to that address: a node could call itself like a healthy one. A failure without
    an address has a name from somebody else, such as the user. As with `remember`, a disk that hangs holds nobody up.
    """
    from ddplaunch.system.process.ask import AskedEnded, ask

    def remember_proven() -> None:
        proven = [one for one, address in failures if address is None or leads_to(one.host, address)]
        if proven:
            _remember(path, proven, now, well=())

    with suppress(OSError, AskedEnded):
        ask(remember_proven, _DISK_WITHIN)


def add(path: str, failures: Sequence[Failure], now: float, well: Sequence[str] = ()) -> None:
    """Remember these too, and forget what the doctor has found before on the hosts `well`.

    Raises: OSError.
    """

    def change(known: list[Failure]) -> list[Failure]:
        return [one for one in known if not (one.kind in OF_DOCTOR and among([one], well))] + list(failures)

    make_all(os.path.dirname(path))
    _change(path, change, now)


def forget(path: str, host: str, now: float) -> int:
    """Forget the failures of a host, by its full or short name; return how many these were.

    Raises OSError, and LaunchError as `read` does.
    """
    return ask_disk(partial(_forget, path, host, now), path, BAD_NODES)


def _forget(path: str, host: str, now: float) -> int:
    forgotten = [one for one in _read(path, now) if is_same_host(one.host, host)]
    if forgotten:
        _change(path, lambda known: [one for one in known if not is_same_host(one.host, host)], _agreed(now, path))
    return len(forgotten)


def _change(path: str, change: Callable[[list[Failure]], list[Failure]], now: float) -> None:
    """Replace the failures in the file by what `change` makes of those that are not old; other jobs that do the same wait."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(fd, "r+b") as file:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(fd, fcntl.LOCK_EX)
        kept = change(_without_old(_decoded(file.read(_LARGEST_FILE)), now))[-_MOST_FAILURES:]
        text = b"".join(msgspec.json.encode(one) + b"\n" for one in kept)
        file.seek(0)
        file.write(text)  # and cut the file only then: a reader, who takes no lock, never finds the file empty
        file.flush()
        file.truncate(len(text))


def among(failures: Iterable[Failure], hosts: Iterable[str]) -> dict[str, list[Failure]]:
    """Return which of these hosts have failed, by the names given here."""
    listed = list(failures)
    found = {host: [one for one in listed if is_same_host(one.host, host)] for host in hosts}
    return {host: those for host, those in found.items() if those}


def warning(bad: Mapping[str, Sequence[Failure]], now: float, *, may_avoid: bool = True) -> str:
    """Say which of the nodes of a job have failed, and what to type; `may_avoid`: the job could leave them out."""
    named = some((f"{host} {summary(those, now)}" for host, those in bad.items()), 3)
    pronoun = "it" if len(bad) == 1 else "them"
    avoids = f"`--avoid-bad-nodes` leaves {pronoun} out where others are enough, " if may_avoid else ""
    return f"{named}. {avoids}`ddplaunch doctor --forget {next(iter(bad))}` forgets it"


def table(failures: Sequence[Failure], now: float) -> list[tuple[str, str, str, str]]:
    """Return a row for each node that has failed: its name, what happened last and when, the run, why."""
    hosts = dict.fromkeys(one.host for one in reversed(failures))
    found = among(failures, hosts)
    return [(host, summary(found[host], now), found[host][-1].run, found[host][-1].why) for host in hosts]


def summary(failures: Sequence[Failure], now: float) -> str:
    """Say what failed on one node: "was lost 2 h ago, 3 failures in all"."""
    last = failures[-1]
    more = f", {count(len(failures), 'failure')} in all" if len(failures) > 1 else ""
    return f"{KINDS[last.kind]} {duration(max(0.0, now - last.at))} ago{more}"
