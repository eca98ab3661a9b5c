"""What the agent of node 0 is besides: the place where all agents meet. `coordinate` decides, this carries it out."""

from __future__ import annotations

import selectors
from collections.abc import Callable, Sequence
from signal import SIGTERM

from ddplaunch.control import messages
from ddplaunch.coordinator.connections import Connections
from ddplaunch.coordinator.hello import common_backend, member_of, reached_as
from ddplaunch.coordinator.link import Link
from ddplaunch.coordinator.terms import Terms
from ddplaunch.coordinator.wire import readable, received
from ddplaunch.errors import LaunchError
from ddplaunch.exitcodes import USAGE
from ddplaunch.net.port import Reservation, reserve
from ddplaunch.report.job_reporter import JobReporter
from ddplaunch.supervise import job
from ddplaunch.supervise.job import OWN, Member
from ddplaunch.supervise.job.seating import why_refused
from ddplaunch.supervise.outcome import Traces

_NOT_MET_HINT = (
    "hint: is ddplaunch running there, with the same address and token? `--rdzv-timeout` says how long to wait"
)
FAREWELL = 2.0  # seconds that agents get to take note of the end


_NOBODY = -1  # no member's id


class Coordinator:
    """The agents' meeting place, and the way to each of them."""

    def __init__(
        self,
        terms: Terms,
        reporter: JobReporter,
        selector: selectors.BaseSelector,
        clock: Callable[[], float],
    ) -> None:
        self._terms = terms
        self._reporter = reporter
        self._clock = clock
        self._state, _ = job.begin(terms.policy, clock())
        self._own: Link | None = None
        self._hellos: dict[int, messages.Hello] = {}
        self._watchers: set[int] = set()
        self._at_the_door: dict[int, Member] = {}
        self._traces: dict[int, Traces] = {}  # of this generation, by rank
        self._reservation: Reservation | None = None
        self._over_at: float | None = None
        self._last_word: messages.Quit | None = None
        self._connections = Connections(
            terms, selector, said=self._said, gone=self._gone, refused=self._refused, clock=clock
        )
        self.port = self._connections.port

    def join(self, link: Link, hello: messages.Hello) -> None:
        """Take the coordinator's own agent as a member."""
        self._own = link
        self._hellos[OWN] = hello
        self._feed(job.Joined(member_of(OWN, hello), self._clock()))

    def expect_one_fewer(self) -> None:
        """Wait for one node less."""
        self._feed(job.OneFewer(self._clock()))

    # --- what comes in

    def _refused(self, address: str, reason: str) -> None:
        self._reporter.say(f"refused a connection from {address}: {reason}")

    def _said(self, id: int, message: messages.ToCoordinator) -> None:
        match message:
            case _ if id in self._watchers:
                self._watcher_spoke(message)
            case messages.Hello() if id not in self._hellos:
                self._hellos[id] = message = readable(message)
                self._welcome(member_of(id, message))
            case messages.Watch() if id not in self._hellos:
                self._watchers.add(id)
                if self._last_word is not None:
                    self._tell((id,), self._last_word)
            case messages.Hello() | messages.Watch():
                self._connections.expel(id, "said hello twice")
            case _ if id not in self._hellos:
                self._connections.expel(id, "did not say hello first")
            case _:
                self.hear(id, message)

    def _welcome(self, member: Member) -> None:
        """Take a member; where its place is taken only after all others have answered once more.

        A host may be back after a power cut, or a pod started anew, before it was missed.
        """
        if why_refused(self._state, member) is None:
            self._feed(job.Joined(member, self._clock()))
        else:
            self._at_the_door[member.id] = member
            self._connections.ask_all()

    def _let_in(self) -> None:
        """Take, or refuse, whoever waits at the door, as far as that is clear."""
        for id, member in list(self._at_the_door.items()):
            if why_refused(self._state, member) is None or self._connections.all_answer:
                del self._at_the_door[id]
                self._feed(job.Joined(member, self._clock()))

    def _watcher_spoke(self, message: messages.ToCoordinator) -> None:
        now = self._clock()
        match message:
            case messages.Stopping(why, signum):
                self._feed(job.JobStopping(_WHYS.get(why, job.Why.SIGNALLED), signum, now))
            case messages.Killing():
                self._feed(job.NodeKilling(_NOBODY, now))
            case messages.Forward():
                self._tell(list(self._hellos), message)

    def hear(self, id: int, message: messages.ToCoordinator) -> None:
        """Take what a member says; who was refused, or is at the door yet, has nothing to say."""
        if id not in self._state.members:
            return
        now = self._clock()
        match message:
            case messages.Stopping(why, signum):
                self._feed(job.NodeStopping(id, _WHYS.get(why, job.Why.FAILED), signum, now))
            case messages.Noticed(signum):
                self._feed(job.NodeNoticed(id, signum))
            case messages.Killing():
                self._feed(job.NodeKilling(id, now))
            case messages.Ended(generation) if generation == self._state.generation:
                host = self._hellos[id].seat.host
                offset = self._connections.offset(id)
                traces = Traces(oom_kills=message.oom_kills, shm=message.shm, log_folder=message.log_folder)
                self._traces.update(dict.fromkeys((end.rank for end in message.exits), traces))
                failed = message.start_failure
                start_failure = job.StartFailed(failed.rank, host, failed.reason, failed.status) if failed else None
                self._feed(job.NodeEnded(id, received(message.exits, host, offset), start_failure, now))

    def _gone(self, id: int, reason: str) -> None:
        self._hellos.pop(id, None)
        self._at_the_door.pop(id, None)
        if self._over_at is not None:
            return  # they go as they were told to
        if id in self._watchers:
            self._watchers.discard(id)
            self._feed(job.JobStopping(job.Why.FRONT_LOST, 0, self._clock()))
        else:
            self._feed(job.Left(id, reason, self._clock()))

    # --- time

    @property
    def deadline(self) -> float | None:
        """When `expire` is to be called at the latest."""
        deadlines = (self._state.deadline, self._connections.deadline, self._over_at)
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def expire(self, now: float) -> None:
        """Do what the time asks for."""
        self._connections.expire(now)
        if self._at_the_door:
            self._let_in()
        if self._state.deadline is not None and now >= self._state.deadline:
            self._feed(job.DeadlineReached(now))

    # --- decisions

    def _feed(self, event: job.Event) -> None:
        self._reporter.heard(event, self._state)
        self._state, actions = job.step(self._state, event)
        for action in actions:
            self._do(action)

    def _do(self, action: job.Action) -> None:
        match action:
            case job.Begin(generation, order, restarts):
                self._begin(generation, order, restarts)
            case job.Stop(ids, signum):
                self._tell(ids, messages.Stop(signum))
            case job.Kill(ids):
                self._tell(ids, messages.Kill())
            case job.Refuse(id, reason, status):
                words = f"error: the coordinator refused this node: {reason}\n" if reason else ""
                self._tell((id,), messages.Quit(status, "refused", words))
                if reason:
                    self._reporter.say(f"refused {self._hellos[id].seat.host}: {reason}")
            case job.Drop(id):
                self._connections.drop(id)
            case job.Report(wait):
                self._reporter.failed(self._state, self._traces, wait)
            case job.Say(text):
                self._reporter.say(text)
            case job.Dismiss(status, error, requeue):
                self._dismiss(status, f"error: {error}\n\n{_NOT_MET_HINT}\n" if error else "", requeue)

    def _begin(self, generation: int, order: Sequence[int], restarts: int) -> None:
        self._traces = {}
        self._release()
        try:
            self._reservation = reserve(self._terms.port)
        except LaunchError as error:
            self._dismiss(USAGE, error.render())
            return
        hellos = [self._hellos[id] for id in order]
        backend, reason = common_backend(hellos)
        seats = tuple(hello.seat for hello in hellos)
        for place, id in reversed(list(enumerate(order))):  # its own agent, which is busy when it starts, last
            begin = messages.Begin(
                generation=generation,
                place=place,
                seats=seats,
                run_id=self._terms.run_id,
                address=self._terms.address or reached_as(hellos[1:] or hellos),
                port=self._reservation.port,
                backend=backend,
                backend_reason=reason,
                restarts=restarts,
            )
            self._tell((id,), begin)

    def _dismiss(self, status: int, error: str, requeue: int = 0) -> None:
        words, outcome = self._reporter.ended(self._state, self._traces, error)
        why = self._state.why.name.lower() if self._state.why is not None else "failed"
        status, why = outcome or (status, why)
        self._over_at = self._clock() + FAREWELL
        is_watched = bool(self._watchers) and not _ends_watchers(requeue)
        self._last_word = messages.Quit(status, why, words, requeue, is_watched)
        self._tell(list(self._connections.ids), self._last_word)  # also to who has come too late to say what it is
        assert self._own is not None
        self._own.take(messages.Quit(status, why, "", requeue, is_watched))

    # --- what goes out

    def _tell(self, ids: Sequence[int], message: messages.ToAgent) -> None:
        payload = messages.encode(message)
        for id in ids:
            if id == OWN:
                assert self._own is not None
                self._own.take(message)
            else:
                self._connections.send(id, payload)

    # --- facts

    @property
    def is_over(self) -> bool:
        """Whether all agents know that the job has ended, or have had the time to learn it."""
        return self._over_at is not None and (not self._connections.ids or self._clock() >= self._over_at)

    @property
    def reached_at(self) -> str | None:
        """The address of this node that most of the others reach."""
        return self._connections.reached_at

    def _release(self) -> None:
        if self._reservation is not None:
            self._reservation.release()
            self._reservation = None

    def close(self) -> None:
        """Let go of all that is open."""
        self._release()
        self._connections.close()


_WHYS = {
    "FAILED": job.Why.FAILED,
    "SIGNALLED": job.Why.SIGNALLED,
    "TIMED_OUT": job.Why.TIMED_OUT,
    "FRONT_LOST": job.Why.FRONT_LOST,
}


def _ends_watchers(notice: int) -> bool:
    """Whether this notice may at any moment end the command that has started the agents, and we can do what it should do.

    SIGTERM of Slurm ends the shell of a batch script, and with that all that it has started.
    """
    if notice != SIGTERM:
        return False
    import shutil  # few jobs need it

    return shutil.which("scontrol") is not None
