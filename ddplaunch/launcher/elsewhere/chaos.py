"""Which faults --chaos injects into a simulated job, and when. All its processes are descendants of this one."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from functools import partial

from ddplaunch.reach.connections import HostConnection
from ddplaunch.spec.job import Fault
from ddplaunch.system.loop.loop import Loop
from ddplaunch.system.process.tree import Process, descendants, kill_at_once, look, signal_process

SLOW_INTERVAL = 0.05  # seconds for which a worker that is slowed down runs, then is stopped


class Chaos:
    """Injects the faults into the workers and nodes that are reported to it."""

    def __init__(
        self, loop: Loop, faults: Sequence[Fault], nodes: Sequence[HostConnection], notify: Callable[[str], None]
    ) -> None:
        """Prepare; `nodes` are the connections to the agents, by node rank."""
        self._faults = faults
        self._has_begun = False  # the workers of the first generation ran
        self._nodes = nodes
        self._notify = notify
        self._workers: dict[int, Process] = {}  # by rank, of the latest generation
        self._world_size: int | None = None
        self._slow: set[int] = set()  # ranks
        self._loop = loop
        self._toggle = loop.timer(None, self._toggle_slow)  # of the slow ones
        self._runs = True  # the slow ones do

    def begun(self, world_size: int) -> None:
        """Expect a generation of so many workers."""
        self._world_size = world_size

    def started(self, rank: int, pid: int) -> None:
        """Add a worker of this generation."""
        if (process := look(pid)) is not None:
            self._workers[rank] = process
        if not self._has_begun and len(self._workers) == self._world_size:
            self._has_begun = True
            for fault in self._faults:
                self._loop.timer(self._loop.now() + fault.after, partial(self._inject, fault))

    def _toggle_slow(self) -> None:
        """Stop the slow workers, or continue them."""
        self._runs = not self._runs
        self._slow = {
            rank for rank in self._slow if self._signal(rank, signal.SIGCONT if self._runs else signal.SIGSTOP)
        }
        if self._slow:
            self._toggle.set(self._loop.now() + SLOW_INTERVAL)

    def _inject(self, fault: Fault) -> None:
        """Do one fault that --chaos asked for, and print what was done."""
        worker = f"rank {fault.target}"
        match fault.kind:
            case "kill" if self._signal(fault.target, signal.SIGKILL, group=False):
                self._notify(f"chaos: killed {worker}")
            case "hang" if self._signal(fault.target, signal.SIGSTOP):
                self._notify(f"chaos: stopped {worker}, which hangs from now on")
            case "slow" if self._signal(fault.target, signal.SIGSTOP):
                self._slow.add(fault.target)
                self._runs = False
                self._toggle.set(self._loop.now() + SLOW_INTERVAL)
                self._notify(f"chaos: {worker} runs at half its speed from now on")
            case "node" if self._kill_node(fault.target):
                self._notify(f"chaos: killed all of node-{fault.target}")
            case _:
                which = f"node {fault.target}" if fault.kind == "node" else f"{fault.kind} {worker}"
                self._notify(f"chaos: {which}: it does not run")

    def _signal(self, rank: int, signum: int, *, group: bool = True) -> bool:
        """Send a worker a signal, or, with `group`, all of its process group; return whether the worker was alive."""
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

    def _kill_node(self, node_rank: int) -> bool:
        """Kill all processes of a node. Helpers that remove names of shared memory go on: a real node would lose them, too."""
        pid = self._nodes[node_rank].pid
        root = look(pid) if pid is not None else None
        if root is None or root.state in "ZX":
            return False
        kill_at_once(lambda: [root, *descendants(root.pid)])
        return True
