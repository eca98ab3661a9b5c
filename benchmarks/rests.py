"""What launcher and workers cost while nothing happens: memory and wake-ups."""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from bed import Bed, Beside, Figure, program

_WATCHED = 3.0  # seconds
_PATIENCE = 60.0  # seconds until everything must have come to rest
_WORKERS = 2
_WITH_TORCH = 8  # workers that have imported it


def rest(bed: Bed) -> Iterator[Figure]:
    """Two workers sleep."""
    ours = _watch(bed, bed.ddplaunch, launchers=2)  # front and agent
    theirs = _watch(bed, [*bed.torchrun, "--standalone"], launchers=1)
    yield Figure(
        name="at rest: memory of the launcher (RSS)",
        value=ours.rss,
        unit="MB",
        target=45,
        how=f"front and agent added up, so shared pages count twice; PSS {ours.pss:.0f} MB; torchrun {theirs.rss:.0f} MB",
        beside=Beside("memory of the launcher", ours.rss, theirs.rss, "MB"),
    )
    yield Figure(
        name=f"at rest: wake-ups in {_WATCHED:g} s",
        value=ours.wakeups,
        unit="",
        target=1,  # each 10 s the agent looks whether workers move
        how=f"voluntary context switches; torchrun {theirs.wakeups}",
    )


def memory(bed: Bed) -> Iterator[Figure]:
    """Eight workers have imported torch, and do not train yet."""
    forked, fresh = (_held(bed, method) for method in ("forkserver", "spawn"))
    yield Figure(
        name=f"import torch, {_WITH_TORCH} workers: memory of forked to fresh ones (PSS)",
        value=forked / fresh,
        unit="x",
        target=0.5,
        how=f"all together {forked:.0f} MB, fresh processes {fresh:.0f} MB",
    )


def _held(bed: Bed, method: str) -> float:
    with tempfile.TemporaryDirectory(dir=bed.folder) as folder:
        options = ["--start-method", method, "--nproc-per-node", str(_WITH_TORCH)]
        command = bed.start([*bed.ddplaunch, *options, program("holds_torch"), folder])
        try:
            wait_until(lambda: len(list(Path(folder).iterdir())) == _WITH_TORCH, "the workers to import torch", command)
            time.sleep(1)  # the fork server has ended by then: its pages are theirs
            return sum(_kilobytes(int(file.name), "smaps_rollup", "Pss") for file in Path(folder).iterdir()) / 1e3
        finally:
            command.terminate()
            command.wait()


class _Rest:
    """What the processes of a launcher are and do while its workers sleep."""

    def __init__(self, pids: Sequence[int]) -> None:
        self.pss = sum(_kilobytes(pid, "smaps_rollup", "Pss") for pid in pids) / 1e3  # shared pages divided
        self.rss = sum(_kilobytes(pid, "smaps_rollup", "Rss") for pid in pids) / 1e3  # shared pages counted each time
        _settle(pids)
        before = _switches(pids)
        time.sleep(_WATCHED)
        self.wakeups = _switches(pids) - before


def _watch(bed: Bed, launcher: Sequence[str], *, launchers: int) -> _Rest:
    with tempfile.TemporaryDirectory(dir=bed.folder) as folder:
        command = bed.start([*launcher, "--nproc-per-node", str(_WORKERS), program("waits"), folder])
        try:
            wait_until(lambda: len(list(Path(folder).iterdir())) == _WORKERS, "the workers to run", command)
            pids = [command.pid]
            while len(pids) < launchers:
                pids += _children(pids[-1])
            return _Rest(pids)
        finally:
            command.terminate()
            command.wait()


def _settle(pids: Sequence[int]) -> None:
    """Wait until the start is over: 1.5 s without a switch, since some checks of it come a second apart; some never rest."""
    for _ in range(5):
        before = _switches(pids)
        time.sleep(1.5)
        if _switches(pids) == before:
            return


def wait_until(condition: Callable[[], bool], what: str, command: subprocess.Popen[bytes]) -> None:
    """Wait until something is so while a command runs."""
    give_up = time.monotonic() + _PATIENCE
    while not condition():
        assert command.poll() is None, f"the command ended with {command.returncode} while waiting for {what}"
        assert time.monotonic() < give_up, f"waited {_PATIENCE:g} s in vain for {what}"
        time.sleep(0.01)


def _switches(pids: Sequence[int]) -> int:
    return sum(_kilobytes(pid, "status", "voluntary_ctxt_switches") for pid in pids)


def _kilobytes(pid: int, file: str, name: str) -> int:
    for line in Path(f"/proc/{pid}/{file}").read_text().splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0])
    raise AssertionError(f"/proc/{pid}/{file} has no {name}")


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
