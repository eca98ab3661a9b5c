"""The machine under the simulated agents: a clock, connections that keep the order, and the processes of workers.

Stands for the kernel and the network. Nothing here reads a real clock; all chance comes from the seed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from random import Random
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from ddplaunch.supervise.outcome import WorkerError
from tests.simulator.scenario import Scenario

if TYPE_CHECKING:
    from tests.simulator.agents import Agent

FOLLOWS = WorkerError(
    type="RuntimeError", message="[gloo/transport/tcp/pair.cc:1] Connection closed by peer", traceback=""
)


class Violation(AssertionError):
    """An invariant does not hold; its first line names the invariant."""


class World:
    """The time, what is to happen, and the processes that there are."""

    def __init__(self, scenario: Scenario, trace: list[str] | None = None) -> None:
        """Prepare an empty world; what happens is appended to `trace`."""
        self.scenario = scenario
        self.dice = Random(scenario.seed + 1)
        self.now = 0.0
        self.trace = trace
        self.agents: dict[int, Agent] = {}
        self.workers: list[Worker] = []  # those that live
        self.started: set[tuple[int, int]] = set()  # generation and rank of all that ever did
        self.statuses: dict[tuple[int, int], int] = {}  # of those that have ended, by the same
        self.hangs = False  # no worker makes progress, until the next generation
        self.port_taken_until = 0.0
        self._due: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._count = 0

    def at(self, when: float, call: Callable[..., object], *arguments: Any) -> None:
        """Make a call at this time."""
        self._count += 1
        heappush(self._due, (max(when, self.now), self._count, call, arguments))

    def soon(self, most: float, call: Callable[..., object], *arguments: Any) -> None:
        """Make a call within so many seconds."""
        self.at(self.now + self.dice.random() * most, call, *arguments)

    def run(self, until: float, is_over: Callable[[], bool]) -> bool:
        """Let things happen; return whether all was over in time."""
        due, calls, since = self._due, 0, -1.0
        while due and due[0][0] <= until:
            self.now, _, call, arguments = heappop(due)
            calls += 1
            if self.now > since + 0.01:
                calls, since = 0, self.now
            if calls > 2000:
                raise Violation(f"time goes on: {call.__qualname__} is called again and again")
            call(*arguments)
            if is_over():
                return True
        return False

    def note(self, who: object, what: object) -> None:
        """Keep a line of the history."""
        if self.trace is not None:
            self.trace.append(f"{self.now:8.3f}  {who}: {what}")


# --- connections


class Closed(Struct, frozen=True):
    """The last thing that a side of a connection gets."""

    reason: str


class Connection:
    """TCP between an agent and the coordinator: each direction keeps its order; what is cut off waits, or dies with it.

    A side is the function that takes what arrives there; None: it has closed.
    """

    def __init__(self, world: World, delay: float) -> None:
        """Open a connection whose sides are not known yet."""
        self._world = world
        self.delay = delay  # seconds that a message takes at most
        self.is_cut = False
        self.sides: list[Callable[[Any], None] | None] = [None, None]  # of the agent, of the coordinator
        self._under_way: tuple[deque[Any], deque[Any]] = (deque(), deque())  # to each of them
        self._last = [0.0, 0.0]

    def send(self, side: int, message: Any) -> None:
        """Send to this side."""
        self._under_way[side].append(message)
        self._schedule(side, self.delay)

    def close(self, side: int, reason: str = "connection closed") -> None:
        """Close this side; the other one learns of it after all that was sent."""
        if self.sides[side] is not None:
            self.sides[side] = None
            self.send(1 - side, Closed(reason))

    def vanish(self, side: int) -> None:
        """Lose this side without a word: its machine is gone, and what it has not sent."""
        self.sides[side] = None
        self.is_cut = True
        self._under_way[1 - side].clear()

    def reset(self) -> None:
        """Break: each side learns of it at a time of its own, and what was under way is lost."""
        for side in (0, 1):
            self._under_way[side].clear()
            self._under_way[side].append(Closed("connection reset"))
            self._schedule(side, 6.0)

    def heal(self) -> None:
        """Let what has waited arrive."""
        self.is_cut = False
        for side in (0, 1):
            for _ in self._under_way[side]:
                self._schedule(side, self.delay)

    def _schedule(self, side: int, most: float) -> None:
        self._last[side] = max(self._last[side], self._world.now + self._world.dice.random() * most)
        self._world.at(self._last[side], self._arrive, side)

    def _arrive(self, side: int) -> None:
        if self.is_cut or not self._under_way[side]:
            return
        message, take = self._under_way[side].popleft(), self.sides[side]
        if take is not None:
            if isinstance(message, Closed):
                self.sides[side] = None
            take(message)


# --- workers


class Worker:
    """The process of a worker."""

    def __init__(self, agent: Agent, generation: int, rank: int) -> None:
        """Start it; raise Violation if another one runs that must not."""
        world = agent.world
        self.agent, self.generation, self.rank = agent, generation, rank
        self.born = world.now
        self.stopped: tuple[int, float] | None = None
        self.has_raised = False
        self._is_alive = True
        _check_start(world, self)
        world.workers.append(self)
        world.at(world.now + world.scenario.work + world.dice.random(), self._finish)

    def _finish(self) -> None:
        if not self.agent.world.hangs and not self.has_raised:
            self.end(0)

    def signal(self, signum: int) -> None:
        """Take a signal that asks the worker to end."""
        world = self.agent.world
        self.stopped = (signum, world.now)
        slow = {"ends": 0.2, "daemons": 0.2, "slow": 3.0}.get(world.scenario.program)
        if slow is not None and not (world.hangs and world.dice.random() < 0.5):
            world.soon(slow, self.end, None, signum)

    def kill(self) -> None:
        """Take SIGKILL, which a process in uninterruptible sleep outlives for long."""
        if self.stopped is None or self.stopped[0] != 9:
            self.stopped = (9, self.agent.world.now)
        is_stuck = self.agent.number == self.agent.world.scenario.stuck
        self.agent.world.soon(0.3, self.end, None, 9) if not is_stuck else None

    def end(self, code: int | None, signum: int | None = None, error: WorkerError | None = None) -> None:
        """End, unless it has; its agent learns of it, and workers that it was connected to may fail."""
        world = self.agent.world
        if not self._is_alive:
            return
        self._is_alive = False
        world.workers.remove(self)
        status = code if code is not None else 128 + (signum or 0)
        world.statuses[self.generation, self.rank] = status
        world.note(self, f"ends with {status}")
        self.agent.worker_ended(self, code, signum, error)
        if status != 0:
            for other in world.workers:
                if other.generation == self.generation and world.dice.random() < world.scenario.follows:
                    world.soon(2.0, other.end, 1, None, FOLLOWS)

    def __str__(self) -> str:
        return f"rank {self.rank} of generation {self.generation} on {self.agent}"


def _check_start(world: World, new: Worker) -> None:
    """Raise Violation if the start of this worker breaks an invariant about those that run."""
    if (new.generation, new.rank) in world.started:
        raise Violation(f"no rank runs twice: {new} is started again")
    world.started.add((new.generation, new.rank))
    for other in world.workers:
        if other.generation != new.generation:
            if other.agent is new.agent:
                raise Violation(f"no worker of two generations runs on one node: {new} starts beside {other}")
            if other.agent.is_member and new.agent.is_member:
                raise Violation(f"no generation begins beside workers of a member: {new} starts while {other} runs")
