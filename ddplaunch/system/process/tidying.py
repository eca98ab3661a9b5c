"""Processes that remove what others have shared by name, such as a file in /dev/shm, once these others have ended.

They end by themselves then, so signals spare them; killed with the others, they leave the names, and a restart that makes the
same names fails. How long they have is decided elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from signal import SIGCONT, SIGINT, SIGKILL, SIGSTOP, SIGTERM, SIGWINCH

from ddplaunch.system.process.tree import Process, content, ends_within, signal_process

# torch's manager of shared memory (torch/lib/libshm/manager.cpp) ends 2 s after the last process that it serves. NVIDIA's MPS
# ends on `quit`. A name in /proc has 15 characters.
_NAMES = ("torch_shm_manag", "nvidia-cuda-mps")
# of Python, loky and multiprocess: ends when no process can write to its pipe, removes first what was not unregistered there
_TRACKER = re.compile(rb"\0-c\0from [\w.]*resource_tracker import main; ?main\(")
# a tracker ignores SIGTERM and SIGINT; the others are for all of a group, or do nothing to a program that does not handle them
HARMLESS = frozenset((SIGTERM, SIGINT, SIGSTOP, SIGCONT, SIGWINCH))


def tidies(process: Process) -> bool:
    """Return whether a process cleans up after others, and then ends by itself."""
    if process.name in _NAMES:
        return True
    # the command line is memory of the process, and a page fault that hangs, or another thread, may have locked that; a tracker
    # has one thread, which reads its pipe
    if process.threads != 1 or process.state not in "SRT":
        return False
    try:
        return _TRACKER.search(content(f"/proc/{process.pid}/cmdline")) is not None
    except OSError:
        return False


def signal_leftovers(signum: int, left: Iterable[Process], *, sparing: bool) -> None:
    """Send each of these processes a signal; `sparing`: those that tidy only go on, in case they are stopped."""
    for process in left:
        if sparing and tidies(process):
            let_tidy(process)
        else:
            signal_process(process, signum)


def let_tidy(process: Process) -> None:
    """Have a process that tidies go on, if it is stopped."""
    if process.state == "T":
        signal_process(process, SIGCONT)


def kill_at_once(find: Callable[[], Iterable[Process]]) -> None:
    """Kill the processes that `find` finds, but for those that tidy: all are stopped first, so that none starts another."""
    for process in find():
        signal_process(process, SIGSTOP)
    signal_leftovers(SIGKILL, find(), sparing=True)


def end_all(left: Collection[Process], within: float) -> None:
    """Kill processes, and wait for each so many seconds at most; those that tidy are killed only if they have not ended then."""
    for sparing in (True, False):
        signal_leftovers(SIGKILL, left, sparing=sparing)
        for process in left:
            ends_within(process.pid, within)


def others_by_group(processes: Iterable[Process]) -> dict[int, tuple[Process, ...]]:
    """Return the process groups in which a process tidies, each with its other members, as far as `processes` has them."""
    members: dict[int, list[Process]] = {}
    for process in processes:
        members.setdefault(process.group, []).append(process)
    others = {group: tuple(one for one in found if not tidies(one)) for group, found in members.items()}
    return {group: found for group, found in others.items() if len(found) < len(members[group])}
