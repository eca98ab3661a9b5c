"""Compares what a page shows with what a command prints: names, numbers and order of what differs from run to run aside."""

import re
import socket
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

# in both; the name stands for what it matches
_NAMES = [
    (r"\d{8}-\d{6}-[0-9a-z]{4}", "RUN"),
    (r"_[0-9a-f]{8}\b", "_RUN"),
    (r"ddplaunch: [0-9a-z]{4}: (?=\d+ workers?\b)", "ddplaunch: RUN: "),
    (r"\b\d+(\.\d+)? (ms|s|min)\b( \d+ s)?", "TIME"),
    (r"\b\d+\.\d\ds\b( \(\d+:\d\d:\d\d\))?", "TIME"),  # pytest's, of more than a minute too
    (r"\bpid \d+", "pid PID"),
    (r"\b0x[0-9a-f]+\b", "ADDRESS"),
    (r"/home/ann/", "~/"),
    (r'File ".*/ddplaunch/tools/functions/__init__.py", line \d+', "File of launch()"),
    (r"\bport \d+", "port PORT"),
    (r"--master-port \d+", "--master-port PORT"),
    (r"\s+peak memory [\d.]+ \wiB", ""),
    (r"\bthreads +\d+ +\d+ usable CPUs?\b", "threads N N usable CPUs"),
    (r"(?m)(?<=GPU-.0000000)  +\d+(-\d+)?$", " CPUS"),
    (r"\bOMP_NUM_THREADS=\d+", "OMP_NUM_THREADS=N"),
    (r"(__init__|bootstrap)\.py:\d+", r"\1.py:LINE"),  # Python's, and one of ours that the reader does not edit
    (r"\bafter step \d+", "after step N"),
    # torch 2.13 sometimes aborts as it ends after an exception
    (r"\(killed by SIGABRT, after", "(exit status 1, after"),
    (r"\bexec (\S+ -P -m |\S*/)?ddplaunch ", "exec ddplaunch "),
]
# what became of the others depends on who was quicker, what a worker prints before the end on when that comes, and which
# lines are equal on whether their ranks are equally quick
_NOT_EACH_TIME = re.compile(
    r"  \S.* (lost contact with it.*|(was|were) stopped by SIGTERM in .*|finished with status 0)"
    r"|.*, start 0|.* attempt 0, port PORT|\[0-3\] .*"
    r"|rank \d failed first|  ranks? \S+ waits? in .*|  rank \d  +pid PID  cpu|  both ranks failed with the same error"
)


def plain(text: str) -> list[str]:
    """The lines of a text, with names in place of what differs from run to run."""
    for pattern, name in _NAMES:
        text = re.sub(pattern, name, text)
    return [" ".join(line.split()) for line in text.splitlines() if line.strip() and not _NOT_EACH_TIME.fullmatch(line)]


def missing(shown: Sequence[str], printed: str, home: Path) -> list[str]:
    """The lines that a page shows and the command did not print. A page may leave lines out; `...` stands for anything."""
    here = (
        printed.replace(str(home), "~")
        .replace(f" on {socket.gethostname()}", " on vm")
        .replace(sys.executable, "python")
    )
    left = Counter(plain(here))
    return list(_not_among(plain("\n".join(shown)), left))


def _not_among(lines: Sequence[str], left: Counter[str]) -> Iterator[str]:
    for line in lines:
        if line == "..." or line.startswith("... "):
            continue
        form = re.compile(".*".join(map(re.escape, line.split("..."))))
        found = next((other for other in left if form.fullmatch(other)), None)
        if found is None:
            yield line
        else:
            left[found] -= 1
            left += Counter()  # without what is used up
