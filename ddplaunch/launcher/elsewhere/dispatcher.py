"""The dispatcher: the loop of the command that starts an agent on each host, over ssh or the like, and shows their output.

The loop runs in place of a job's only agent, behind the same front, and coordinates the agents, see `lead`. Each host gets an
order over the pipe to it; the connection of its agent comes as a stream through the same pipe as its output.
"""

from __future__ import annotations

import gc
import os
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from signal import SIGKILL
from typing import Any

from msgspec.structs import replace

from ddplaunch import __version__
from ddplaunch.launcher.decide import job as decide
from ddplaunch.launcher.decide import node
from ddplaunch.launcher.elsewhere.chaos import Chaos
from ddplaunch.launcher.elsewhere.console import Console
from ddplaunch.launcher.elsewhere.lead import Lead, LeadJob, inputs_of_lead
from ddplaunch.launcher.job.incoming import Incoming
from ddplaunch.launcher.job.orders import Generation, JobEnd
from ddplaunch.launcher.node import begin, child
from ddplaunch.launcher.node.events import ChildEnded
from ddplaunch.launcher.node.signals import passed_on
from ddplaunch.plan.cluster import AllocatedJob
from ddplaunch.plan.cluster.endpoints import job_name
from ddplaunch.reach import diagnose, protocol
from ddplaunch.reach.agents import agents
from ddplaunch.reach.channel.handshake import key
from ddplaunch.reach.channel.peer import Peer
from ddplaunch.reach.channel.streams import Chunk, Streams
from ddplaunch.reach.connections import HostConnection, HostPhase, RemoteJob
from ddplaunch.reach.diagnose import UNRESOLVED, HostError
from ddplaunch.reach.pipes import FrontPipes
from ddplaunch.reach.protocol import CHANNEL, ORDER, PROTOCOL, STREAM
from ddplaunch.reach.startup import QUIT_TIMEOUT, Startup
from ddplaunch.record.file_queue import FileQueue
from ddplaunch.record.run_folder import run_id_with_nodes
from ddplaunch.spec.outcome import CLOSED
from ddplaunch.system import exitcodes
from ddplaunch.system.errors import LaunchError, indented
from ddplaunch.system.fields import Malformed
from ddplaunch.system.loop.loop import Loop
from ddplaunch.system.loop.stream import FrameError
from ddplaunch.system.process.linux import become_subreaper, raise_open_files
from ddplaunch.system.process.tree import Process, descendants, kill_at_once, reap

SETTLE_TIME = 1.0  # seconds after a host's error in which others are awaited, so that one message names all
KILL_TIMEOUT = 7.0  # seconds from the second signal to stop until the remaining connections are killed


def run_over_ssh(allocated: AllocatedJob, *, serve: Callable[..., int], reports_to_caller: bool) -> int:
    """Start an agent on each host, show their output until all have ended, and return the exit status of the job.

    `serve` forks the dispatcher and is its front: `front.run`. `reports_to_caller`: how the job ended is for a caller in Python.

    Raises LaunchError: nothing was started.
    """
    spec, allocation = allocated.spec, allocated.allocation
    if asked := spec.terminal_option:
        raise LaunchError(
            f"{asked}: a worker on another node cannot have this terminal",
            hint="debug it in a job of one node, on that host; or start ddplaunch on each node yourself, with --node-rank",
        )
    python, token = spec.remote_python or sys.executable, os.urandom(32).hex()
    signals, run_id = passed_on(spec.signals), run_id_with_nodes(spec, allocated.env)
    limits_before = raise_open_files()  # which ssh gets: this process alone has a pipe to each host
    hosts = RemoteJob(
        spec=spec,
        agents=agents(spec, allocated.env, allocation, python, run_id, token=token),
        run_id=run_id,
        starter=allocation.starter,
        python=python,
        min_nodes=allocation.nnodes[0],
        env=allocated.public_env,
        open_files=limits_before,
    )
    # agents on the hosts compute the same name, without the id that a scheduler gives: they do not look for a cluster
    name = job_name(spec, replace(allocation, identity=""))
    lead = LeadJob(
        inputs=inputs_of_lead(allocated, run_id=run_id, python=python, reports_to_caller=reports_to_caller),
        key=key(token, name),
        ports=None,  # ssh carries the connections of the agents
        python=python,
        signals=signals,
    )
    return serve(partial(run, lead, hosts), signals, spec.ending_signals)


def run(lead: LeadJob, hosts: RemoteJob, pipes: FrontPipes) -> int:
    """Run the job and return its exit status. Runs in a process of its own."""
    become_subreaper()
    files = begin.start_writer()
    gc.freeze()
    gc.enable()
    child.decide_start(pipes)
    return Dispatcher(Loop(), lead, hosts, files, pipes).run()


class HostStatuses:
    """The status and the errors of each host, by node rank: because of which hosts the job cannot run. Pure."""

    def __init__(self, hosts: Sequence[str], min_nodes: int) -> None:
        """Expect the agents of these hosts; the job needs `min_nodes` of them."""
        self._hosts = hosts
        self._min_nodes = min_nodes
        self.ended: dict[int, int] = {}  # the status with which each agent has ended, and nothing of it is left
        self.errors: dict[int, HostError] = {}  # because of which the job cannot run

    @property
    def only_names_failed(self) -> bool:
        """Whether no host has failed for another reason than its name: names are often wrong in many places, listed at once."""
        return all(one.message == UNRESOLVED for one in self.errors.values())

    def can_begin_with(self, others: int) -> bool:
        """Whether the job can begin with so many hosts, without the others."""
        return others >= self._min_nodes and not self.errors

    def error(self) -> LaunchError | None:
        """Return the error of all hosts because of which the job cannot run; None if there is none."""
        if not self.errors:
            return None
        return diagnose.combined(
            [(self._hosts[rank], self.errors[rank]) for rank in sorted(self.errors)], len(self._hosts)
        )


class _Agent:
    """The connection of a host's agent to the coordinator here, carried by the host's pipe."""

    def __init__(self, loop: Loop, host: HostConnection, incoming: Incoming) -> None:
        self.id: int | None = None  # as the coordinator knows it, once it has proven the key
        self._host = host
        self._incoming = incoming
        self._streams = Streams(loop, self)
        ours, its = socket.socketpair()
        self._streams.add(CHANNEL, its)
        incoming.agents.connections.adopt(ours, str(host), self)

    def send_chunk(self, chunk: Chunk) -> None:
        """Send the agent what the coordinator says. Called by the streams."""
        self._host.send(STREAM, protocol.encode(chunk))

    def on_stream_ended(self, number: int) -> None:
        """Do nothing: the host says how its agent has ended. Called by the streams."""

    def on_opened(self, peer: Peer) -> None:
        """Hand the connection of the agent, which has proven the key, to the coordinator. Called by the greeting."""
        self.id = self._incoming.agents.connections.add(peer)

    def on_refused(self, _who: str, reason: str) -> None:
        """End a host whose agent does not prove the key. Called by the greeting."""
        if reason != CLOSED:  # else what has closed it ends, too, and is heard of then
            self._host.kill(reason)

    def take(self, chunk: Chunk) -> None:
        """Take what the agent has sent, but for the end of its connection: its host says so itself, once no worker is left there.

        Raises FrameError: it is of no stream that there is.
        """
        if chunk.number != CHANNEL:
            raise FrameError("sent a piece of a stream that it does not have")
        if not chunk.ends:
            self._streams.take(chunk)

    def lose(self, reason: str, *, has_ended: bool) -> None:
        """Tell the coordinator that the connection has ended, and whether the agent is known to have."""
        if self.id is not None:
            self._incoming.lose(self.id, reason, has_ended=has_ended)
        self._streams.close()


class Dispatcher(Lead):
    """The loop of a command that starts the agents of hosts, coordinates them, and shows what they print."""

    def __init__(self, loop: Loop, lead: LeadJob, hosts: RemoteJob, files: FileQueue, pipes: FrontPipes) -> None:
        """Prepare the connections to all hosts; `run` starts them. `pipes` lead to the front of this command."""
        super().__init__(loop, lead, files, pipes)
        self._remote = hosts
        self._console = Console(loop, self._context.queue)
        # tells the front of a process that is not to be killed as a leftover when this one ends: by pid and time of start
        self._spare = pipes.spare
        self._spared: set[tuple[int, int]] = set()  # the processes for which that was done
        self._statuses = HostStatuses([agent.host for agent in self._remote.agents], self._remote.min_nodes)
        self._hosts = tuple(HostConnection(agent, loop, self) for agent in self._remote.agents)
        self._agents: dict[HostConnection, _Agent] = {}  # of hosts that have been sent their order
        self._chaos = Chaos(loop, self._spec.chaos, self._hosts, self._reporter)
        self._startup = Startup(loop, self._remote, self._hosts, self)
        # set once a host has failed without which the job cannot begin: then all are given up, and the errors named together
        self._give_up_hosts_at = loop.timer(None, self._startup.disconnect)

    def begin(self, opened: ExitStack) -> None:
        """Start the agents of the first hosts."""
        self._startup.start_next()

    @property
    def is_over(self) -> bool:
        """Whether every connection is closed, and the job needs no agent any more."""
        return self._startup.all_closed and self._needs_no_agent

    def status(self) -> int:
        """Return the exit status of the job, and say what is wrong with hosts because of which it could not begin."""
        if self._is_front_lost:  # by SIGKILL, and nobody reads a status any more
            return exitcodes.of_signal(SIGKILL)
        if error := self._statuses.error():
            self._context.closing_lines = ""  # which would say that all hosts were cut off
            self.fail(error)
            return error.status
        return exitcodes.NODE_LOST if self._status_of_job is None else self._status_of_job

    # --- the loop

    def before_sleep(self) -> None:
        """Let hosts send output or not; once the job cannot begin, end it when each host is known to be fit or not."""
        if self._give_up_hosts_at.is_set and not self._startup.is_undecided:
            self._give_up_hosts_at.cancel()
            self._startup.disconnect()
        self._console.update(self._hosts)
        super().before_sleep()
        self._startup.output_is_read = not self._console.queue.full

    def handle(self, event: Any) -> None:
        """Take one event of the loop, after what concerns the whole job.

        A second request to stop kills the workers. A repetition of the first is none, nor is a scheduler's first signal.
        """
        was_stopped = bool(self._signum)
        super().handle(event)
        match event:
            # of a signal that several of our processes get, all but the first are copies
            case node.SignalReceived(signum) if not event.is_copy:
                self._console.note_signal(signum)
                if signum in self._spec.ending_signals:
                    self._on_stop(at_once=was_stopped and event.is_request)
            case node.FrontLost():
                self._startup.disconnect()  # the agents end their workers then, and nobody is left to show their output to
            case ChildEnded():
                reap(keep=self._own_children)  # processes of simulated nodes that have lost their parents
            case Generation(number=0, agreed=agreed) if agreed is not None:  # with how many workers each agent has
                # the faults of --chaos are due only from when so many workers run
                self._chaos.on_first_generation(sum(agent.workers for agent in agreed.agents))
            case JobEnd() if not self._has_begun:
                self._startup.disconnect()  # also those whose agents get ready, and know of no job yet
            case JobEnd():
                self._startup.stop_starting()
                # to stop the workers, to find out that one's agent is lost, and to close the connection
                self._startup.end_within(self._spec.grace_period + 2 * self._spec.heartbeat_timeout + QUIT_TIMEOUT)

    def _on_stop(self, *, at_once: bool) -> None:
        """Start no further hosts; at a second signal to stop, wait no longer than it takes to kill all."""
        self._console.limit_wait()
        self._startup.stop_starting()
        if at_once:
            self._startup.end_within(KILL_TIMEOUT)

    # --- from the hosts

    @property
    def may_start_more(self) -> bool:
        """Whether the job can still begin, so that more agents are worth a start."""
        return self._statuses.only_names_failed

    def say(self, text: str) -> None:
        """Print a line for the user. Called by the startup."""
        self._reporter.print(text)

    def never_connected(self, hosts: Sequence[HostConnection]) -> None:
        """Fail hosts on which ddplaunch has not started in time."""
        for host in hosts:
            self._host_failed(host, diagnose.not_started(self._spec.rdzv_timeout))
            host.kill()

    def connected(self, host: HostConnection, protocol: int, version: str) -> None:
        """Send a host its order, take the connection of its agent, and start the next host."""
        if protocol != PROTOCOL or version != __version__:
            self._host_failed(host, diagnose.other_version(version))
            host.close_stdin()
            return
        host.send(ORDER, host.agent.order())
        self._agents[host] = _Agent(self._loop, host, self.incoming)
        self._startup.start_next()

    def report_received(self, host: HostConnection, data: bytes) -> None:
        """Handle a host's report. Raises FrameError: it is malformed."""
        try:
            report = protocol.report(data)
        except Malformed as error:
            raise FrameError(f"sent a malformed message ({error})") from None
        match report:
            case protocol.Ready():
                host.is_ready = True
            case protocol.Worker(rank, pid) if self._spec.chaos:  # which alone needs to know the workers
                self._chaos.started(rank, pid)
            case protocol.OrderRefused(message, hint, status):
                # what was typed is right here, and does not fit that host: no error of usage
                status = exitcodes.RENDEZVOUS if status == exitcodes.USAGE else status
                self._host_failed(host, HostError(message, hint, status))
            case protocol.AgentEnded(status, spared):  # `spared`: processes of workers that are to outlive the job
                if self._remote.starter == "simulate":  # then they are below this process: its front is to spare them
                    for pid, started in spared:
                        self._spare(pid, started)
                    self._spared.update(spared)
                self._statuses.ended[host.agent.node_rank] = status

    def chunk_received(self, host: HostConnection, data: bytes) -> None:
        """Take what a host's agent sends to the coordinator. Raises FrameError: it is malformed."""
        try:
            chunk = protocol.chunk(data)
        except Malformed as error:
            raise FrameError(f"sent a malformed piece of a stream ({error})") from None
        if host in self._agents:
            self._agents[host].take(chunk)

    def output_received(self, host: HostConnection, stream: bytes, data: bytes) -> None:
        """Show output of a host."""
        self._console.show(host, stream, data)
        self._startup.extend_deadline()

    def disconnected(self, host: HostConnection) -> None:
        """Handle the end of a host's connection, after its agent has ended or not: tell the coordinator, and try other hosts.

        The end of a host that is `given_up` is no error: the job goes on without it.
        """
        self._console.forget_bars(host)
        status = self._statuses.ended.get(host.agent.node_rank)  # of the agent; None: it has not said that it has ended
        error = diagnose.of_host(self._remote.starter, self._remote.python, host)
        is_called_again = error.may_be_reached_later and not host.given_up and self._startup.call_again(host)
        if is_called_again:
            self._startup.start_next()
            return
        if (agent := self._agents.get(host)) is not None:
            has_ended = status is not None
            if not has_ended and self._can_kill_leftovers:
                # the node was simulated here: once what is left of it is killed, nobody has to wait for the end of its lease
                self._kill_leftovers()
                agent.lose(error.reason, has_ended=True)
            else:
                agent.lose(CLOSED if has_ended else error.reason, has_ended=has_ended)  # CLOSED: "connection closed"
        if status == exitcodes.BUG:  # our traceback is in what ssh or the agent has written
            self._console.write(host.own_output)
        has_joined = agent is not None and agent.id is not None  # then the coordinator says what its loss means
        if not host.given_up and not (self._has_begun and has_joined):
            self._host_failed(host, error)
        self._startup.start_next()

    # --- failures

    def _host_failed(self, host: HostConnection, error: HostError) -> None:
        """Handle a host on which the job cannot run; a job that has not begun ends unless enough other hosts are left."""
        node_rank, statuses = host.agent.node_rank, self._statuses
        job_ends_anyway = self._startup.is_stopped
        if job_ends_anyway or node_rank in statuses.errors:
            return
        others = [other for other in self._hosts if other is not host and not other.given_up]
        usable = sum(other.phase is not HostPhase.CLOSED for other in others)
        if self._has_begun or statuses.can_begin_with(usable):
            host.given_up = True
            may_have_spare = bool(self.coordinator.state.spares) or any(not other.is_ready for other in others)
            has_lost_last_spare = self._has_begun and self._spec.spares and not may_have_spare
            no_spare = "; no spare is left" if has_lost_last_spare else ""
            self._reporter.print(f"going on without {host}: {indented(error.message)}{no_spare}")
            self.coordinator.feed(decide.NodeGivenUp(node_rank, self._loop.now()))
            return
        statuses.errors[node_rank] = error
        is_first_error = not self._give_up_hosts_at.is_set
        # then all are given up; a name that does not resolve puts that off, so that all such names are said together
        if is_first_error or statuses.only_names_failed:
            self._give_up_hosts_at.set(self._loop.now() + SETTLE_TIME)

    @property
    def _can_kill_leftovers(self) -> bool:
        """Whether what a lost node has left can be killed here: simulated nodes are processes of this host.

        That matters only in a job that may go on without the node. On other hosts leftovers end by the lease of their agent.
        """
        return self._remote.starter == "simulate" and bool(self.coordinator.state.policy.lease)

    def _kill_leftovers(self) -> None:
        """Kill what a simulated node has left whose front is gone: processes that lose their parent become our children."""

        def leftovers() -> list[Process]:
            found = descendants(os.getpid(), but_for=self._own_children)
            return [one for one in found if (one.pid, one.started) not in self._spared]

        kill_at_once(leftovers)

    @property
    def _own_children(self) -> frozenset[int]:
        """Our children that are not left by a simulated node: fronts of nodes, the process that writes files, and questions."""
        fronts = (host.pid for host in self._hosts if host.phase is not HostPhase.CLOSED)
        return frozenset((*filter(None, fronts), self._context.files.pid)) | self._loop.asked_pids
