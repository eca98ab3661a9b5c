"""The simulated network: connections whose directions keep their order, delayed, cut and broken, in place of sockets."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ddplaunch.reach.channel.peer import RESET
from ddplaunch.spec.outcome import CLOSED
from tests.simulator.scenario import COMMAND
from tests.simulator.world import Process, address_of

_SLOW = 6.0  # seconds that a message takes at most over a slow link, or the news that a connection is broken
_LOOKS_EVERY = 1.0  # seconds


class Peer:
    """One side of a connection between two processes: the other one, as `reach.channel.peer.Peer` shows it."""

    other: Peer

    def __init__(self, process: Process, there: Process) -> None:
        self.process, self.is_open = process, True
        self.received: Callable[[bytes], None] = lambda payload: None
        self.closed: Callable[[str], None] = lambda reason: None
        self.here, self.there = process.machine.number, there.machine.number
        self.local_address, self.address = address_of(self.here), address_of(self.there)
        self._world = process.world
        self._under_way: deque[Any] = deque()  # to this side; a text says why the connection has ended
        self._last = 0.0  # when the last of it arrives
        self._world.peers.append(self)

    def host_silence(self) -> float:
        """Kernels do not say it here."""
        return 0.0

    def sends_in_vain(self) -> bool:
        """Nor that."""
        return False

    def admit(self) -> None:
        """No message is too long."""

    def receive_rest(self) -> None:
        """All that was sent before has arrived."""

    def send(self, payload: bytes) -> None:
        if self.is_open:
            self.other._take(payload)

    def close(self) -> None:
        """Close: the other side learns of it after all that was sent."""
        if self.is_open:
            self._shut()
            self.other._take(CLOSED)

    def vanish(self) -> None:
        """Be gone without a word, and with what was not sent yet."""
        self._shut()
        self.other._under_way.clear()

    def reset(self) -> None:
        """Learn some time that the connection is broken; what was under way is lost."""
        self._under_way.clear()
        self._take(RESET, _SLOW)

    def heal(self) -> None:
        for _ in self._under_way:
            self._schedule()

    def _shut(self) -> None:
        self.is_open = False
        if self in self._world.peers:
            self._world.peers.remove(self)

    def _take(self, item: Any, most: float | None = None) -> None:
        if self.is_open:
            self._under_way.append(item)
            self._schedule(most)

    def _schedule(self, most: float | None = None) -> None:
        world = self._world
        if most is None:
            most = (
                _SLOW
                if world.now < world.slow_until.get(frozenset((self.here, self.there)), 0.0)
                else world.scenario.delay
            )
        self._last = max(self._last, world.now + world.dice.random() * most)
        world.at(self._last, self._arrive)

    def _arrive(self) -> None:
        if self._under_way and not self._world.is_cut(self.there, self.here):
            self.process.do(partial(self._hand_over, self._under_way.popleft()))

    def _hand_over(self, item: Any) -> None:
        if not self.is_open:
            return
        if item == CLOSED and self.here == COMMAND and self._world.arbiter is not None:
            self._world.arbiter.on_agent_ended(self)
        elif isinstance(item, str):
            self._shut()
            self.closed(item)
        else:
            self.received(item)


def listen(_address: str | None, ports: Sequence[int]) -> int:
    """Return the first of the ports, in place of the socket of `system.net.port.listen`; 0: any."""
    return ports[0]


class Listener:
    """Takes connections at a port, in place of `reach.channel.listener.Listener`."""

    def __init__(self, loop: Process, port: int, key: Any, owner: Any, **_more: Any) -> None:
        self.process, self.key, self.owner = loop, key, owner
        self._world = loop.world
        self.port = port or 30_000 + len(self._world.listening)
        self._at = address_of(loop.machine.number), self.port
        self._world.listening[self._at] = self

    def report_refusal(self, address: str, reason: str) -> None:
        self._world.note(self.process, f"refuses {address}: {reason}")

    def close(self) -> None:
        if self._world.listening.get(self._at) is self:
            del self._world.listening[self._at]


class Dialer:
    """Connects to the first target that can be reached, in place of `reach.channel.dialer.Dialer`."""

    def __init__(self, loop: Process, key: Any, owner: Any, **_more: Any) -> None:
        self._process, self._key, self._owner = loop, key, owner
        self._targets: Sequence[Any] = ()
        self._look_at = loop.timer(None, self._look)

    def set_targets(self, targets: Sequence[Any]) -> None:
        self._targets = targets
        world = self._process.world
        self._look_at.set(self._process.now() + world.dice.random() * world.scenario.delay)

    def stop(self) -> None:
        self._look_at.cancel()

    def _look(self) -> None:
        process, world = self._process, self._process.world
        here = process.machine.number
        for _, (address, port) in self._targets:
            found = world.listening.get((address, port))
            if found is None:
                self._owner.on_refused(address, "connection refused")
                continue
            there = found.process.machine.number
            if found.process.is_stopped or world.is_cut(here, there) or world.is_cut(there, here):
                self._owner.on_refused(address, "no answer")
            elif found.key != self._key:
                self._owner.on_refused(address, "wrong token")
            else:
                mine, other = Peer(process, found.process), Peer(found.process, process)
                mine.other, other.other = other, mine
                found.process.do(partial(found.owner.on_opened, other))
                self._owner.on_opened(mine)
                return
        self._look_at.set(process.now() + _LOOKS_EVERY)


class Reservation:
    """A port that is reserved, in place of `system.net.port.Reservation`."""

    port = 29_400

    def release(self) -> None:
        """Nobody else wants it."""
