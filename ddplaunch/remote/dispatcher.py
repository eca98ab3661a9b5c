"""The loop of a job whose agents were started from here: it calls the hosts, brings them together, and shows what they say.

It stands where the agent of a job of one node stands, behind the same front. What the job does is decided by the agents.
"""

from __future__ import annotations

import gc
import selectors
import time
from collections.abc import Iterator, Mapping
from functools import partial

from ddplaunch import __version__, exitcodes
from ddplaunch.agent.pipes import FrontPipes, OutputQueue
from ddplaunch.agent.signals import SignalSource
from ddplaunch.record import record
from ddplaunch.remote import diagnose, messages
from ddplaunch.remote.chaos import Chaos
from ddplaunch.remote.connection import AgentStart, HostConnection, HostPhase
from ddplaunch.remote.console import Console
from ddplaunch.remote.diagnose import HostError
from ddplaunch.remote.protocol import FEWER, MEET, NUDGE, ORDER, PROTOCOL, SIGNAL, FrameError
from ddplaunch.remote.startup import FAREWELL, Startup
from ddplaunch.remote.status import HostStatuses
from ddplaunch.spec import Fault
from ddplaunch.supervise import node

SETTLE = 1.0  # seconds after a trouble in which others are waited for, to name them together
HURRY = 7.0  # seconds from the second signal to stop until nobody is waited for


@record(kw_only=True)
class RemoteJob:
    """All that the loop needs to know."""

    calls: tuple[AgentStart, ...]  # by place
    starter: str
    python: str  # the interpreter on the hosts
    least: int  # nodes
    env: Mapping[str, str]  # of the processes that lead to the hosts
    open_files: tuple[int, int]  # RLIMIT_NOFILE (soft, hard) of those processes
    signals: frozenset[int]  # that the front passes on
    stops: frozenset[int]
    silence: float  # seconds after which a silent host is lost
    meeting_time: float  # seconds in which all hosts must have answered
    grace_period: float  # seconds
    quiet: bool
    answers: bool  # whoever called for the job is told why it failed, in place of the user
    chaos: tuple[Fault, ...]


def run(job: RemoteJob, pipes: FrontPipes) -> int:
    """Carry the job out and give its exit status. Runs in a process of its own."""
    gc.freeze()
    gc.enable()
    return Dispatcher(job, pipes).run()


class Dispatcher:
    """The loop's state."""

    def __init__(self, job: RemoteJob, pipes: FrontPipes) -> None:
        now = time.monotonic()
        self._job = job
        self._selector = selectors.DefaultSelector()
        self._console = Console(OutputQueue(pipes.output[1]), self._selector, quiet=job.quiet, answers=job.answers)
        self._signals = SignalSource(
            self._selector,
            pipes,
            stops=job.stops,
            feed=self._heard,
            child_ended=_nothing,
            front_lost=self._console.abandon,
        )
        self._fates = HostStatuses([call.host for call in job.calls], job.least)
        self._branches = tuple(HostConnection(call, self._selector, self) for call in job.calls)
        self._chaos = Chaos(job.chaos, [partial(_pid, branch) for branch in self._branches], self._console.say)
        self._calls = Startup(
            self._branches,
            env=job.env,
            open_files=job.open_files,
            meeting_time=job.meeting_time,
            patience=job.grace_period + job.silence + FAREWELL,
            is_hopeless=lambda: bool(self._fates.troubles),
        )
        self._addresses: tuple[str, ...] = ()  # of the first host
        self._port: int | None = None  # where the coordinator listens
        self._signum = 0  # the first signal to stop
        self._given_up = 0  # hosts without which the job goes on
        self._front_lost = False
        self._last_words = ""  # how the job ended, as node 0 says: no word of a host comes below that
        self._orphan = ""  # what the others have to say of the loss of node 0
        self._orphan_at: float | None = None  # when that is said, unless we have found node 0 to be lost before
        self._beat_at = now + self._beat
        self._settle_by: float | None = None

    def run(self) -> int:
        """Run the loop until every branch is gone and all output taken; give the job's exit status."""
        self._signals.listen(self._job.signals)
        self._calls.call_next()
        while not self._calls.all_gone:
            self._wait()
        verdict = self._fates.verdict(signum=self._signum, front_lost=self._front_lost)
        if not self._front_lost:
            self._console.write(self._last_words)
        self._console.report(verdict.error)
        if verdict.remark:
            self._console.say(verdict.remark)
        while not self._console.is_empty:
            self._wait()
        return verdict.status

    # --- the loop

    def _wait(self) -> None:
        self._console.mind(self._branches)
        deadline = min(at for at in self._deadlines() if at is not None)
        still = self._selector.get_map()
        for key, _ in self._selector.select(max(0.0, deadline - time.monotonic())):
            if still.get(key.fd) is key:  # an earlier event of this round may have closed it
                key.data()
        self._expire(time.monotonic())

    def _deadlines(self) -> Iterator[float | None]:
        yield self._beat_at
        yield self._calls.answer_by
        yield self._calls.gone_by
        yield self._settle_by
        yield self._orphan_at
        yield self._chaos.deadline
        yield self._console.deadline

    def _expire(self, now: float) -> None:
        if now >= self._beat_at:
            self._beat_at = now + self._beat
            self._calls.ask_all(self._job.silence, self._beat, heeded=not self._console.is_full)
        if self._calls.answer_by is not None and now >= self._calls.answer_by:
            for branch in self._calls.unanswered():
                self._in_trouble(branch, diagnose.no_answer(self._job.meeting_time))
                branch.kill()
        if self._settle_by is not None and (now >= self._settle_by or not self._calls.is_undecided):
            self._settle_by = None
            self._calls.hang_up()
        if self._calls.gone_by is not None and now >= self._calls.gone_by and not self._console.is_full:
            self._calls.cut_off(self._console.say)
        if self._orphan_at is not None and now >= self._orphan_at:
            self._orphan_at = None
            if not self._last_words and self._calls.only_first_is_there:
                self._console.write(self._orphan)
        self._chaos.expire(now)

    @property
    def _beat(self) -> float:
        return min(1.0, self._job.silence / 4)

    # --- signals

    def _heard(self, event: node.Event) -> None:
        match event:
            case node.SignalReceived(signum, _, escalates):
                self._pass_on(signum, escalates)
            case node.FrontLost():
                self._front_lost = True
                self._calls.hang_up()

    def _pass_on(self, signum: int, escalates: bool) -> None:
        stops, is_first = signum in self._job.stops, not self._signum
        is_second = stops and escalates and not is_first
        if stops:
            self._signum = self._signum or signum
            self._console.hurry()
            if self._branches[0].phase is HostPhase.THERE:
                self._calls.call_nobody()
            else:
                self._calls.hang_up()
            if is_second:
                self._calls.expect_the_end(HURRY)
        for branch in self._branches:
            if branch.phase is HostPhase.THERE:
                # the coordinator tells the others too, and what it says first makes ours no second one
                counts = not stops or is_second or (is_first and branch is self._branches[0])
                branch.send(SIGNAL if escalates and counts else NUDGE, bytes([signum]))

    # --- what hosts say

    def greeted(self, branch: HostConnection, protocol: int, version: str) -> None:
        """Give a host its order."""
        if protocol != PROTOCOL or version != __version__:
            self._in_trouble(branch, diagnose.other_version(version))
            branch.hang_up()
            return
        branch.send(ORDER, branch.call.order)
        if branch is self._branches[0]:
            for _ in range(self._given_up):
                branch.send(FEWER, b"")
        self._introduce(branch)
        self._calls.call_next()

    def _introduce(self, branch: HostConnection) -> None:
        """Tell a host where the others are met, once that is known."""
        if self._port is not None and branch is not self._branches[0] and branch.phase is HostPhase.THERE:
            branch.send(MEET, messages.encode(messages.Meet(addresses=self._addresses, port=self._port)))

    def reported(self, branch: HostConnection, data: bytes) -> None:
        """Take a host's report.

        Raises:
            FrameError: it is none.
        """
        try:
            report = messages.report(data)
        except messages.Malformed as error:
            raise FrameError(f"sent what is no report ({error})") from None
        match report:
            case messages.Addresses(addresses):
                self._addresses = addresses
            case messages.Listening(port):
                self._port, branch.is_ready = port, True
                for other in self._branches:
                    self._introduce(other)
            case messages.Ready():
                branch.is_ready = True
            case messages.Begun(world_size):
                self._fates.has_begun = True
                self._chaos.begun(world_size)
            case messages.Worker(rank, pid):
                self._chaos.started(rank, pid, time.monotonic())
            case messages.Said() | messages.Outcome():
                self._console.pass_on(data)
            case messages.LastWords(text) if branch is self._branches[0]:
                self._last_words = text
            case messages.LastWords(text):
                self._orphan, self._orphan_at = text, time.monotonic() + self._job.silence
            case messages.Refused(message, hint, status):
                self._in_trouble(branch, diagnose.refused(message, hint, status))
            case messages.Ended(status):
                self._fates.ended(branch.call.place, status)

    def showed(self, branch: HostConnection, stream: bytes, data: bytes) -> None:
        """Show what a host shows."""
        self._console.show(branch, stream, data)
        self._calls.somebody_is_there()

    def gone(self, branch: HostConnection) -> None:
        """Take note that nothing more comes from a host."""
        status = self._fates.status_of(branch.call.place)
        if status == exitcodes.BUG:
            self._console.write(branch.said)
        elif status is None and not branch.given_up:
            self._lost(branch)
        self._calls.call_next()
        if branch is self._branches[0] and not self._fates.troubles:
            self._calls.call_nobody()
            self._calls.expect_the_end(self._job.grace_period + 2 * self._job.silence + FAREWELL)

    # --- what goes wrong

    def _lost(self, branch: HostConnection) -> None:
        """Take note of a host that is gone without the job's status."""
        trouble = diagnose.of_host(
            self._job.starter,
            self._job.python,
            never_started=branch.never_started,
            has_answered=branch.has_answered,
            status=branch.exit_status,
            said=branch.said,
            fault=branch.fault,
        )
        if not self._fates.has_begun:
            self._in_trouble(branch, trouble)
            return
        self._fates.lost(branch.call.place, trouble)
        if (branch.fault or branch.said.strip()) and branch is not self._branches[0]:
            self._console.say(f"{branch}: {trouble.message}")

    def _in_trouble(self, branch: HostConnection, trouble: HostError) -> None:
        """Take note of a host on which the job cannot run; without enough others, that ends it."""
        place, fates = branch.call.place, self._fates
        if self._calls.is_over or place in fates.troubles:
            return
        left = sum(other.phase is not HostPhase.GONE and other is not branch for other in self._branches)
        if fates.is_bearable(place, left):
            branch.given_up = True
            self._given_up += 1
            if self._branches[0].phase is HostPhase.THERE:
                self._branches[0].send(FEWER, b"")
            self._console.say(f"going on without {branch}: {trouble.message}")
            return
        fates.troubles[place] = trouble
        if self._settle_by is None:
            self._settle_by = time.monotonic() + SETTLE


def _pid(branch: HostConnection) -> int | None:
    return branch.pid


def _nothing() -> None:
    """The end of what leads to a host is seen by its pidfd."""
