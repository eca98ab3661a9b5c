"""The machines under the simulated job: time, which ways are cut, and processes, each of which is the loop of its parts.

Stands for kernels. Nothing here reads a real clock; all chance comes from the seed. Time is that of CLOCK_BOOTTIME, the same on
all machines; a process has a clock of its own, which leaves out when it was stopped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from math import inf
from random import Random
from typing import TYPE_CHECKING, Any

from ddplaunch.launcher.decide.job import KILLED_WITHIN
from ddplaunch.system.loop.loop import Timer
from tests.simulator.scenario import COMMAND, Scenario
from tests.simulator.training import Run, Storage, Violation, Worker

if TYPE_CHECKING:
    from tests.simulator.arbiters import Arbiter
    from tests.simulator.network import Listener, Peer

_LATE = 1.0  # seconds of a pause that a clock may take for time


def address_of(number: int) -> str:
    """Return the numeric address of a machine."""
    return "10.0.1.1" if number == COMMAND else f"10.0.0.{number + 1}"


class BootTime:
    """CLOCK_BOOTTIME of all machines, by which leases run."""

    def __init__(self, world: World) -> None:
        self._world = world

    def now(self) -> float:
        return self._world.now


class World:
    """The time, what is to happen, and all that there is."""

    def __init__(self, scenario: Scenario, trace: list[str] | None = None) -> None:
        """Prepare an empty world; what happens is appended to `trace`."""
        self.scenario = scenario
        self.dice = Random(scenario.seed + 1)
        self.now = 0.0
        self.boot_time = BootTime(self)
        self.machines: dict[int, Machine] = {}
        self.processes: list[Process] = []  # all that there have ever been
        self.arbiters: list[Arbiter] = []  # the same
        self.workers: list[Worker] = []  # those that live
        self.runs: dict[int, Run] = {}  # all generations, by term
        self.storage = Storage(self)
        self.listening: dict[tuple[str, int], Listener] = {}
        self.peers: list[Peer] = []  # that are open, on either side
        self.cut_until: dict[tuple[int, int], float] = {}  # from the first machine to the second
        self.slow_until: dict[frozenset[int], float] = {}
        self.port_taken_until = 0.0
        self.quiet_from = scenario.quiet_from
        self._trace = trace
        self._due: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._count = 0

    def monotonic(self) -> float:
        """Return the time, in place of the function of that name."""
        return self.now

    @property
    def arbiter(self) -> Arbiter | None:
        """The one that decides now."""
        return next((one for one in reversed(self.arbiters) if one.process.is_alive), None)

    def machine(self, number: int) -> Machine:
        if number not in self.machines:
            self.machines[number] = Machine(self, number)
        return self.machines[number]

    def at(self, when: float, call: Callable[..., object], *arguments: Any) -> None:
        self._count += 1
        heappush(self._due, (max(when, self.now), self._count, call, arguments))

    def soon(self, most: float, call: Callable[..., object], *arguments: Any) -> None:
        self.at(self.now + self.dice.random() * most, call, *arguments)

    def run(self, patience: float, is_over: Callable[[], bool]) -> bool:
        due, calls, since = self._due, 0, -1.0
        while due and due[0][0] <= self.quiet_from + patience:
            self.now, _, call, arguments = heappop(due)
            calls += 1
            if self.now > since + 0.01:
                calls, since = 0, self.now
            if calls > 5000:
                raise Violation(f"time goes on: {call} is called again and again")
            call(*arguments)
            if is_over():
                return True
        return False

    def note(self, who: object, what: object) -> None:
        if self._trace is not None:
            self._trace.append(f"{self.now:8.3f}  {who}: {what}")

    def is_cut(self, sender: int, receiver: int) -> bool:
        """Whether nothing comes from one machine to another now."""
        either = (self.machine(sender), self.machine(receiver))
        return self.now < self.cut_until.get((sender, receiver), 0.0) or any(one.is_asleep for one in either)

    def cut(self, ways: Iterable[tuple[int, int]], lasts: float) -> None:
        """Let nothing through from the first of these machines to the second for so long; then all that has waited arrives."""
        for way in ways:
            self.cut_until[way] = max(self.cut_until.get(way, 0.0), self.now + lasts)
        self.at(self.now + lasts, self.heal)

    def heal(self) -> None:
        for peer in self.peers:
            peer.heal()

    def check_alone(self) -> None:
        """Raise Violation if workers of two generations live, except for those that no lease can end in time.

        A job of fixed size has no leases: what a node in place of another one begins with is fenced alone.
        """
        if not self.scenario.policy.lease:
            return
        living = [worker for worker in self.workers if not worker.machine.is_excused]
        if len({worker.run.term for worker in living}) > 1:
            first, last = living[0], living[-1]
            raise Violation(f"no two generations have living workers: {first} lives beside {last}")


class Killed(Exception):
    """The process is killed between two actions."""


class Machine:
    """A node, or where a command was typed."""

    def __init__(self, world: World, number: int) -> None:
        self.world, self.number = world, number
        self.process: Process | None = None  # that of ddplaunch, the last one
        self.off_until = 0.0
        self.asleep_until = 0.0
        self.frozen_until = 0.0  # agent and front are stopped at once, so that nothing ends the workers
        self.is_stuck = number == world.scenario.stuck  # not even SIGKILL ends its workers

    @property
    def is_asleep(self) -> bool:
        return self.world.now < self.asleep_until

    @property
    def is_excused(self) -> bool:
        """Whether no lease can end the workers in time: nobody does before the machine, or its front, goes on."""
        return self.is_stuck or self.world.now < max(self.asleep_until, self.frozen_until) + KILLED_WITHIN

    def sleep(self, lasts: float) -> None:
        """Stop everything here for so long, while CLOCK_BOOTTIME goes on."""
        if self.process is not None and self.process.is_stopped:  # the timer of the front counts no sleep
            self.frozen_until = max(self.frozen_until, self.process.resumes_at)
        self.asleep_until = self._stop(self.asleep_until, lasts)
        self.world.at(self.asleep_until, self.world.heal)

    def freeze(self, lasts: float) -> None:
        """Stop agent and front for so long, but not the workers."""
        self.frozen_until = self._stop(self.frozen_until, lasts)

    def _stop(self, before: float, lasts: float) -> float:
        until = max(before, self.world.now + lasts)
        if self.process is not None:
            self.process.pause(lasts)
        self.world.at(until + KILLED_WITHIN, self.world.check_alone)
        return until

    def workers(self) -> list[Worker]:
        return [worker for worker in self.world.workers if worker.machine is self]


class Process:
    """A process of ddplaunch, and the loop of its parts: it acts on what comes and is due, unless it is stopped."""

    def __init__(self, world: World, machine: Machine) -> None:
        self.world, self.machine = world, machine
        self.clock = self
        self.handle: Callable[[Any], object] = lambda _event: None
        self.after_pause: Callable[[], object] = lambda: None
        self.exits: Callable[[], int | None] = lambda: None  # the status, once it is to end
        self.ended: Callable[[], object] = lambda: None
        self.fuse: int | None = None  # actions until it is killed
        self.is_alive = True
        self.status: int | None = None  # None: killed
        self._timers: dict[Timer, None] = {}
        self._events: deque[Any] = deque()
        self._backlog: deque[Callable[[], object]] = deque()
        self.resumes_at = self._missed = 0.0
        self._paused_for = 0.0
        self._is_busy = self._has_slept = False
        self._wakes_at = inf
        machine.process = self
        world.processes.append(self)

    def __str__(self) -> str:
        return f"ddplaunch on {self.machine.number}"

    # --- what a loop is to its parts

    def now(self) -> float:
        return self.world.now - self._missed

    def timer(self, at: float | None, call: Callable[[], object], *, may_come_late: bool = False) -> Timer:
        timer = Timer(self._timers, call, may_come_late=may_come_late)
        timer.set(at)
        return timer

    def post(self, event: Any) -> None:
        self._events.append(event)

    def protect(self, _timeout: float) -> None:
        """Each pause is noticed anyway."""

    def paused(self, within: float) -> str:
        was = self._paused_for and self.world.now - self.resumes_at < within
        return f"paused for {self._paused_for:.0f} s" if was else ""

    # --- what happens to it

    @property
    def is_stopped(self) -> bool:
        return self.world.now < self.resumes_at

    def do(self, call: Callable[[], object] = lambda: None) -> None:
        """Have the process do something: now, after what it does, or when it goes on; a dead one does nothing."""
        self._backlog.append(call)
        if self._is_busy or self.is_stopped:
            return
        self._is_busy = True
        try:
            if self._has_slept:
                self._has_slept = False
                self._backlog.appendleft(self.after_pause)
            while self._backlog and self.is_alive:
                self._backlog.popleft()()
                self._hand_over()
        except Killed:
            self.kill()
        self._is_busy = False
        if self.is_alive:
            self._exit_if_over()
            self._arm()

    def _exit_if_over(self) -> None:
        status = self.exits()
        if status is None:
            return
        self.world.note(self, f"exits with {status}")
        self.status = status
        if self.machine.workers() and not self.machine.is_stuck:
            raise Violation(f"nothing is left: {self} exits while its workers run")
        self.end()

    def _arm(self) -> None:
        first = min((timer.at for timer in self._timers), default=inf) + self._missed + 1e-6
        if first < self._wakes_at:
            self._wakes_at = first
            self.world.at(first, self._wake, first)

    def _wake(self, at: float) -> None:
        if at != self._wakes_at:
            return
        self._wakes_at = inf
        self.do(self._ring)

    def _ring(self) -> None:
        """Make the calls that are due, with what follows from each; an earlier one may have moved a later one."""
        now = self.now()
        for timer in sorted((one for one in self._timers if one.at <= now), key=lambda one: one.at):
            if timer.at <= now:
                timer.cancel()
                timer.call()
                self._hand_over()

    def _hand_over(self) -> None:
        while self._events and self.is_alive:
            self.handle(self._events.popleft())

    def pause(self, lasts: float) -> None:
        """Be stopped for so long."""
        until = self.world.now + lasts
        if self.is_alive and until > self.resumes_at:
            since = max(self.world.now, self.resumes_at)
            self._missed += max(0.0, until - since - self.world.dice.random() * _LATE)
            self.resumes_at, self._has_slept, self._paused_for = until, True, lasts
            self.world.at(until + 1e-6, self.do)

    def act(self) -> None:
        """Be killed here, if that is due: between two actions."""
        if self.fuse is not None:
            self.fuse -= 1
            if self.fuse < 0:
                raise Killed

    def kill(self, *, power_fails: bool = False) -> None:
        """Be killed: what watches it ends its workers, and the kernel closes its connections; or lose power, unnoticed."""
        if not self.is_alive:
            return
        self.world.note(self, "is killed")
        self.end(silently=power_fails)
        for worker in self.machine.workers():
            if power_fails:
                self.world.workers.remove(worker)
            else:
                worker.kill()

    def end(self, *, silently: bool = False) -> None:
        """Be gone: the kernel closes all connections; or `silently`, as after a loss of power."""
        self.is_alive = False
        self.world.listening = {at: one for at, one in self.world.listening.items() if one.process is not self}
        for peer in [one for one in self.world.peers if one.process is self]:
            peer.vanish() if silently else peer.close()
        self.ended()
