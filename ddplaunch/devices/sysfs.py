"""Reads the small text files of /sys and /proc; a file that is missing or forbidden is None, never an error."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from typing import TypeAlias

from msgspec import Struct

Root: TypeAlias = str | os.PathLike[str]  # the top of the file system that is looked at, "/" except in tests

_RANGE = r"(\d{1,5})(?:-(\d{1,5}))?"  # Linux has fewer than 100,000 CPUs; a malformed range must not fill the memory


def read(root: Root, path: str) -> str | None:
    """Return the text of `path` (absolute, below `root`) without surrounding white space, None if it cannot be read."""
    try:
        with open(under(root, path), encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return None


def names(root: Root, path: str, *, prefix: str = "") -> list[str]:
    """Return what a folder holds under `prefix`, in the order of the numbers in the names; [] if it cannot be read."""
    try:
        found = [name for name in os.listdir(under(root, path)) if name.startswith(prefix)]
    except OSError:
        return []
    return sorted(found, key=lambda name: (int(digits) if (digits := name[len(prefix) :]).isdigit() else 0, name))


def exists(root: Root, path: str) -> bool:
    """Whether there is such a path."""
    return os.path.exists(under(root, path))


def under(root: Root, path: str) -> str:
    """Return the absolute `path` as it lies below `root`."""
    return os.path.join(root, path.lstrip("/"))


def number(text: str | None, default: int) -> int:
    """Return the number a file holds, `default` if it holds none."""
    try:
        return int(text or "")
    except ValueError:
        return default


def cpulist(text: str) -> tuple[int, ...]:
    """Return the numbers of a text in the kernel's list format ("0-3,8,10-11"), ascending; () if it is no such list."""
    found: set[int] = set()
    for part in text.strip().split(","):
        matched = re.fullmatch(_RANGE, part, re.ASCII)
        numbers = range(int(matched[1]), int(matched[2] or matched[1]) + 1) if matched else range(0)
        if not numbers:
            return ()
        found.update(numbers)
    return tuple(sorted(found))


def read_cpulist(root: Root, path: str) -> tuple[int, ...]:
    """Return the CPUs that a file lists; () if it cannot be read or is no list."""
    return cpulist(read(root, path) or "")


class Mount(Struct, frozen=True):
    """A line of /proc/self/mountinfo: proc_pid_mountinfo(5)."""

    top: str  # what of the file system is mounted there
    point: str  # where
    kind: str  # "cgroup2", "nfs4"
    options: tuple[str, ...]  # of the file system


def mounts(lines: Iterable[str]) -> Iterator[Mount]:
    """Read lines of that file; what is no such line is left out."""
    for line in lines:
        mount, separator, file_system = line.strip("\n").partition(" - ")
        fields, (kind, *rest) = mount.split(" "), file_system.split(" ")
        if separator and len(fields) > 4:
            yield Mount(_unescaped(fields[3]), _unescaped(fields[4]), kind, tuple(rest[-1].split(",")) if rest else ())


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), text) if "\\" in text else text
