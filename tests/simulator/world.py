"""The machines under the simulated job: time, processes, the network, workers, and the storage of their checkpoints.

Stands for kernels, the network and a shared file system. Nothing here reads a real clock; all chance comes from the seed.
Time is that of CLOCK_BOOTTIME, the same on all machines; a process has a clock of its own, which leaves out when it was stopped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from heapq import heappop, heappush
from math import inf
from random import Random
from typing import TYPE_CHECKING, Any, Protocol

from ddplaunch.launcher.decide.job import KILLED_WITHIN
from ddplaunch.spec.outcome import WorkerError
from tests.simulator.scenario import Scenario

if TYPE_CHECKING:
    from tests.simulator.agents import Agent
    from tests.simulator.arbiters import Arbiter

FOLLOWS = WorkerError(
    type="RuntimeError", message="[gloo/transport/tcp/pair.cc:1] Connection closed by peer", traceback=""
)
CLOSED = "connection closed"
_SLOW = 6.0  # seconds that a message takes at most over a slow link, or the news that a connection is broken
_LATE = 1.0  # seconds of a pause that a clock may take for time
_SAVES_EVERY = 1.0  # seconds from one checkpoint of a worker to the next


class Violation(AssertionError):
    """An invariant does not hold; its first words, before a colon, name the invariant."""


class World:
    """The time, what is to happen, and all that there is."""

    def __init__(self, scenario: Scenario, trace: list[str] | None = None) -> None:
        """Prepare an empty world; what happens is appended to `trace`."""
        self.scenario = scenario
        self.dice = Random(scenario.seed + 1)
        self.now = 0.0
        self.machines: dict[int, Machine] = {}
        self.processes: list[Process] = []  # all that there have ever been
        self.arbiters: list[Arbiter] = []  # the same
        self.workers: list[Worker] = []  # those that live
        self.storage = Storage(self)
        self.last_term = -1  # of all generations
        self.ends: list[End] = []
        self.cut_until: dict[tuple[int, int], float] = {}  # from the first machine to the second
        self.slow_until: dict[frozenset[int], float] = {}
        self.port_taken_until = 0.0
        self.hangs = False  # no worker makes progress, until the next generation
        self.quiet_from = scenario.quiet_from
        self._trace = trace
        self._due: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._count = 0

    def machine(self, number: int) -> Machine:
        return self.machines.setdefault(number, Machine(self, number))

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
        for end in self.ends:
            end.heal()

    def check_alone(self) -> None:
        """Raise Violation if workers of two generations live, except for those that no lease can end in time.

        A job of fixed size has no leases: what a node in place of another one begins with is fenced alone.
        """
        if not self.scenario.policy.lease:
            return
        living = [worker for worker in self.workers if not worker.is_excused]
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

    @property
    def reached_at(self) -> float:
        """When something can end the workers here."""
        return max(self.world.now, self.asleep_until, self.frozen_until)

    def sleep(self, lasts: float) -> None:
        """Stop everything here for so long, while CLOCK_BOOTTIME goes on."""
        self.asleep_until = max(self.asleep_until, self.world.now + lasts)
        if self.process is not None:
            self.process.pause(lasts)
        self.world.at(self.asleep_until, self.world.heal)
        self.world.at(self.asleep_until + KILLED_WITHIN, self.world.check_alone)

    def freeze(self, lasts: float) -> None:
        self.frozen_until = max(self.frozen_until, self.world.now + lasts)
        if self.process is not None:
            self.process.pause(lasts)
        self.world.at(self.frozen_until + KILLED_WITHIN, self.world.check_alone)

    def workers(self) -> list[Worker]:
        return [worker for worker in self.world.workers if worker.machine is self]


class Part(Protocol):
    """Something in a process that has a deadline of the clock of the process."""

    @property
    def deadline(self) -> float | None: ...

    def on_deadline(self) -> None: ...


class Process:
    """A process of ddplaunch: it acts on what comes, and when a deadline of its own clock is due, unless it is stopped."""

    def __init__(self, world: World, machine: Machine) -> None:
        self.world, self.machine = world, machine
        self.parts: list[Part] = []
        self.exits: Callable[[], int | None] = lambda: None  # the status, once it is to end
        self.ended: Callable[[], object] = lambda: None
        self.fuse: int | None = None  # actions until it is killed
        self.is_alive = True
        self.status: int | None = None  # None: killed
        self._resumes_at = 0.0
        self._missed = 0.0
        self._backlog: deque[Callable[[], object]] = deque()
        self._is_busy = False
        self._wakes_at = inf
        machine.process = self
        world.processes.append(self)

    def __str__(self) -> str:
        return f"ddplaunch on {self.machine.number}"

    def now(self) -> float:
        return self.world.now - self._missed

    @property
    def is_stopped(self) -> bool:
        return self.world.now < self._resumes_at

    def do(self, call: Callable[[], object] = lambda: None) -> None:
        """Have the process do something: now, after what it does, or when it goes on; a dead one does nothing."""
        self._backlog.append(call)
        if self._is_busy or self.is_stopped:
            return
        self._is_busy = True
        try:
            while self._backlog and self.is_alive:
                self._backlog.popleft()()
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
        deadlines = [part.deadline for part in self.parts]
        first = min((one for one in deadlines if one is not None), default=inf) + self._missed + 1e-6
        if first < self._wakes_at:
            self._wakes_at = first
            self.world.at(first, self._wake, first)

    def _wake(self, at: float) -> None:
        if at != self._wakes_at:
            return
        self._wakes_at = inf
        if not self.is_stopped:
            for part in self.parts:
                if part.deadline is not None and part.deadline <= self.now():
                    self.do(part.on_deadline)
            self.do()

    def pause(self, lasts: float) -> None:
        """Be stopped for so long."""
        until = self.world.now + lasts
        if self.is_alive and until > self._resumes_at:
            since = max(self.world.now, self._resumes_at)
            self._missed += max(0.0, until - since - self.world.dice.random() * _LATE)
            self._resumes_at = until
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
        for end in self.world.ends:
            if end.process is self:
                end.vanish() if silently else end.close()
        self.world.ends = [end for end in self.world.ends if end.is_open or end.other.is_open]
        self.ended()


class End:
    """One side of a connection between two processes, in which each direction keeps its order."""

    other: End

    def __init__(self, process: Process, user: Any, node: int) -> None:
        """Open a side for a part of the process, which gets `on_message` and `on_closed`; on the other side is machine `node`."""
        self.process, self.is_open, self.node = process, True, node
        self._user, self._world = user, process.world
        self._under_way: deque[object] = deque()  # to this side; a text says why the connection has ended
        self._last = 0.0  # when the last of it arrives
        self._world.ends.append(self)

    @property
    def pair(self) -> frozenset[int]:
        return frozenset((self.process.machine.number, self.node))

    def send(self, message: object) -> None:
        if self.is_open:
            self.other._take(message)

    def close(self) -> None:
        """Close: the other side learns of it after all that was sent."""
        if self.is_open:
            self.is_open = False
            self.other._take(CLOSED)

    def vanish(self) -> None:
        """Be gone without a word, and with what was not sent yet."""
        self.is_open = False
        self.other._under_way.clear()

    def reset(self) -> None:
        """Learn some time that the connection is broken; what was under way is lost."""
        self._under_way.clear()
        self._take("connection reset", _SLOW)

    def heal(self) -> None:
        for _ in self._under_way:
            self._schedule()

    def _take(self, item: object, most: float | None = None) -> None:
        self._under_way.append(item)
        self._schedule(most)

    def _schedule(self, most: float | None = None) -> None:
        world = self._world
        if most is None:
            most = _SLOW if world.now < world.slow_until.get(self.pair, 0.0) else world.scenario.delay
        self._last = max(self._last, world.now + world.dice.random() * most)
        world.at(self._last, self._arrive)

    def _arrive(self) -> None:
        if self._under_way and not self._world.is_cut(self.node, self.process.machine.number):
            self.process.do(partial(self._hand_over, self._under_way.popleft()))

    def _hand_over(self, item: object) -> None:
        if not self.is_open:
            return
        if isinstance(item, str):
            self.is_open = False
            self._user.on_closed(self, item)
        else:
            self._user.on_message(self, item)


def connect(process: Process, user: Any, other: Process, other_user: Any) -> End:
    """Return the side of a new connection that belongs to `user`."""
    here, there = End(process, user, other.machine.number), End(other, other_user, process.machine.number)
    here.other, there.other = there, here
    return here


class Run:
    """A generation that has begun."""

    def __init__(self, term: int, number: int, arbiter: Arbiter, nodes: frozenset[int], size: int) -> None:
        self.term, self.number, self.arbiter, self.nodes, self.size = term, number, arbiter, nodes, size
        self.started: set[int] = set()  # ranks
        self.statuses: dict[int, int] = {}  # of those that have ended

    def __str__(self) -> str:
        return f"generation {self.number} ({self.term})"


class Storage:
    """What all nodes share: checkpoints, named by the term of their generation and by their step. The greatest is loaded."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.newest = self._greatest = (-1, 0)  # term and step of the one that was written last, and of the greatest

    @property
    def greatest(self) -> tuple[int, int]:
        return self._greatest

    def save(self, worker: Worker, step: int) -> None:
        """Add a checkpoint; raise Violation if a worker of an older generation writes that should have been gone."""
        is_leased = bool(self._world.scenario.policy.lease)
        if is_leased and worker.run.term < self.greatest[0] and not worker.is_excused:
            raise Violation(f"no older term is written after a newer one: {worker} saves after {self.greatest}")
        self.newest = (worker.run.term, step)
        self._greatest = max(self._greatest, self.newest)

    def load(self) -> tuple[int, int]:
        """Return the checkpoint that a worker loads which starts now; raise Violation if a newer generation saved another."""
        found = self.greatest
        if found < self._greatest:
            raise Violation(f"a checkpoint never goes back: {found} after {self._greatest}")
        return found


class Worker:
    """The process of a worker: it trains on from the last checkpoint, saves, and ends."""

    def __init__(self, agent: Agent, run: Run, rank: int) -> None:
        """Start it; raise Violation if another one runs that must not."""
        self.world = world = agent.world
        self.agent, self.machine, self.run, self.rank = agent, agent.process.machine, run, rank
        self.born = world.now
        self.first_step = world.storage.load()[1]
        self.stopped: tuple[int, float] | None = None
        self.has_raised = False
        if rank in run.started:
            raise Violation(f"no rank runs twice: {self} is started again")
        run.started.add(rank)
        world.workers.append(self)
        world.check_alone()
        world.at(world.now + max(1.0, world.scenario.work - self.first_step) + world.dice.random(), self._finish)
        world.at(world.now + _SAVES_EVERY, self._train)

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.run} on {self.machine.number}"

    @property
    def is_excused(self) -> bool:
        return self.machine.is_excused

    def _when_awake(self, call: Callable[..., object], *arguments: Any) -> bool:
        """Return whether this worker lives and runs now; have it do this when its machine goes on, if it sleeps."""
        if self not in self.world.workers:
            return False
        if self.machine.is_asleep:
            self.world.at(self.machine.asleep_until + 1e-6, call, *arguments)
            return False
        return True

    def _save(self) -> None:
        if self.run.started == set(range(self.run.size)):  # else no step was made
            self.world.storage.save(self, self.first_step + int(self.world.now - self.born))

    def _train(self) -> None:
        if self._when_awake(self._train) and not self.world.hangs and self.stopped is None:
            self._save()
            self.world.at(self.world.now + _SAVES_EVERY, self._train)

    def _finish(self) -> None:
        if self._when_awake(self._finish) and not self.world.hangs and not self.has_raised:
            self.end(0)

    def signal(self, signum: int) -> None:
        self.stopped = (signum, self.world.now)
        scenario = self.world.scenario
        slow = {"ends": 0.2, "daemons": 0.2, "slow": 3.0}.get(scenario.program)
        if self.machine.number in scenario.slow:
            slow = scenario.grace_period
        if slow is not None and not (self.world.hangs and self.world.dice.random() < 0.5):
            self.world.soon(slow, self._save_and_end, signum)

    def _save_and_end(self, signum: int) -> None:
        if self._when_awake(self._save_and_end, signum):
            self._save()
            self.end(None, signum)

    def kill(self) -> None:
        """Be killed: the kernel takes some of the time for it that it has."""
        if self.stopped is None or self.stopped[0] != 9:
            self.stopped = (9, self.world.now)
        if not self.machine.is_stuck:
            self.world.soon(0.9 * KILLED_WITHIN, self.end, None, 9)

    def end(self, code: int | None, signum: int | None = None, error: WorkerError | None = None) -> None:
        """End, unless it has; its agent learns of it, and workers that it was connected to may fail."""
        world = self.world
        if not self._when_awake(self.end, code, signum, error):
            return
        world.workers.remove(self)
        status = self.run.statuses[self.rank] = code if code is not None else 128 + (signum or 0)
        world.note(self, f"ends with {status}")
        self.agent.on_worker_ended(self, code, signum, error)
        for other in world.workers if status else ():
            if other.run is self.run and world.dice.random() < world.scenario.follows:
                world.soon(2.0, other.end, 1, None, FOLLOWS)
