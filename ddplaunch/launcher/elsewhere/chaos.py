"""Injects the faults of --chaos into a simulated job; runs in the command, whose descendants all workers and agents are."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from functools import partial

from ddplaunch.launcher.tell.reporter import Reporter
from ddplaunch.reach.connections import HostConnection
from ddplaunch.spec.job import Fault
from ddplaunch.system.loop.loop import Loop
from ddplaunch.system.process.tree import Process, descendants, kill_at_once, look, signal_process

SLOW_INTERVAL = 0.05  # seconds for which a worker that is slowed down runs, then is stopped


class Chaos:
    """Injects the faults into the workers and nodes that are reported to it."""

    def __init__(
        self, loop: Loop, faults: Sequence[Fault], nodes: Sequence[HostConnection], reporter: Reporter
    ) -> None:
        """Do nothing yet; `nodes` are the connections to the agents, by node rank, and `reporter` shows what was done."""
        self._faults = faults
        self._has_begun = False  # all workers of the first generation have run: the times of the faults count from then
        self._nodes = nodes
        self._reporter = reporter
        self._workers: dict[int, Process] = {}  # by rank, of the latest generation
        self._world_size: int | None = None  # None before the first generation
        self._loop = loop
        self._slow: set[int] = set()  # ranks that are slowed down: all are stopped, then all run, in turn
        self._slow_ones_run = True  # else they are stopped, until `_toggle` is due
        self._toggle = loop.timer(None, self._toggle_slow)

    def on_first_generation(self, world_size: int) -> None:
        """Expect so many workers: the faults are due from the time when all of them run."""
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
        """Stop the slow workers, or continue them, and forget those that have ended. Called by the loop."""
        self._slow_ones_run = not self._slow_ones_run
        signum = signal.SIGCONT if self._slow_ones_run else signal.SIGSTOP
        self._slow = {rank for rank in self._slow if self._signal_group(rank, signum)}
        if self._slow:
            self._toggle.set(self._loop.now() + SLOW_INTERVAL)

    def _inject(self, fault: Fault) -> None:
        """Do one fault that --chaos asked for, and print what was done, or that its target does not run."""
        target = f"node-{fault.target}" if fault.kind == "node" else f"rank {fault.target}"
        match fault.kind:
            case "kill":
                was_done, text = self._signal_worker(fault.target, signal.SIGKILL), f"killed {target}"
            case "hang":
                was_done = self._signal_group(fault.target, signal.SIGSTOP)
                text = f"stopped {target}, which hangs from now on"
            case "slow":
                was_done, text = self._slow_down(fault.target), f"{target} runs at half its speed from now on"
            case _:
                was_done, text = self._kill_node(fault.target), f"killed all of {target}"
        if not was_done:
            which = f"node {fault.target}" if fault.kind == "node" else f"{fault.kind} {target}"
            text = f"{which}: it does not run"
        self._reporter.print(f"chaos: {text}")

    def _slow_down(self, rank: int) -> bool:
        """Stop a worker as the first of many times; return whether it was alive."""
        if not self._signal_group(rank, signal.SIGSTOP):
            return False
        self._slow.add(rank)
        self._slow_ones_run = False
        self._toggle.set(self._loop.now() + SLOW_INTERVAL)
        return True

    def _living_process(self, rank: int) -> Process | None:
        """Return the process of a worker; None if it has ended, or was not started."""
        known = self._workers.get(rank)
        now = look(known.pid) if known is not None else None
        if known is None or now is None or now.started != known.started or now.state in "ZX":
            return None
        return known

    def _signal_worker(self, rank: int, signum: int) -> bool:
        """Send a signal to a worker alone; return whether the worker was alive."""
        if (process := self._living_process(rank)) is not None:
            signal_process(process, signum)
        return process is not None

    def _signal_group(self, rank: int, signum: int) -> bool:
        """Send a signal to a worker and all of its process group; return whether the worker was alive."""
        process = self._living_process(rank)
        if process is None:
            return False
        try:
            os.killpg(process.pid, signum)  # a worker leads its group
        except ProcessLookupError:  # it has just been forked, and has no group yet
            signal_process(process, signum)
        return True

    def _kill_node(self, node_rank: int) -> bool:
        """Kill all processes of a node. Helpers that remove names of shared memory go on: a real node would lose them, too."""
        pid = self._nodes[node_rank].pid
        root = look(pid) if pid is not None else None
        if root is None or root.state in "ZX":
            return False
        kill_at_once(lambda: [root, *descendants(root.pid)])
        return True
