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
from typing import TYPE_CHECKING, Any, cast

from ddplaunch.launcher.job.remote_link import CONNECTION_REFUSED
from ddplaunch.reach.channel.dialer import Dialer
from ddplaunch.spec.outcome import WorkerError
from ddplaunch.system.loop.loop import Loop
from ddplaunch.system.net.port import PortTaken
from ddplaunch.system.process.clock import LATE, Clock, Pause
from tests.loops import FakePending
from tests.simulator.scenario import Scenario

if TYPE_CHECKING:
    from tests.simulator.agents import SimulatedAgent
    from tests.simulator.coordinator import SimulatedCoordinator

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
        self.coordinators: list[SimulatedCoordinator] = []  # all that there have ever been
        self.runs: dict[int, Run] = {}  # all generations that have begun, by number
        self.current: Process  # the one that does something
        self.sockets: dict[tuple[int, int], Socket] = {}  # by the number of the node and the port
        self.off_until: dict[int, float] = {}  # nodes without power
        self.peers: list[Peer] = []
        self.cut_until: dict[tuple[int, int], float] = {}  # from the first node to the second
        self.slow_until: dict[Pair, float] = {}
        self.port_taken_until = 0.0
        self.workers: list[Worker] = []  # those that live
        self.started: set[tuple[int, int]] = set()  # generation and rank of all that there have ever been
        self.statuses: dict[tuple[int, int], int] = {}  # of those that have ended, by the same
        self.hangs = False  # no worker makes progress, until the next generation
        self.announced: list[frozenset[int]] = []  # nodes that were to begin a generation
        self.armed: list[Callable[[], object]] = []  # faults that wait for a coordinator that takes over, or announces
        self.quiet_from = scenario.quiet_from
        self._trace = trace
        self._due: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._count = 0

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
            if calls > 2000:
                raise Violation(f"time goes on: {call.__qualname__} is called again and again")
            call(*arguments)
            if is_over():
                return True
        return False

    def forget(self, number: int) -> None:
        """Forget the workers of a generation with this number: all its nodes have ended, and the others did not know of it."""
        self.started = {(generation, rank) for generation, rank in self.started if generation != number}
        self.statuses = {key: status for key, status in self.statuses.items() if key[0] != number}

    def note(self, who: object, what: object) -> None:
        if self._trace is not None:
            self._trace.append(f"{self.now:8.3f}  {who}: {what}")

    def fire(self) -> None:
        """Have all faults happen soon that have waited for this."""
        armed, self.armed = self.armed, []
        for fault in armed:
            self.soon(3 * self.scenario.delay, fault)

    def reserve(self, *_: Any, again: bool = False) -> Any:
        if self.now < self.port_taken_until and again:
            raise PortTaken
        return Silent(port=1)

    # --- the network

    def is_cut(self, sender: int, receiver: int) -> bool:
        return self.now < self.cut_until.get((sender, receiver), 0.0)

    def cut(self, ways: Iterable[tuple[int, int]], lasts: float) -> None:
        """Let nothing through from the first of these nodes to the second for so long; then all that has waited arrives."""
        for way in ways:
            self.cut_until[way] = max(self.cut_until.get(way, 0.0), self.now + lasts)
            self.at(self.now + lasts, self._heal, frozenset(way))

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
        self.dialers: set[Dialer] = set()  # all that have dialed
        self._backlog: list[Callable[[], object]] = []
        self._wakes_at = inf

    def do(self, call: Callable[[], object] = lambda: None) -> None:
        """Have the process do something: now, or when it goes on; a dead one does nothing."""
        if self.is_paused:
            self._backlog.append(call)
        elif self.is_alive:
            self.clock._seen, self.world.current = self.world.now, self  # it was asleep, and not paused
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
        missed = self.clock._missed
        now = self.now()  # the clock sees the pause
        if self.clock._missed > missed:
            self.clock.pause = Pause(self.clock._missed - missed, now)
        backlog, self._backlog = self._backlog, []
        for call in [*backlog, lambda: None]:
            self.do(call)

    def end(self, *, silently: bool) -> None:
        """Be gone: the kernel closes all connections; or `silently`, as after a loss of power."""
        self.is_alive = False
        for socket in [one for (number, _), one in self.world.sockets.items() if number == self.number]:
            socket.end()
        for peer in self.world.peers:
            if peer.process is self:
                peer.vanish() if silently else peer.close()


class Peer:
    """Stands for `control.peer.Peer`: one side of a connection, in which each direction keeps its order."""

    other: Peer
    sends_again_each_second = True

    def __init__(self, process: Process, node: int) -> None:
        """Open a side, in this process, of a connection with the node of this number."""
        self.process, self._world, self._node = process, process.world, node
        self.pair = frozenset((process.number, node))
        self.address, self.local_address = address_of(node), address_of(process.number)
        self.received: Callable[[bytes], None] = lambda _payload: None
        self.closed: Callable[[str], None] = lambda _reason: None
        self._is_open = True
        # to this side; a text says why the connection has ended, a call is the end of the handshake
        self._under_way: deque[bytes | str | Callable[[], object]] = deque()
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

    def _take(self, item: bytes | str | Callable[[], object], most: float | None = None) -> None:
        self._under_way.append(item)
        self._schedule(most)

    def _schedule(self, most: float | None = None) -> None:
        world = self._world
        if most is None:
            most = _SLOW if world.now < world.slow_until.get(self.pair, 0.0) else world.scenario.delay
        self._last = max(self._last, world.now + world.dice.random() * most)
        world.at(self._last, self._arrive)

    def _arrive(self) -> None:
        if self._under_way and not self._world.is_cut(self._node, self.process.number):
            item = self._under_way.popleft()
            self.process.do(lambda: self._hand_over(item))

    def _hand_over(self, item: bytes | str | Callable[[], object]) -> None:
        if self._is_open and isinstance(item, bytes):
            self.received(item)
        elif self._is_open and isinstance(item, str):
            self._is_open = False
            self.closed(item)
        elif self._is_open and not isinstance(item, bytes | str):
            item()


def address_of(number: int) -> str:
    return f"10.0.0.{number}"


class Socket:
    """Stands for a socket that listens: the kernel accepts connections there, which wait until somebody takes them."""

    def __init__(self, process: Process, port: int) -> None:
        self.process, self.port = process, port
        self.listener: Listener | None = None
        self._waiting: list[Attempt] = []
        self._holders = 1
        process.world.sockets[process.number, port] = self

    def getsockname(self) -> tuple[str, int]:
        return address_of(self.process.number), self.port

    def dup(self) -> Socket:
        self._holders += 1
        return self

    def close(self) -> None:
        self._holders -= 1
        if not self._holders:
            self.end()

    def end(self) -> None:
        self.process.world.sockets.pop((self.process.number, self.port), None)
        for attempt in self._waiting:
            attempt.fail_later("connection reset")

    def offer(self, attempt: Attempt) -> None:
        self._waiting.append(attempt)
        self.process.do(self.accept)

    def accept(self) -> None:
        """Take all connections that wait, if somebody is there to do so."""
        while self._waiting and self.listener is not None:
            attempt = self._waiting.pop(0)
            if not attempt.is_over:
                self.listener.opened(attempt.connect(self.process))


class Listener:
    """Stands for `control.listener.Listener`."""

    def __init__(
        self, loop: Process, _key: object, *, opened: Callable[[Peer], None], listening: Any = None, **_: object
    ) -> None:
        self.opened, self._socket = opened, listening or Socket(loop, 1)
        self._socket.listener, self.port = self, self._socket.port
        loop.timer(loop.now(), self._socket.accept)

    def report_refusal(self, *_: str) -> None:
        """Nobody reads it."""

    def close(self) -> None:
        if self._socket.listener is self:
            self._socket.listener = None
            self._socket.close()


class Attempt:
    """Stands for `control.dialer._Attempt`: one connection from connect() to the end of the handshake."""

    def __init__(self, dialer: Dialer, _socket: object, target: Any, timeout: float) -> None:
        self.target, self.timeout = target, timeout
        self.is_over = self.is_accepted = self.was_silent = False
        self._dialer, self._process = dialer, cast("Process", dialer.loop)
        self._world = self._process.world
        self._node, self._port = int(target[1][0].rpartition(".")[2]), target[1][1]
        self._timer = self._process.timer(self._process.now() + timeout, self._on_timeout)
        self._peer: Peer | None = None  # until the dialer has it
        self._process.dialers.add(dialer)
        self._world.soon(min(0.9, self._world.scenario.delay), self._arrive)

    def _arrive(self) -> None:
        """Reach the kernel of the other node, unless that is off or cut off."""
        world, is_off = self._world, self._world.now < self._world.off_until.get(self._node, 0.0)
        own = self._process.number
        if self.is_over or is_off or world.is_cut(own, self._node) or world.is_cut(self._node, own):
            return
        socket = world.sockets.get((self._node, self._port))
        if socket is None:
            self.fail_later(CONNECTION_REFUSED)
        else:
            self.is_accepted = True
            socket.offer(self)

    def connect(self, other: Process) -> Peer:
        """Complete the handshake; return the other side, where that is so at once."""
        here = self._peer = Peer(self._process, self._node)
        here.other = there = Peer(other, self._process.number)
        there.other = here
        here._take(self._win, min(0.9, self._world.scenario.delay))
        return there

    def _win(self) -> None:
        peer, self._peer = self._peer, None
        self.discard()
        self._dialer.won(cast("Any", self), cast("Any", peer))

    def fail_later(self, reason: str) -> None:
        self._world.soon(self._world.scenario.delay, self._process.do, partial(self._fail, reason))

    def _on_timeout(self) -> None:
        self.was_silent = self.is_accepted
        self._fail("silent")

    def _fail(self, reason: str) -> None:
        if not self.is_over:
            self.discard()
            self._dialer.lost(cast("Any", self), reason)

    def discard(self) -> None:
        self.is_over = True
        self._timer.cancel()
        if self._peer is not None:
            self._peer.close()


class Run:
    """A generation that has begun."""

    def __init__(self, number: int, coordinator: SimulatedCoordinator, nodes: frozenset[int], size: int) -> None:
        self.number, self.coordinator, self.nodes, self.size = number, coordinator, nodes, size
        self.alive = 0  # workers
        self.has_trained = False

    @property
    def trains(self) -> bool:
        return self.alive == self.size


class Worker:
    """The process of a worker."""

    def __init__(self, agent: SimulatedAgent, generation: int, rank: int) -> None:
        """Start it; raise Violation if another one runs that must not."""
        self.world = world = agent.world
        self.agent, self.generation, self.rank = agent, generation, rank
        self.born = world.now
        run = world.runs[generation]
        self.stopped: tuple[int, float] | None = None
        self.has_raised = False
        if (generation, rank) in world.started:
            raise Violation(f"no rank runs twice: {self} is started again")
        for other in world.workers:
            if other.generation != generation and other.agent is agent:
                raise Violation(f"no worker of two generations runs on one node: {self} starts beside {other}")
            if other.generation < generation and run.coordinator.members >= {other.agent.number, agent.number}:
                raise Violation(f"no generation begins beside workers of a member: {self} starts while {other} runs")
        world.started.add((generation, rank))
        world.workers.append(self)
        run.alive += 1
        if run.trains:
            run.has_trained = True
            for one in world.runs.values():
                if one is not run and one.trains:
                    raise Violation(f"two generations never train at once: {generation} and {one.number}")
                if one.number > generation and one.has_trained:
                    raise Violation(f"generations train in their order: {generation} after {one.number}")
        world.at(world.now + world.scenario.work + world.dice.random(), self._finish)

    def __str__(self) -> str:
        return f"rank {self.rank} of generation {self.generation} on {self.agent}"

    def _finish(self) -> None:
        if not self.world.hangs and not self.has_raised:
            self.end(0)

    def signal(self, signum: int) -> None:
        self.stopped = (signum, self.world.now)
        scenario = self.world.scenario
        slow = {"ends": 0.2, "daemons": 0.2, "slow": 3.0}.get(scenario.program)
        if self.agent.number in scenario.slow:
            slow = scenario.grace_period
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
        world.runs[self.generation].alive -= 1
        status = world.statuses[self.generation, self.rank] = code if code is not None else 128 + (signum or 0)
        world.note(self, f"ends with {status}")
        self.agent.worker_ended(self, code, signum, error)
        for other in world.workers if status else ():
            if other.generation == self.generation and world.dice.random() < world.scenario.follows:
                world.soon(2.0, other.end, 1, None, FOLLOWS)
