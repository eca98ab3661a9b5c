"""The loop of a process: serves descriptors, timers, questions to children and the events they make, in one order.

No thread and no polling: without anything due the process sleeps. With a timer it wakes once a second, see
`system/process/clock.py`.

Who watches a descriptor, sets a timer or asks a question is called back itself, by a call without arguments. What concerns others
is posted as an event, and goes to the owner of the loop, before anything else is served.
"""

from __future__ import annotations

import errno
import os
import selectors
import signal
import socket
from collections import deque
from collections.abc import Callable, Sequence
from math import inf
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from ddplaunch.system.process.clock import PROCESS_CLOCK, Clock
from ddplaunch.system.process.tree import ends_within

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE

T = TypeVar("T")
LONGEST = 256 << 20  # bytes of an answer
KILL_TIMEOUT = 1.0  # seconds that a child has to end after its answer, or when the loop gives up


class Timer:
    """A call that the loop makes once, at a time of its clock; the time can be set, moved and taken back."""

    def __init__(self, timers: dict[Timer, None], call: Callable[[], object], *, may_come_late: bool) -> None:
        self.at = inf  # inf: no call is to be made
        self.call = call
        self.may_come_late = may_come_late
        self._timers = timers  # of the loop, those that are set, in the order in which they were

    @property
    def is_set(self) -> bool:
        """Whether a call is to be made."""
        return self.at < inf

    def set(self, at: float | None) -> None:
        """Make the call at this time, in place of any before; None: make none."""
        self.at = inf if at is None else at
        if self.is_set:
            self._timers[self] = None
        else:
            self._timers.pop(self, None)

    def set_by(self, at: float) -> None:
        """Make the call at this time at the latest."""
        self.set(min(at, self.at))

    def cancel(self) -> None:
        """Make no call."""
        self.set(None)


class Pending(Generic[T]):
    """A question of this process that a child answers, as long as nobody gives the question up."""

    def __init__(
        self,
        loop: Loop,
        question: Callable[[], T],
        otherwise: T,
        answered: Callable[[T], object],
        descriptors: Sequence[int],
        within: float | None,
    ) -> None:
        """Ask; `answered` is called once, from the loop: with the answer, or with `otherwise` if there is none.

        It is called here, with `otherwise`, if the machine has no room for a child. The child has no descriptors but these,
        numbered from `process.ask.FIRST` on. After `within` seconds the kernel ends the child; None: no time limit.
        """
        import pickle  # noqa: F401 - for the answer: where the import fails, it fails here, and not in the loop

        from ddplaunch.system.process.ask import fork_asked  # few jobs ask anything

        self._loop = loop
        self._answered = answered
        self.answer = otherwise  # until the child has answered
        self._received = bytearray()
        self.pid = 0  # of the child while it lives: only this object may reap it
        try:
            self.pid, self._pipe = fork_asked(question, descriptors, within)
        except OSError:  # the machine has no room for it
            answered(otherwise)
        else:
            loop.watch(self._pipe, self._on_readable)

    def _on_readable(self) -> None:
        """Take a part of the answer, or its end; give up an answer that is too long. Called by the loop."""
        data = os.read(self._pipe, 1 << 16)
        self._received += data
        if not data:
            self._close(bytes(self._received))
        elif len(self._received) > LONGEST:
            self.give_up()

    def give_up(self) -> None:
        """Answer the question by `otherwise`, unless it is answered already: the loop is to wait no longer."""
        if self.pid:
            self._close(b"")

    def _close(self, received: bytes) -> None:
        """Kill and reap the child, and call `answered` with the answer in `received`, all that the child has sent."""
        from ddplaunch.system.process.ask import AskedEnded, unpack

        pid, self.pid = self.pid, 0
        self._loop.unwatch(self._pipe)
        os.close(self._pipe)
        os.kill(pid, signal.SIGKILL)
        if ends_within(pid, KILL_TIMEOUT):
            os.waitpid(pid, 0)
        try:
            self.answer = unpack(received)
        except AskedEnded:  # no answer, or not all of it: `otherwise` stands for it
            pass
        except Exception as error:  # of the question, a bug of ours: `otherwise` stands for an answer here, too
            if self._loop.question_failed is None:
                raise
            self._loop.question_failed(error)
        self._answered(self.answer)


class Loop:
    """What a process waits for, and whom it calls then."""

    def __init__(self, clock: Clock = PROCESS_CLOCK, selector: selectors.BaseSelector | None = None) -> None:
        """Make a loop without events; a fake clock and selector drive it in tests."""
        self.handle: Callable[[Any], object] = lambda _event: None  # takes each event; set by the owner
        # called ahead of all that is due, after a pause of this process; set by a part that compares times with other machines
        self.after_pause: Callable[[], object] = lambda: None
        # takes what a question raised, which is a bug of ours; set by an owner that goes on without its answer
        self.question_failed: Callable[[Exception], object] | None = None
        self.clock = clock
        clock.begin()  # a pause before this was nobody's
        self.now = clock.now  # seconds
        self._selector = selector or selectors.DefaultSelector()
        self._watched = self._selector.get_map()  # by descriptor; the data of a key is what is to be called
        self._timers: dict[Timer, None] = {}  # those that are set
        self._events: deque[Any] = deque()  # that were posted, and not handled yet
        self._pending: list[Pending[Any]] = []  # questions

    # --- what is waited for

    def watch(self, file: FileDescriptorLike, ready: Callable[[], object], events: int = READ) -> None:
        """Call `ready` whenever the file can be read (or what else `events` says), until `unwatch`: before it is closed."""
        if file in self._watched:
            self._selector.modify(file, events, ready)
        else:
            self._selector.register(file, events, ready)

    def unwatch(self, file: FileDescriptorLike) -> None:
        """Watch a file no more, if it is watched at all."""
        if file in self._watched:
            self._selector.unregister(file)

    def watches(self, file: FileDescriptorLike) -> bool:
        """Return whether a file is watched."""
        return file in self._watched

    def timer(self, at: float | None, call: Callable[[], object], *, may_come_late: bool = False) -> Timer:
        """Return a timer that makes this call at this time; None: once a time is set.

        `may_come_late`: the call may, after a pause of this process, so that this process does not wake each second until then.
        """
        timer = Timer(self._timers, call, may_come_late=may_come_late)
        timer.set(at)
        return timer

    def post(self, event: object) -> None:
        """Hand an event to the owner of the loop, after those that were posted before and ahead of everything else."""
        self._events.append(event)

    def ask(
        self,
        question: Callable[[], T],
        otherwise: T,
        answered: Callable[[T], object] = lambda _: None,
        descriptors: Sequence[int] = (),
        within: float | None = None,
    ) -> Pending[T]:
        """Have a child answer a question that may take long, within so many seconds; see `Pending`."""
        pending = Pending(self, question, otherwise, answered, descriptors, within)
        self._pending = [*(one for one in self._pending if one.pid), pending]
        return pending

    @property
    def asked_pids(self) -> frozenset[int]:
        """The children that have not answered yet."""
        return frozenset(pending.pid for pending in self._pending if pending.pid)

    # --- waiting

    def run_once(self) -> None:
        """Sleep until something is due, then serve everything that is due, with the events that follow.

        Descriptors are served in the order in which they became ready, so the first of two workers that die comes first. A
        descriptor that an earlier handler of this round has closed is not served. Then come the timers, by their times.
        """
        had_events = bool(self._events)  # then do not sleep: one of these may be all that the caller waits for
        self._hand_over_events()
        deadline = self.now() if had_events else self._soonest(may_come_late=False)
        last_pause = self.clock.pause
        ready = self.clock.select(self._selector, deadline, self._soonest(may_come_late=True))
        if self.clock.pause is not last_pause:  # this process has been paused meanwhile
            self.after_pause()
            self._hand_over_events()
        for key, _ in ready:
            if self._watched.get(key.fd) is key:  # it is watched still
                key.data()
                self._hand_over_events()
        now = self.now()
        for timer in sorted((timer for timer in self._timers if timer.at <= now), key=lambda timer: timer.at):
            if timer.at <= now:  # an earlier call may have moved it
                timer.cancel()
                timer.call()
                self._hand_over_events()

    def _hand_over_events(self) -> None:
        """Have the owner handle all events that were posted, and those that are posted meanwhile."""
        while self._events:
            self.handle(self._events.popleft())

    def _soonest(self, *, may_come_late: bool) -> float:
        return min((timer.at for timer in self._timers if timer.may_come_late is may_come_late), default=inf)

    def give_up_questions(self) -> None:
        """Answer all pending questions with their `otherwise`, at once."""
        for pending in self._pending:
            pending.give_up()

    def close(self) -> None:
        """Give up all pending questions, and watch nothing any more."""
        self.give_up_questions()
        self._timers.clear()
        self._selector.close()


PAUSE = 1.0  # seconds
_GONE_ALREADY = (errno.ECONNABORTED, errno.EPROTO, errno.EINTR)


class AcceptorOwner(Protocol):
    """Who takes the connections of an `Acceptor`, from the loop."""

    def on_connection(self, sock: socket.socket, address: Any) -> None:
        """Take a new connection, and the address of its other side; may close the acceptor."""

    def on_pause(self, error: OSError) -> None:
        """Hear why no connection is taken for a second."""


class Acceptor:
    """A listening socket, whose connections its owner gets.

    A connection that cannot be accepted stays in the backlog, and the socket readable: without a pause the loop would be busy.
    """

    def __init__(self, loop: Loop, sock: socket.socket, owner: AcceptorOwner, *, most: int = 64) -> None:
        """Take over a socket that listens; take at most so many connections in a turn of the loop."""
        self._loop = loop
        self._sock = sock
        self._owner = owner
        self._most = most
        self._end_of_pause = loop.timer(None, self.start)

    def start(self) -> None:
        """Take connections; a second time changes nothing, and a pause goes on."""
        if not self._end_of_pause.is_set:
            self._loop.watch(self._sock, self._on_ready)

    def close(self) -> None:
        """Take none any more; a second time changes nothing."""
        self._end_of_pause.cancel()
        if self._sock.fileno() >= 0:
            self._loop.unwatch(self._sock)
            self._sock.close()

    def _on_ready(self) -> None:
        """Take up to `most` new connections; without room for more descriptors, pause for a while. Called by the loop."""
        for _ in range(self._most):
            try:
                sock, address = self._sock.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _GONE_ALREADY:  # this client; the next may be there
                    continue
                self._loop.unwatch(self._sock)
                self._end_of_pause.set(self._loop.now() + PAUSE)
                self._owner.on_pause(error)
                return
            sock.setblocking(False)
            self._owner.on_connection(sock, address)
            if self._sock.fileno() < 0:  # the owner has closed this object
                return
