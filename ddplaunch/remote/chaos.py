"""What --chaos breaks in a simulated job, and when. All processes are on this machine, and below this one."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence

from ddplaunch.process.tree import Process, descendants, look, signal_process
from ddplaunch.spec import Fault

BLINK = 0.05  # seconds that a worker which is slowed down runs, and does not run


class Schedule:
    """When which fault is due. Pure: times come in."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        self._faults = sorted(faults, key=lambda fault: fault.after)
        self._began: float | None = None

    def begin(self, at: float) -> None:
        """Start to count, the first time that this is called."""
        if self._began is None:
            self._began = at

    @property
    def deadline(self) -> float | None:
        """When the next fault is due, once the counting has started."""
        if self._began is None or not self._faults:
            return None
        return self._began + self._faults[0].after

    def due(self, now: float) -> list[Fault]:
        """Take out the faults whose time has come."""
        due: list[Fault] = []
        while (deadline := self.deadline) is not None and deadline <= now:
            due.append(self._faults.pop(0))
        return due


class Chaos:
    """Carries the schedule out on the workers and nodes that it is told of."""

    def __init__(self, faults: Sequence[Fault], nodes: Sequence[Callable[[], int | None]], say: Callable[[str], None]):
        """Prepare; `nodes` give the pid of each node's first process, by place; None if there is none."""
        self._schedule = Schedule(faults)
        self._nodes = nodes
        self._say = say
        self._workers: dict[int, Process] = {}  # by rank, of the latest generation
        self._world_size: int | None = None
        self._slow: set[int] = set()  # ranks
        self._blink_at: float | None = None
        self._runs = True  # the slow ones do

    def begun(self, world_size: int) -> None:
        """Expect a generation of so many workers."""
        self._world_size = world_size

    def started(self, rank: int, pid: int, now: float) -> None:
        """Learn of a worker."""
        if (process := look(pid)) is not None:
            self._workers[rank] = process
        if len(self._workers) == self._world_size:
            self._schedule.begin(now)

    @property
    def deadline(self) -> float | None:
        """When `expire` is to be called at the latest."""
        return min((at for at in (self._schedule.deadline, self._blink_at) if at is not None), default=None)

    def expire(self, now: float) -> None:
        """Break what is due."""
        for fault in self._schedule.due(now):
            self._break(fault, now)
        if self._blink_at is not None and now >= self._blink_at:
            self._runs = not self._runs
            self._slow = {
                rank for rank in self._slow if self._signal(rank, signal.SIGCONT if self._runs else signal.SIGSTOP)
            }
            self._blink_at = now + BLINK if self._slow else None

    def _break(self, fault: Fault, now: float) -> None:
        who = f"rank {fault.target}"
        match fault.kind:
            case "kill" if self._signal(fault.target, signal.SIGKILL, group=False):
                self._say(f"chaos: killed {who}")
            case "hang" if self._signal(fault.target, signal.SIGSTOP):
                self._say(f"chaos: stopped {who}, which hangs from now on")
            case "slow" if self._signal(fault.target, signal.SIGSTOP):
                self._slow.add(fault.target)
                self._runs, self._blink_at = False, now + BLINK
                self._say(f"chaos: {who} runs at half its speed from now on")
            case "node" if self._lose(fault.target):
                self._say(f"chaos: killed all of node {fault.target}")
            case _:
                what = f"node {fault.target}" if fault.kind == "node" else who
                self._say(f"chaos: {fault.kind} {what}: it does not run")

    def _signal(self, rank: int, signum: int, *, group: bool = True) -> bool:
        """Signal a worker, with what it has started if `group`; say whether it was there."""
        known = self._workers.get(rank)
        now = look(known.pid) if known is not None else None
        if known is None or now is None or now.started != known.started or now.state in "ZX":
            return False
        try:
            if group:
                os.killpg(known.pid, signum)  # a worker leads its group
                return True
        except ProcessLookupError:  # it has just been forked
            pass
        signal_process(known, signum)
        return True

    def _lose(self, place: int) -> bool:
        """Kill everything of a node at once, as far as one process can: first nothing runs any more, then all is gone."""
        pid = self._nodes[place]()
        root = look(pid) if pid is not None else None
        if root is None or root.state in "ZX":
            return False
        signal_process(root, signal.SIGSTOP)
        for process in descendants(root.pid):
            signal_process(process, signal.SIGSTOP)
        everything = [*descendants(root.pid), root]
        for process in everything:
            signal_process(process, signal.SIGKILL)
        return True
