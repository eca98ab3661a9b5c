"""What the agent of node 0 is besides: the place where all agents meet. `coordinate` decides, this carries it out."""

from __future__ import annotations

import selectors
from collections import Counter
from collections.abc import Callable, Sequence

from ddplaunch import coordinate
from ddplaunch.control import messages
from ddplaunch.control.handshake import Key
from ddplaunch.control.listener import Listener
from ddplaunch.control.peer import Peer
from ddplaunch.coordinate import OWN, Member
from ddplaunch.errors import LaunchError
from ddplaunch.exitcodes import USAGE
from ddplaunch.nodes.link import Ears, Link
from ddplaunch.nodes.pulse import Pulse
from ddplaunch.nodes.wire import received
from ddplaunch.process.port import Reservation, reserve
from ddplaunch.record import record
from ddplaunch.report.joint import Joint
from ddplaunch.report.traces import Traces

_NOT_MET_HINT = (
    "hint: is ddplaunch running there, with the same address and token? `--rdzv-timeout` says how long to wait"
)
FAREWELL = 2.0  # seconds that agents get to take note of the end


@record(kw_only=True)
class Terms:
    """What the coordinator lays down for all nodes."""

    policy: coordinate.Policy
    run_id: str
    address: str | None  # MASTER_ADDR as the user or the cluster gave it; None: as the others reach this node
    port: int  # MASTER_PORT; 0: a free one for each generation
    key: Key
    listen: str | None  # numeric address to listen on; None: all
    ports: Sequence[int]  # candidates to listen on
    silence: float  # seconds after which a silent agent counts as lost


class OwnLink(Link):
    """The link of the coordinator's own agent: messages need no network."""

    def __init__(self, ears: Ears, coordinator: Coordinator, clock: Callable[[], float]) -> None:
        super().__init__(ears, clock)
        self._coordinator = coordinator

    def send(self, message: messages.ToCoordinator) -> None:
        """Tell the coordinator."""
        self._coordinator.hear(OWN, message)

    @property
    def address(self) -> str | None:
        """The address of this node that most others reach."""
        return self._coordinator.reached_at

    @property
    def deadline(self) -> float | None:
        """When the coordinator wants to be called."""
        return self._coordinator.deadline

    def expire(self, now: float) -> None:
        """Have the coordinator do what the time asks for."""
        self._coordinator.expire(now)

    @property
    def is_over(self) -> bool:
        """Whether all other agents know that the job has ended."""
        return self._coordinator.is_over

    def close(self) -> None:
        """Close the coordinator."""
        self._coordinator.close()


class _Connection:
    """An authenticated agent, member or not yet."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.hello: messages.Hello | None = None
        self.pulse = Pulse()


class Coordinator:
    """The agents' meeting place, and the way to each of them."""

    def __init__(
        self,
        terms: Terms,
        voice: Joint,
        selector: selectors.BaseSelector,
        clock: Callable[[], float],
    ) -> None:
        self._terms = terms
        self._voice = voice
        self._selector = selector
        self._clock = clock
        self._state, _ = coordinate.begin(terms.policy, clock())
        self._own: Link | None = None
        self._hellos: dict[int, messages.Hello] = {}
        self._connections: dict[int, _Connection] = {}
        self._traces: dict[str, Traces] = {}  # of this generation, by host
        self._reservation: Reservation | None = None
        self._last_id = OWN
        self._beat_at: float | None = None
        self._over_at: float | None = None
        self._listener = Listener(
            selector,
            terms.key,
            address=terms.listen,
            ports=terms.ports,
            opened=self._opened,
            refused=self._refused,
            user_timeout=terms.silence,
            backlog=4096,
            most_half_open=max(64, 2 * terms.policy.most),
            clock=clock,
        )
        self.port = self._listener.port

    def join(self, link: Link, hello: messages.Hello) -> None:
        """Take the coordinator's own agent as a member."""
        self._own = link
        self._hellos[OWN] = hello
        self._feed(coordinate.Joined(_member(OWN, hello), self._clock()))

    # --- what comes in

    def _opened(self, peer: Peer) -> None:
        self._last_id += 1
        id = self._last_id
        self._connections[id] = connection = _Connection(peer)
        peer.received = lambda payload: self._received(id, payload)
        peer.closed = lambda reason: self._gone(id, reason)
        self._send(id, messages.encode(messages.Ping(self._clock())))
        connection.pulse.asked()
        if self._beat_at is None:
            self._beat_at = self._clock() + self._beat

    def _refused(self, address: str, reason: str) -> None:
        self._voice.say(f"refused a connection from {address}: {reason}")

    def _received(self, id: int, payload: bytes) -> None:
        connection = self._connections[id]
        try:
            message = messages.for_coordinator(payload)
        except messages.Malformed as error:
            self._expel(id, f"sent what is no message of ours ({error})")
            return
        connection.pulse.heard()
        match message:
            case messages.Pong(sent, at):
                connection.pulse.answered(sent, at, self._clock())
            case messages.Hello() if connection.hello is None:
                connection.hello = self._hellos[id] = message
                self._feed(coordinate.Joined(_member(id, message), self._clock()))
            case messages.Hello():
                self._expel(id, "said hello twice")
            case _ if connection.hello is None:
                self._expel(id, "did not say hello first")
            case _:
                self.hear(id, message)

    def hear(self, id: int, message: messages.ToCoordinator) -> None:
        """Take what a member says."""
        now = self._clock()
        match message:
            case messages.Stopping(why, signum):
                self._feed(coordinate.NodeStopping(id, _WHYS.get(why, coordinate.Why.FAILED), signum, now))
            case messages.Killing():
                self._feed(coordinate.NodeKilling(id, now))
            case messages.Ended(generation) if generation == self._state.generation:
                host = self._hellos[id].seat.host
                offset = self._connections[id].pulse.offset if id in self._connections else 0.0
                self._traces[host] = Traces(oom_kills=message.oom_kills, shm=message.shm, log_folder=message.log_folder)
                failed = message.start_failure
                start_failure = (
                    coordinate.StartFailed(failed.rank, host, failed.reason, failed.status) if failed else None
                )
                self._feed(coordinate.NodeEnded(id, received(message.exits, host, offset), start_failure, now))

    def _gone(self, id: int, reason: str) -> None:
        self._connections.pop(id, None)
        self._hellos.pop(id, None)
        self._feed(coordinate.Left(id, reason, self._clock()))

    def _expel(self, id: int, reason: str) -> None:
        self._connections[id].peer.close()
        self._gone(id, reason)

    # --- time

    @property
    def _beat(self) -> float:
        return min(1.0, self._terms.silence / 4)

    @property
    def deadline(self) -> float | None:
        """When `expire` is to be called at the latest."""
        deadlines = (self._state.deadline, self._listener.deadline, self._beat_at, self._over_at)
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def expire(self, now: float) -> None:
        """Do what the time asks for."""
        self._listener.expire(now)
        if self._beat_at is not None and now >= self._beat_at:
            self._feel_pulses(now)
        if self._state.deadline is not None and now >= self._state.deadline:
            self._feed(coordinate.DeadlineReached(now))

    def _feel_pulses(self, now: float) -> None:
        """Ask all agents whether they are there, and give up those that have not answered for too long.

        What counts is how often they were asked, so that a pause of this process makes nobody else look dead.
        """
        self._beat_at = now + self._beat if self._connections else None
        most = self._terms.silence / self._beat
        ping = messages.encode(messages.Ping(now))
        for id, connection in list(self._connections.items()):
            if connection.pulse.unanswered > most:
                self._expel(id, f"silent for {self._terms.silence:g} s")
            else:
                connection.pulse.asked()
                self._send(id, ping)

    # --- decisions

    def _feed(self, event: coordinate.Event) -> None:
        if self._over_at is not None and isinstance(event, coordinate.Left):
            return  # they go as they were told to
        self._voice.heard(event, self._state)
        self._state, actions = coordinate.step(self._state, event)
        for action in actions:
            self._do(action)

    def _do(self, action: coordinate.Action) -> None:
        match action:
            case coordinate.Begin(generation, order, restarts):
                self._begin(generation, order, restarts)
            case coordinate.Stop(ids, signum):
                self._tell(ids, messages.Stop(signum))
            case coordinate.Kill(ids):
                self._tell(ids, messages.Kill())
            case coordinate.Refuse(id, reason, status):
                words = f"error: the coordinator refused this node: {reason}\n" if reason else ""
                self._tell((id,), messages.Quit(status, "refused", words))
                if reason:
                    self._voice.say(f"refused {self._hellos[id].seat.host}: {reason}")
            case coordinate.Drop(id):
                if (connection := self._connections.pop(id, None)) is not None:
                    connection.peer.close()
            case coordinate.Report(wait):
                self._voice.failed(self._state, self._traces, wait)
            case coordinate.Say(text):
                self._voice.say(text)
            case coordinate.Dismiss(status, error):
                self._dismiss(status, f"error: {error}\n\n{_NOT_MET_HINT}\n" if error else "")

    def _begin(self, generation: int, order: Sequence[int], restarts: int) -> None:
        self._traces = {}
        self._release()
        try:
            self._reservation = reserve(self._terms.port)
        except LaunchError as error:
            self._dismiss(USAGE, error.render())
            return
        hellos = [self._hellos[id] for id in order]
        backend, reason = _common_backend(hellos)
        seats = tuple(hello.seat for hello in hellos)
        for place, id in reversed(list(enumerate(order))):  # its own agent, which is busy when it starts, last
            begin = messages.Begin(
                generation=generation,
                place=place,
                seats=seats,
                run_id=self._terms.run_id,
                address=self._terms.address or self._reached_as(hellos[1:] or hellos),
                port=self._reservation.port,
                backend=backend,
                backend_reason=reason,
                restarts=restarts,
            )
            self._tell((id,), begin)

    def _dismiss(self, status: int, error: str) -> None:
        words = self._voice.ended(self._state, self._traces, error)
        why = self._state.why.name.lower() if self._state.why is not None else "failed"
        ids = [id for id in self._connections if id in self._hellos]
        self._over_at = self._clock() + FAREWELL
        self._tell(ids, messages.Quit(status, why, words))
        assert self._own is not None
        self._own.take(messages.Quit(status, why, ""))

    # --- what goes out

    def _tell(self, ids: Sequence[int], message: messages.ToAgent) -> None:
        payload = messages.encode(message)
        for id in ids:
            if id == OWN:
                assert self._own is not None
                self._own.take(message)
            else:
                self._send(id, payload)

    def _send(self, id: int, payload: bytes) -> None:
        if (connection := self._connections.get(id)) is not None:
            connection.peer.send(payload)

    # --- facts

    @property
    def is_over(self) -> bool:
        """Whether all agents know that the job has ended, or have had the time to learn it."""
        return self._over_at is not None and (not self._connections or self._clock() >= self._over_at)

    @property
    def reached_at(self) -> str | None:
        """The address of this node that most of the others reach."""
        addresses = Counter(connection.peer.local_address for connection in self._connections.values())
        return addresses.most_common(1)[0][0] if addresses else None

    @staticmethod
    def _reached_as(hellos: Sequence[messages.Hello]) -> str:
        return Counter(hello.reached for hello in hellos).most_common(1)[0][0]

    def _release(self) -> None:
        if self._reservation is not None:
            self._reservation.release()
            self._reservation = None

    def close(self) -> None:
        """Let go of all that is open."""
        self._release()
        self._listener.close()
        for connection in self._connections.values():
            connection.peer.close()


_WHYS = {
    "FAILED": coordinate.Why.FAILED,
    "SIGNALLED": coordinate.Why.SIGNALLED,
    "TIMED_OUT": coordinate.Why.TIMED_OUT,
    "FRONT_LOST": coordinate.Why.FRONT_LOST,
}


def _member(id: int, hello: messages.Hello) -> Member:
    facts = hello.facts
    return Member(
        id=id,
        host="".join(letter if letter.isprintable() else "?" for letter in hello.seat.host),
        workers=hello.seat.workers,
        wanted=hello.place,
        agreed=(
            ("ddplaunch", facts.ddplaunch),
            ("Python", facts.python),
            ("torch", facts.torch),
            ("the program", facts.script),
            ("--nnodes", facts.nnodes),
        ),
    )


def _common_backend(hellos: Sequence[messages.Hello]) -> tuple[str, str]:
    """The backend that all nodes can use, and why."""
    found: dict[str, str] = {}
    for hello in hellos:
        found.setdefault(hello.backend, hello.seat.host)
    if len(found) == 1:
        return hellos[0].backend, hellos[0].backend_reason
    differing = ", ".join(f"{backend} on {host}" for backend, host in found.items())
    return "gloo", f"the nodes differ: {differing}"
