"""What is trained: generations, their workers, and the storage that all nodes share."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ddplaunch.launcher.decide.job import KILLED_WITHIN
from ddplaunch.spec.outcome import WorkerError

if TYPE_CHECKING:
    from tests.simulator.agents import Agent
    from tests.simulator.arbiters import Arbiter
    from tests.simulator.world import World

FOLLOWS = WorkerError(
    type="RuntimeError", message="[gloo/transport/tcp/pair.cc:1] Connection closed by peer", traceback=""
)
_INTERPRETER_ENDS_WITHIN = 2.0  # seconds
_SAVES_EVERY = 1.0  # seconds from one checkpoint of a worker to the next


class Violation(AssertionError):
    """An invariant does not hold; its first words, before a colon, name the invariant."""


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
        if is_leased and worker.run.term < self.greatest[0] and not worker.machine.is_excused:
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
        self.error: WorkerError | None = None  # by which its program has ended, while its interpreter still ends
        if rank in run.started:
            raise Violation(f"no rank runs twice: {self} is started again")
        run.started.add(rank)
        world.workers.append(self)
        world.check_alone()
        world.at(world.now + max(1.0, world.scenario.work - self.first_step) + world.dice.random(), self._finish)
        world.at(world.now + _SAVES_EVERY, self._train)

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.run} on {self.machine.number}"

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
        if self._when_awake(self._train) and self.stopped is None and self.error is None:
            self._save()
            self.world.at(self.world.now + _SAVES_EVERY, self._train)

    def _finish(self) -> None:
        if self._when_awake(self._finish) and self.error is None:
            self.end(0)

    def signal(self, signum: int) -> None:
        self.stopped = (signum, self.world.now)
        scenario = self.world.scenario
        slow = {"ends": 0.2, "daemons": 0.2, "slow": 3.0}.get(scenario.program)
        if self.machine.number in scenario.slow:
            slow = scenario.grace_period
        if slow is not None:
            self.world.soon(slow, self._save_and_end, signum)

    def _save_and_end(self, signum: int) -> None:
        if self._when_awake(self._save_and_end, signum):
            if self.error is None:
                self._save()
            self.end(None, signum)

    def kill(self) -> None:
        """Be killed: the kernel takes some of the time for it that it has."""
        if self.stopped is None or self.stopped[0] != 9:
            self.stopped = (9, self.world.now)
        if not self.machine.is_stuck:
            self.world.soon(0.7 * KILLED_WITHIN, self.end, None, 9)

    def fail(self, code: int, error: WorkerError) -> None:
        """Raise: its agent learns that nothing of the program runs any more, and some time later its interpreter has ended."""
        if self._when_awake(self.fail, code, error):
            self.error = error
            self.agent.on_worker_failed(self, error)
            self.world.soon(_INTERPRETER_ENDS_WITHIN, self.end, code, None, error)

    def end(self, code: int | None, signum: int | None = None, error: WorkerError | None = None) -> None:
        """End, unless it has; its agent learns of it, and workers that it was connected to may fail."""
        world = self.world
        if not self._when_awake(self.end, code, signum, error):
            return
        world.workers.remove(self)
        status = self.run.statuses[self.rank] = code if code is not None else 128 + (signum or 0)
        world.note(self, f"ends with {status}")
        self.agent.on_worker_ended(self, code, signum, error or self.error)
        for other in world.workers if status else ():
            if other.run is self.run and world.dice.random() < world.scenario.follows:
                world.soon(2.0, other.lose_contact)

    def lose_contact(self) -> None:
        """Fail as a peer has ended, unless nothing of the program runs any more."""
        if self.error is None:
            self.end(1, None, FOLLOWS)
