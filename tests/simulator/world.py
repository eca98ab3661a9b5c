"""The machines under the simulated agents: time, processes, the network between nodes, and the processes of workers.

Stands for the kernel and the network. Nothing here reads a real clock; all chance comes from the seed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from heapq import heappop, heappush
from math import inf
from random import Random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ddplaunch.loop.loop import Loop
from ddplaunch.net.port import PortTaken
from ddplaunch.process.clock import LATE, Clock
from ddplaunch.supervise.outcome import WorkerError
from tests.loops import FakePending
from tests.simulator.scenario import Scenario

if TYPE_CHECKING:
    from tests.simulator.agents import SimulatedAgent

FOLLOWS = WorkerError(
    type="RuntimeError", message="[gloo/transport/tcp/pair.cc:1] Connection closed by peer", traceback=""
)
_HEARTBEATS = (b'{"type":"ping"', b'{"type":"pong"')
_SLOW = 6.0  # seconds that a message takes at most over a slow link, or the news that a connection is broken

Pair = frozenset[int]  # two nodes


class Violation(AssertionError):
    """An invariant does not hold; its first line names the invariant."""


class Killed(Exception):
    """The process is killed between two actions."""


class World:
    """The time, what is to happen, and all that there is."""

    def __init__(self, scenario: Scenario, trace: list[str] | None = None) -> None:
        """Prepare an empty world; what happens is appended to `trace`."""
        self.scenario = scenario
        self.dice = Random(scenario.seed + 1)
        self.now = 0.0
        self.agents: dict[int, SimulatedAgent] = {}
        self.listeners: dict[int, Listener] = {}  # by the number of the node
        self.peers: list[Peer] = []
        self.cut_until: dict[Pair, float] = {}
        self.slow_until: dict[Pair, float] = {}
        self.port_taken_until = 0.0
        self.workers: list[Worker] = []  # those that live
        self.started: set[tuple[int, int]] = set()  # generation and rank of all that ever did
        self.statuses: dict[tuple[int, int], int] = {}  # of those that have ended, by the same
        self.hangs = False  # no worker makes progress, until the next generation
        self._trace = trace
        self._due: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._count = 0

    def at(self, when: float, call: Callable[..., object], *arguments: Any) -> None:
        self._count += 1
        heappush(self._due, (max(when, self.now), self._count, call, arguments))

    def soon(self, most: float, call: Callable[..., object], *arguments: Any) -> None:
        self.at(self.now + self.dice.random() * most, call, *arguments)

    def run(self, until: float, is_over: Callable[[], bool]) -> bool:
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
        if self._trace is not None:
            self._trace.append(f"{self.now:8.3f}  {who}: {what}")

    def reserve(self, *_: Any, again: bool = False) -> Any:
        if self.now < self.port_taken_until and again:
            raise PortTaken
        return Silent(port=1)

    # --- the network

    def is_cut(self, pair: Pair) -> bool:
        return self.now < self.cut_until.get(pair, 0.0)

    def cut(self, pairs: Iterable[Pair], lasts: float) -> None:
        """Let nothing through between these nodes for so long; then all that has waited arrives."""
        for pair in pairs:
            self.cut_until[pair] = max(self.cut_until.get(pair, 0.0), self.now + lasts)
            self.at(self.now + lasts, self._heal, pair)

    def _heal(self, pair: Pair) -> None:
        for peer in self.peers_of(pair):
            peer.heal()

    def peers_of(self, pair: Pair) -> list[Peer]:
        return [peer for peer in self.peers if peer.pair == pair]


class Silent(SimpleNamespace):
    """Has what it is given, takes every other call, and does nothing."""

    def __getattr__(self, _name: str) -> Any:
        return lambda *_, **__: None


class Process(Loop):
    """The real loop of an agent's process, with the real clock of deadlines; the world wakes it."""

    def __init__(self, agent: SimulatedAgent) -> None:
        self.agent, self.world, self.number = agent, agent.world, agent.number
        no_files: Any = Silent(get_map=dict, select=lambda _: [])
        super().__init__(Clock(lambda: self.world.now), no_files)
        self.is_alive, self.is_paused = True, False
        self._backlog: list[Callable[[], object]] = []
        self._wakes_at = inf

    def do(self, call: Callable[[], object] = lambda: None) -> None:
        """Have the process do something: now, or when it goes on; a dead one does nothing."""
        if self.is_paused:
            self._backlog.append(call)
        elif self.is_alive:
            self.clock._seen = self.world.now  # it was asleep, and not paused
            try:
                call()
                self.run_once()
                self.agent.exit_if_over()
            except Killed:
                self.agent.kill()
            first = min((timer.at for timer in self._timers), default=inf) + self.clock._missed + 1e-6
            if first < self._wakes_at:
                self._wakes_at = first
                self.world.at(first, self._wake, first)

    def _wake(self, at: float) -> None:
        if at == self._wakes_at:
            self._wakes_at = inf
            if not self.is_paused:
                self.do()

    def ask(self, question: Any, otherwise: Any, answered: Any = lambda _: None, *_: Any, **__: Any) -> Any:
        asked, delay = FakePending(question, otherwise, answered), self.world.dice.choice((0.0, 0.5, 2.0, 5.0))
        self.world.at(self.world.now + delay, self.do, lambda: asked.answer_with(question()) if asked.pid else None)
        return asked

    def pause(self, lasts: float) -> None:
        if self.is_alive and not self.is_paused:
            self.is_paused = True
            self.clock._seen = self.world.now + self.world.dice.random() * LATE  # until then it would have slept
            self.world.at(self.world.now + lasts, self._resume)

    def _resume(self) -> None:
        """Go on: with what has come meanwhile, of which no order is known, then with what is due."""
        self.is_paused = False
        self.now()  # the clock sees the pause
        backlog, self._backlog = self._backlog, []
        for call in [*backlog, lambda: None]:
            self.do(call)

    def end(self, *, silently: bool) -> None:
        """Be gone: the kernel closes all connections; or `silently`, as after a loss of power."""
        self.is_alive = False
        self.world.listeners.pop(self.number, None)
        for peer in self.world.peers:
            if peer.process is self:
                peer.vanish() if silently else peer.close()


class Peer:
    """Stands for `control.peer.Peer`: one side of a connection, in which each direction keeps its order."""

    other: Peer
    sends_again_each_second = True

    def __init__(self, process: Process, node: int) -> None:
        """Open a side, in this process, of a connection with the node of this number."""
        self.process, self._world = process, process.world
        self.pair = frozenset((process.number, node))
        self.address, self.local_address = address_of(node), address_of(process.number)
        self.received: Callable[[bytes], None] = lambda _payload: None
        self.closed: Callable[[str], None] = lambda _reason: None
        self._is_open = True
        self._under_way: deque[bytes | str] = deque()  # to this side; a text says why the connection has ended
        self._last = 0.0  # when the last of it arrives
        self._world.peers.append(self)

    def send(self, payload: bytes) -> None:
        """Send; a heartbeat takes no time unless something is under way before it."""
        if self._is_open:
            self.other._take(payload, 0.0 if payload.startswith(_HEARTBEATS) else None)

    def host_silence(self) -> float:
        return 0.0  # as where the kernel does not say

    def admit(self) -> None:
        """Take long messages, too."""

    def close(self) -> None:
        """Close: the other side learns of it after all that was sent."""
        if self._is_open:
            self._is_open = False
            self.other._take("connection closed")

    def vanish(self) -> None:
        """Be gone without a word, and with what was not sent yet."""
        self._is_open = False
        self.other._under_way.clear()

    def reset(self) -> None:
        """Learn some time that the connection is broken; what was under way is lost."""
        self._under_way.clear()
        self._take("connection reset", _SLOW)

    def heal(self) -> None:
        for _ in self._under_way:
            self._schedule()

    def _take(self, item: bytes | str, most: float | None = None) -> None:
        self._under_way.append(item)
        self._schedule(most)

    def _schedule(self, most: float | None = None) -> None:
        world = self._world
        if most is None:
            most = _SLOW if world.now < world.slow_until.get(self.pair, 0.0) else world.scenario.delay
        self._last = max(self._last, world.now + world.dice.random() * most)
        world.at(self._last, self._arrive)

    def _arrive(self) -> None:
        if self._under_way and not self._world.is_cut(self.pair):
            item = self._under_way.popleft()
            self.process.do(lambda: self._hand_over(item))

    def _hand_over(self, item: bytes | str) -> None:
        if self._is_open and isinstance(item, bytes):
            self.received(item)
        elif self._is_open:
            self._is_open = False
            self.closed(str(item))


def address_of(number: int) -> str:
    return f"10.0.0.{number}"


class Listener:
    """Stands for `control.listener.Listener`, with a handshake that takes no time."""

    port = 1

    def __init__(self, loop: Process, _key: object, *, opened: Callable[[Peer], None], **_: object) -> None:
        self.process, self.opened = loop, opened
        loop.world.listeners[loop.number] = self

    def report_refusal(self, *_: str) -> None:
        """Nobody reads it, nor closes the listener of a process that lives."""

    close = report_refusal


class Dialer:
    """Stands for `control.dialer.Dialer`: tries each second, until a node listens and is not cut off."""

    def __init__(self, loop: Process, _key: object, *, opened: Callable[[Peer], None], **_: object) -> None:
        self._process, self._opened = loop, opened
        self._timer = loop.timer(None, self._attempt)
        self.stop = self._timer.cancel

    def set_targets(self, targets: Any) -> None:
        self._nodes = [int(address[0].rpartition(".")[2]) for _, address in targets]
        self._timer.set(self._process.now())

    def _attempt(self) -> None:
        world, process = self._process.world, self._process
        for node in self._nodes:
            listener = world.listeners.get(node)
            if (
                listener is not None
                and not listener.process.is_paused
                and not world.is_cut(frozenset((process.number, node)))
            ):
                here, there = Peer(process, node), Peer(listener.process, process.number)
                here.other, there.other = there, here
                listener.process.do(partial(listener.opened, there))
                self._opened(here)
                return
        self._timer.set(process.now() + 1.0)


class Worker:
    """The process of a worker."""

    def __init__(self, agent: SimulatedAgent, generation: int, rank: int) -> None:
        """Start it; raise Violation if another one runs that must not."""
        self.world = world = agent.world
        self.agent, self.generation, self.rank = agent, generation, rank
        self.born = world.now
        self.stopped: tuple[int, float] | None = None
        self.has_raised = False
        if (generation, rank) in world.started:
            raise Violation(f"no rank runs twice: {self} is started again")
        for other in world.workers:
            if other.generation != generation and other.agent is agent:
                raise Violation(f"no worker of two generations runs on one node: {self} starts beside {other}")
            if other.generation != generation and other.agent.is_member and agent.is_member:
                raise Violation(f"no generation begins beside workers of a member: {self} starts while {other} runs")
        world.started.add((generation, rank))
        world.workers.append(self)
        world.at(world.now + world.scenario.work + world.dice.random(), self._finish)

    def __str__(self) -> str:
        return f"rank {self.rank} of generation {self.generation} on {self.agent}"

    def _finish(self) -> None:
        if not self.world.hangs and not self.has_raised:
            self.end(0)

    def signal(self, signum: int) -> None:
        self.stopped = (signum, self.world.now)
        slow = {"ends": 0.2, "daemons": 0.2, "slow": 3.0}.get(self.world.scenario.program)
        if slow is not None and not (self.world.hangs and self.world.dice.random() < 0.5):
            self.world.soon(slow, self.end, None, signum)

    def kill(self) -> None:
        if self.stopped is None or self.stopped[0] != 9:
            self.stopped = (9, self.world.now)
        if not self.agent.is_stuck:
            self.world.soon(0.3, self.end, None, 9)

    def end(self, code: int | None, signum: int | None = None, error: WorkerError | None = None) -> None:
        """End, unless it has; its agent learns of it, and workers that it was connected to may fail."""
        world = self.world
        if self not in world.workers:
            return
        world.workers.remove(self)
        status = world.statuses[self.generation, self.rank] = code if code is not None else 128 + (signum or 0)
        world.note(self, f"ends with {status}")
        self.agent.worker_ended(self, code, signum, error)
        for other in world.workers if status else ():
            if other.generation == self.generation and world.dice.random() < world.scenario.follows:
                world.soon(2.0, other.end, 1, None, FOLLOWS)
