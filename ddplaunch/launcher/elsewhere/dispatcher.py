"""The loop of a job whose agents are started from here: it connects to the hosts, starts the agents, and shows their output.

It runs in place of a job's only agent, behind the same front. What the job does is decided by the agents.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from functools import partial
from signal import SIGINT, SIGTERM
from typing import TYPE_CHECKING

from ddplaunch import __version__
from ddplaunch.launcher.decide import node
from ddplaunch.launcher.elsewhere.chaos import Chaos
from ddplaunch.launcher.elsewhere.console import Console
from ddplaunch.launcher.elsewhere.coordinator_host import CoordinatorHost
from ddplaunch.launcher.elsewhere.statuses import HostStatuses
from ddplaunch.launcher.node import child
from ddplaunch.launcher.node.events import ClientAsked, ClientGone, ClientsFailed, FrontWaits, StopAsked
from ddplaunch.launcher.node.signals import END_MARGIN, SignalOrigin, SignalSource
from ddplaunch.launcher.tell.closing import render_repeated
from ddplaunch.reach import diagnose, messages
from ddplaunch.reach.connections import QUIT_TIMEOUT, HostConnection, HostPhase, RemoteJob, Startup
from ddplaunch.reach.diagnose import HostError
from ddplaunch.reach.pipes import CONTROL, SOCKET, FrontPipes, OutputQueue
from ddplaunch.reach.protocol import COORDINATOR, FEWER, ORDER, PLAIN_SIGNAL, PROTOCOL, SIGNAL
from ddplaunch.reach.repeated_stop import Typed
from ddplaunch.system import exitcodes
from ddplaunch.system.errors import expendable
from ddplaunch.system.fields import Malformed
from ddplaunch.system.loop.loop import Loop
from ddplaunch.system.loop.stream import FrameError

if TYPE_CHECKING:  # only a job that others than simulated nodes run needs it
    from ddplaunch.launcher.elsewhere.front_socket import FrontSocket

SETTLE_TIME = 1.0  # seconds after a host's error in which others are awaited, so that one message names all
_LOOK_WITHIN = 2.0  # seconds to find out whether node 0 is here
KILL_TIMEOUT = 7.0  # seconds from the second signal to stop until the remaining connections are killed


def run(job: RemoteJob, pipes: FrontPipes) -> int:
    """Run the job and return its exit status. Runs in a process of its own."""
    gc.freeze()
    gc.enable()
    child.decide_start(pipes)
    return Dispatcher(Loop(), job, pipes).run()


class Dispatcher:
    """The loop's state."""

    def __init__(self, loop: Loop, job: RemoteJob, pipes: FrontPipes) -> None:
        """Prepare the connections to all hosts; `run` starts them. `pipes` lead to the front of this command."""
        self._job = job
        self._loop = loop
        loop.handle = self._on_event
        self._console = Console(
            loop,
            OutputQueue(loop, pipes.output[1]),
            quiet=job.spec.verbosity < 0,
            reports_to_caller=job.reports_to_caller,
        )
        self._spare = pipes.spare
        self._signals = SignalSource(
            loop,
            pipes,
            stops=job.spec.ending_signals,
            end_within=job.spec.grace_period + END_MARGIN,
            from_caller=job.reports_to_caller,
            heartbeat_timeout=job.spec.heartbeat_timeout,
        )
        self._statuses = HostStatuses([agent.host for agent in job.agents], job.min_nodes)
        self._hosts = tuple(HostConnection(agent, loop, self) for agent in job.agents)
        self._coordinator = CoordinatorHost(loop, self._hosts, job.min_nodes, job.spec.heartbeat_timeout)
        self._chaos = Chaos(loop, job.spec.chaos, self._hosts, self._console.notify)
        self._startup = Startup(
            loop,
            job,
            self._hosts,
            self,
            has_failed=lambda: not self._statuses.may_try_others,
            notify=self._console.notify,
        )
        self._addresses: tuple[str, ...] = ()  # of the first host
        self._port: int | None = None  # where the coordinator listens
        self._world_size = 0  # of the latest generation
        self._registered: dict[HostConnection, messages.Registered] = {}  # where the sockets of the run are
        self._run_socket: FrontSocket | None = None  # for commands typed where the job was, if node 0 runs elsewhere
        self._signum = 0  # the first signal to stop
        self._given_up = 0  # hosts without which the job goes on
        self._front_lost = False
        # how the job ended, from the coordinator, or that this was lost, from the others: printed after all output of hosts
        self._final_reports: dict[HostConnection, str] = {}
        # when it is printed that the coordinator was lost, unless we have lost its host ourselves before
        self._loss_report_at = loop.timer(None, self._report_loss)
        self._settle_by = loop.timer(None, self._startup.disconnect)

    def run(self) -> int:
        """Run the loop until every connection is closed and all output taken; return the job's exit status."""
        self._signals.listen(self._job.signals)
        self._startup.start_next()
        while not self._startup.all_closed:
            self._wait()
        speakers = self._coordinator.speakers
        verdict = self._statuses.verdict(
            [host.agent.node_rank for host in speakers], signum=self._signum, front_lost=self._front_lost
        )
        if self._run_socket is not None:
            self._run_socket.end(verdict.status)
        # if the job could not begin, the agents report only that other hosts were cut off: the verdict says why
        if not self._front_lost and not self._statuses.is_prevented:
            self._console.write(next((text for host in speakers if (text := self._final_reports.get(host))), ""))
        self._console.report(verdict.error)
        if verdict.note:
            self._console.notify(verdict.note)
        while self._console.queue.size:
            self._wait()
        return verdict.status

    # --- the loop

    def _wait(self) -> None:
        self._console.update(self._hosts)
        self._startup.is_read = not self._console.queue.full
        self._loop.run_once()
        if self._settle_by.is_set and not self._startup.is_undecided:
            self._settle_by.cancel()
            self._startup.disconnect()

    def _report_loss(self) -> None:
        """Print that the coordinator was lost, unless it has reported the end of the job since. Called by the loop."""
        current = self._coordinator.current
        if current in self._final_reports or self._statuses.is_prevented or not self._startup.only_connected(current):
            return
        self._console.write(self._final_reports.popitem()[1])
        self._final_reports.clear()

    # --- signals

    def _on_event(self, event: object) -> None:
        """Take one event of the loop: a signal, a client's request, or the end of the front."""
        match event:
            case node.SignalReceived(signum, _, escalates) if not event.is_copy:
                if event.taken_for:
                    self._console.notify(render_repeated(event, os.getppid()))
                self._forward(signum, escalates)
            case FrontWaits():
                self._signals.let_front_stop(all_stopped=True)
            case ClientAsked(number, request) if self._run_socket is not None:
                expendable(partial(self._run_socket.answer, number, request, self._world_size), self._no_run_socket)
            case StopAsked():
                # as Ctrl-C does; with another signal if that is ignored here, as after nohup
                stop = SIGINT if SIGINT in self._job.signals else SIGTERM
                self._signals.received(stop, SignalOrigin.FRONT, typed=Typed.YES)
            case ClientGone(number) if self._run_socket is not None:
                self._run_socket.clients.forget(number)
            case ClientsFailed(why):
                self._no_run_socket(why)
            case node.FrontLost():
                self._front_lost = True
                self._console.queue.abandon()
                self._startup.disconnect()

    def _forward(self, signum: int, escalates: bool) -> None:
        """Pass a signal on to the connected hosts; at a stop, start no further hosts."""
        stops, is_first = signum in self._job.spec.ending_signals, not self._signum
        is_second = stops and escalates and not is_first
        self._console.note_signal(signum)
        if stops:
            self._signum = self._signum or signum
            self._console.limit_wait()
            if self._may_be_succeeded or self._coordinator.current.phase is HostPhase.CONNECTED:
                self._startup.stop_starting()
            else:
                self._startup.disconnect()
            if is_second:
                self._startup.end_within(KILL_TIMEOUT)
        for host in self._hosts:
            if host.phase is HostPhase.CONNECTED:
                # the coordinator stops the others too: this signal must not count as their second
                counts = not stops or is_second or (is_first and host is self._coordinator.current)
                host.send(SIGNAL if escalates and counts else PLAIN_SIGNAL, bytes([signum]))

    # --- from the hosts

    def never_connected(self, hosts: Sequence[HostConnection]) -> None:
        """Fail hosts on which ddplaunch has not started in time."""
        for host in hosts:
            self._host_failed(host, diagnose.not_started(self._job.spec.rdzv_timeout))
            host.kill()

    def connected(self, host: HostConnection, protocol: int, version: str) -> None:
        """Send a host its order, the news that came before it was connected, and start the next host."""
        if protocol != PROTOCOL or version != __version__:
            self._host_failed(host, diagnose.other_version(version))
            host.close_stdin()
            return
        host.send(ORDER, host.agent.order())
        if host is self._hosts[0]:
            for _ in range(self._given_up):
                host.send(FEWER, b"")
        self._send_coordinator(host)
        self._startup.start_next()

    def _send_coordinator(self, host: HostConnection) -> None:
        """Send a host the coordinator's address, once that is known."""
        if self._port is not None and host is not self._hosts[0] and host.phase is HostPhase.CONNECTED:
            host.send(COORDINATOR, messages.encode(messages.CoordinatorAddress(self._addresses, self._port)))

    def report_received(self, host: HostConnection, data: bytes) -> None:
        """Handle a host's report. Raises FrameError: it is malformed, or only the first host may send it."""
        try:
            report = messages.report(data)
        except Malformed as error:
            raise FrameError(f"sent a malformed report ({error})") from None
        takes_over = isinstance(report, messages.Listening) and host is not self._hosts[0] and self._may_be_succeeded
        speaks_for_job = takes_over or self._coordinator.speaks_for_job(host)
        if isinstance(report, messages.FromCoordinator) and not speaks_for_job:
            raise FrameError("sent a report that only the first host may send")
        match report:
            case messages.Addresses(addresses) if host is self._hosts[0]:
                self._addresses = addresses
            case messages.Listening() if takes_over:
                self._registered.pop(host, None)
                self._coordinator.took_over(host)
            case messages.Listening(port) if self._addresses and self._port is None:
                self._port, host.is_ready = port, True
                for other in self._hosts:
                    self._send_coordinator(other)
            case messages.Registered() if host not in self._registered:
                self._registered[host] = report
                self._reach(host)
            case messages.Coordinates() if host is not self._hosts[0]:
                self._follow(host)
            case messages.Ready():
                host.is_ready = True
            case messages.Begun(world_size):
                self._statuses.has_begun, self._world_size = True, world_size
                self._chaos.begun(world_size)
            case messages.GenerationBegun(number):
                self._coordinator.generation_begun(host, number)
            case messages.Worker(rank, pid) if self._job.spec.chaos:
                self._chaos.started(rank, pid)
            case messages.FailureText() | messages.Outcome():
                self._console.queue.put(CONTROL, data)
            case messages.FinalReport(text):
                self._final_reports[host] = text
                if host is not self._coordinator.current:
                    self._loss_report_at.set(self._loop.now() + self._job.spec.heartbeat_timeout)
            case messages.OrderRefused(message, hint, status):
                status = exitcodes.RENDEZVOUS if status == exitcodes.USAGE else status
                self._host_failed(host, HostError(message, hint, status))
            case messages.AgentEnded(status, spared):
                if self._job.starter == "simulate":  # then it is a process of this host
                    for pid, started in spared:
                        self._spare(pid, started)
                self._statuses.ended[host.agent.node_rank] = status
                self._coordinator.agent_ended(host, status)

    @property
    def _may_be_succeeded(self) -> bool:
        """Whether another host may take over when that of the coordinator is lost."""
        return self._coordinator.may_change and self._statuses.has_begun

    def _follow(self, host: HostConnection) -> None:
        """Take a host, whose agent has taken over and begins a generation, for that of the coordinator."""
        self._coordinator.begun(host)
        if not self._signum:
            self._startup.go_on()
        self._reach(host)

    def chunk_received(self, host: HostConnection, data: bytes) -> None:
        """Take what the coordinator's agent replies to a command here.

        Raises FrameError: it is malformed, or from another host.
        """
        try:
            chunk = messages.chunk(data)
        except Malformed as error:
            raise FrameError(f"sent a malformed reply ({error})") from None
        if not self._coordinator.speaks_for_job(host):
            raise FrameError("sent a reply that only the first host may send")
        if (run_socket := self._run_socket) is not None and host is self._coordinator.answering:
            expendable(lambda: run_socket.streams.take(chunk), self._no_run_socket)

    def _reach(self, host: HostConnection) -> None:
        """Have commands that are typed here reach the coordinator on this host, once its agent has a socket of the run."""
        if host is not self._coordinator.answering or (registered := self._registered.get(host)) is None:
            return
        if self._job.starter == "simulate":
            self._tell_front(registered.folder, registered.name)
        else:
            expendable(partial(self._register, host, registered), self._no_run_socket)

    def _register(self, host: HostConnection, registered: messages.Registered) -> None:
        """Have a socket of the run here, unless the coordinator, whose own is `registered`, is here."""
        from ddplaunch.launcher.elsewhere.front_socket import FrontSocket, is_here

        def known(here: bool) -> None:
            folder, name = registered.folder, registered.name
            if here and self._run_socket is not None:
                self._run_socket.close()
                self._run_socket = None
            elif not here and self._run_socket is None:
                self._run_socket = FrontSocket(self._loop, self._job, host, registered)
            elif self._run_socket is not None:
                self._run_socket.follow(host, registered)
            if self._run_socket is not None:
                folder, name = self._run_socket.place
            self._tell_front(folder, name)

        here = partial(is_here, self._job, registered)
        self._loop.ask(
            here, False, lambda found: expendable(lambda: known(found), self._no_run_socket), within=_LOOK_WITHIN
        )

    def _tell_front(self, folder: str, name: str) -> None:
        """Say where the job can be asked, if the front is to show rows about it."""
        if self._job.spec.live:
            self._console.queue.put(SOCKET, os.fsencode(f"{folder}\0{name}"))

    def _no_run_socket(self, why: str) -> None:
        """Do without the socket, because something failed; the job goes on."""
        if self._run_socket is not None:
            self._run_socket.close()
        self._console.notify(f"warning: `ddplaunch ps`, `stop` and `stacks` do not reach this run from here: {why}")

    def output_received(self, host: HostConnection, stream: bytes, data: bytes) -> None:
        """Show output of a host."""
        self._console.show(host, stream, data)
        self._startup.extend_deadline()

    def disconnected(self, host: HostConnection) -> None:
        """Handle the end of a host's connection."""
        self._console.forget_bars(host)
        self._coordinator.disconnected(host)
        if host is self._coordinator.current and self._run_socket is not None:
            self._run_socket.streams.close()
        if host is self._coordinator.current and (heir := self._coordinator.answering) is not host:
            self._reach(heir)
        status = self._statuses.ended.get(host.agent.node_rank)
        if status == exitcodes.BUG:
            self._console.write(host.own_output)
        elif status is None and not host.given_up:
            self._lost(host)
        self._startup.start_next()
        if host in self._coordinator.speakers and not self._statuses.errors:
            self._startup.stop_starting()
            was_lost = status in (None, exitcodes.NODE_LOST)
            if was_lost and self._may_be_succeeded and not self._signum:
                self._startup.await_successor()
            else:
                limits = self._job.spec.grace_period, 2 * self._job.spec.heartbeat_timeout, QUIT_TIMEOUT
                self._startup.end_within(sum(limits))

    # --- failures

    def _lost(self, host: HostConnection) -> None:
        """Handle a connection that closed without the job's status."""
        error = diagnose.of_host(self._job.starter, self._job.python, host)
        if not self._statuses.has_begun:
            self._host_failed(host, error)
            return
        self._statuses.lost[host.agent.node_rank] = error
        if (host.fault or host.own_output.strip()) and (self._may_be_succeeded or host is not self._hosts[0]):
            self._console.notify(f"{host}: {error.message}")

    def _host_failed(self, host: HostConnection, error: HostError) -> None:
        """Handle a host on which the job cannot run; the job ends unless enough other hosts are left."""
        node_rank, statuses = host.agent.node_rank, self._statuses
        if self._startup.is_stopped or node_rank in statuses.errors:
            return
        left = sum(other.phase is not HostPhase.CLOSED and other is not host for other in self._hosts)
        if statuses.can_go_on_without(node_rank, left):
            host.given_up = True
            self._given_up += 1
            if self._coordinator.current.phase is HostPhase.CONNECTED:
                self._coordinator.current.send(FEWER, b"")
            self._console.notify(f"going on without {host}: {error.message}")
            return
        statuses.errors[node_rank] = error
        if not self._settle_by.is_set or statuses.may_try_others:
            self._settle_by.set(self._loop.now() + SETTLE_TIME)
