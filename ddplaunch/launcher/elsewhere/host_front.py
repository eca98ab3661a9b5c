"""The front (parent) of an agent on a remote host: it carries output and the agent's connection to the dispatcher, as frames.

The dispatcher is the command that has started this host, and coordinates all agents. The front serves the agent as
`launcher.node.front` does in the command that the user typed, but never blocks. When the connection closes, or no frame comes for
the heartbeat timeout, it closes the agent's signal pipe, and the agent ends its workers.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from functools import partial

from ddplaunch.launcher.node import child
from ddplaunch.launcher.node.signals import passed_on
from ddplaunch.reach import protocol
from ddplaunch.reach.channel.streams import Chunk, Streams
from ddplaunch.reach.pipes import CONTROL, HOST_SIGNAL, MESSAGE, OURS, FrontPipes
from ddplaunch.reach.protocol import (
    AHEAD,
    CHANNEL,
    HEARTBEAT,
    HOLD,
    STREAM,
    TAKEN,
    TAKEN_STEP,
    InputPipe,
    OutputPipe,
    Report,
)
from ddplaunch.system.errors import LaunchError
from ddplaunch.system.exitcodes import NODE_LOST, of_signal
from ddplaunch.system.fields import Malformed
from ddplaunch.system.loop.loop import Loop
from ddplaunch.system.loop.stream import FrameError
from ddplaunch.system.process.clock import PROCESS_CLOCK
from ddplaunch.system.process.tree import ends_within

# bytes waiting to be sent from which the agent's output is not read: what the agent itself says waits behind
_FULL = 1 << 16
_TAG = 1  # bytes that a message of the agent begins with: its stream


class HostFront:
    """The front of one agent on a remote host: between that agent and the dispatcher, which has started this process."""

    def __init__(self, input_pipe: InputPipe, output_pipe: OutputPipe, heartbeat_timeout: float, host: str) -> None:
        """Prepare to serve, with pipes from and to the dispatcher; after `heartbeat_timeout` seconds without a frame it is lost.

        `host` is the name of this host in the job.
        """
        self._input = input_pipe
        self._output = output_pipe
        self._heartbeat_timeout = heartbeat_timeout
        PROCESS_CLOCK.protect(heartbeat_timeout)  # so that a pause of this machine is no silence of the dispatcher
        self._host = host
        self._loop = Loop()
        self._lose_dispatcher_at = self._loop.timer(self._loop.now() + heartbeat_timeout, self._on_dispatcher_lost)
        self._loop.watch(input_pipe, self._on_input)
        output_pipe.attach(self._loop)
        self._agent: child.AgentProcess | None = None  # None before it is started, and once it is reaped
        self._stop_signals: Collection[int] = ()  # signals that ask the job to end
        # status and text if the agent was killed before the job began
        self._outcome_if_killed_before_job: tuple[int, str] | None = None
        # pids and starts of processes that outlive the agent as a worker wants them to: no leftovers of it
        self.spared: tuple[tuple[int, int], ...] = ()
        self._is_output_held = False  # the dispatcher has asked for no more output at present
        self._unacknowledged = 0  # bytes of output that were sent, but the dispatcher has not said that it has them
        self._is_dispatcher_lost = False
        self._streams = Streams(self._loop, self)  # connections that are carried as frames: the one below
        # the agent's end of its connection to the coordinator, and ours
        self.channel, self._our_end_of_channel = socket.socketpair()
        self._streams.add(CHANNEL, self._our_end_of_channel)
        self._watch: child.Watch | None = None  # looks from time to time whether the agent runs
        self._look_timer = self._loop.timer(None, self._look_whether_it_runs)
        self._question: child.Question | None = None  # to an agent that has to end, since the dispatcher is lost
        self._question_timer = self._loop.timer(None, self._look_whether_stuck)
        self._is_stuck = False  # the agent does not answer, and is to be killed

    def send_chunk(self, chunk: Chunk) -> None:
        """Send the coordinator what the agent says. Called by the streams."""
        self._output.put(STREAM, protocol.encode(chunk))

    def on_stream_ended(self, number: int) -> None:
        """Do nothing: the end of the agent is seen by its process. Called by the streams."""

    def report(self, report: Report) -> None:
        """Send a report to the dispatcher."""
        self._output.put(CONTROL, protocol.encode(report))

    def serve(
        self,
        agent: Callable[[FrontPipes], int],
        signals: Iterable[int],
        stops: Collection[int],
        *,
        sent_again: frozenset[int] = frozenset(),
    ) -> int:
        """Fork the agent and serve it until it has ended, in place of `front.run`; return its exit status, or NODE_LOST.

        Of the `signals` that are passed on, `stops` ask the job to end. `sent_again` is not needed: which signals escalate, the
        dispatcher decides.

        Raises LaunchError: the machine has no room for the agent.
        """
        self._note_dispatcher_lives()  # while modules were imported no frame was read
        passed = passed_on(signals)
        self._stop_signals = stops
        is_dispatcher_there = self._input.read()
        if not is_dispatcher_there:
            return NODE_LOST
        self._output.put(HEARTBEAT, b"")  # from this first one on, heartbeats of the dispatcher have to be answered

        def as_agent(pipes: FrontPipes) -> int:
            self._input.close()
            self._output.close()
            self._our_end_of_channel.close()
            return agent(pipes)

        self._agent = process = child.start(as_agent, passed, _send_error_of_agent)
        self.channel.close()  # the agent has it
        self._watch = child.Watch(process, self._heartbeat_timeout)
        self._plan_next_look(self._watch)
        for signum in passed:  # those that come to this process itself
            signal.signal(signum, self._on_signal)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, passed)
        self._take_frames()  # that were read above
        if not self._serve_until_end(process):
            return NODE_LOST
        wait_status = process.reap()
        self.spared = tuple(process.pipes.spared_processes())
        self._agent = None
        self._loop.unwatch(process.pipes.output[0])
        while self._on_output(process.pipes):  # one after another, what the agent has written last
            pass
        status, message = self._outcome_if_killed_before_job or child.status_of(process.pid, wait_status, self._host)
        if message:
            self._output.put(OURS, message.encode())
        return status

    def _serve_until_end(self, process: child.AgentProcess) -> bool:
        """Serve the agent until it has ended, and kill it if it is stuck; False: it is not dead after KILL_TIMEOUT."""
        pidfd = os.pidfd_open(process.pid)
        self._loop.watch(pidfd, lambda: None)  # its end wakes the loop
        while not process.has_ended:
            self._run_loop_once()
            if self._is_stuck:
                process.kill()
                if not ends_within(process.pid, child.KILL_TIMEOUT):
                    self._output.put(OURS, child.describe_leftovers().encode())
                    return False
        self._loop.unwatch(pidfd)
        os.close(pidfd)
        return True

    def finish(self, report: Report) -> None:
        """Send the last report, and wait until all is sent, or the dispatcher is lost."""
        self.report(report)
        self._note_dispatcher_lives()
        while self._output.size and not self._is_dispatcher_lost:
            self._run_loop_once()

    # --- an agent that does not run

    def _ask_whether_it_runs(self) -> None:
        """Ask an agent that has to end whether it runs; `_look_whether_stuck` follows after INTERVAL."""
        if self._agent is not None and self._question is None:
            self._question = child.Question(self._agent)
            self._question_timer.set(self._loop.now() + child.INTERVAL)

    def _plan_next_look(self, watch: child.Watch) -> None:
        """Look again when the watch says; it may not rest, since no SIGCHLD wakes this loop when the agent is stopped."""
        self._look_timer.set(self._loop.now() + watch.wait(may_rest=False))

    def _look_whether_it_runs(self) -> None:
        """Give the agent up if it does not run, or has not killed its workers when their lease was over. Called by the loop."""
        if self._agent is None or self._watch is None:  # it is reaped, or not started yet
            return
        # since the dispatcher is lost: whether it answers is for `_look_whether_stuck`
        is_asked_anyway = self._question is not None
        runs = self._watch.keeps_lease() and (is_asked_anyway or self._watch.look())
        self._plan_next_look(self._watch)
        if not runs:
            self._is_stuck = True
            text = f"ddplaunch: the agent on {self._host} {self._watch.describe()}\n"
            self._output.put(OURS, text.encode())

    def _look_whether_stuck(self) -> None:
        """Take the agent's answer, or repeat the question until it has been silent for too long. Called by the loop.

        The first is asked once the dispatcher is lost; then a new one follows each answer until the agent ends.
        """
        if self._question is None:
            return
        if not self._question.has_answer():
            self._question_timer.set(self._loop.now() + child.INTERVAL)
            has_time = self._question.repeat()
            self._is_stuck = not has_time
            return
        self._question = None
        if self._is_dispatcher_lost:
            self._ask_whether_it_runs()

    # --- the loop

    def _run_loop_once(self) -> None:
        if self._output.broken:
            self._on_dispatcher_lost()
        self._read_agent_or_pause()
        self._loop.run_once()

    def _read_agent_or_pause(self) -> None:
        """Read the agent's output, or stop reading it while the dispatcher does not take what was sent. Called before each sleep.

        At most AHEAD bytes are on their way to the dispatcher at a time. Once it is lost, output is read to be dropped: the
        agent must not wait for room in its pipe.
        """
        if self._agent is None:
            return
        pipes = self._agent.pipes
        is_wanted = not self._is_output_held and self._unacknowledged < AHEAD
        if (is_wanted or self._is_dispatcher_lost) and self._output.size < _FULL:
            self._loop.watch(pipes.output[0], partial(self._on_output, pipes))
        else:
            self._loop.unwatch(pipes.output[0])

    def _on_output(self, pipes: FrontPipes) -> bool:
        """Send a message of the agent as a frame: a byte for its stream, then output; return whether there was one."""
        try:
            message = pipes.output[0].recv(_TAG + MESSAGE, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        if not message:  # the agent has closed its end
            self._loop.unwatch(pipes.output[0])
            return False
        stream, output = message[:_TAG], message[_TAG:]
        self._output.put(stream, output)
        self._unacknowledged += len(output)
        return True

    # --- from the dispatcher

    def _on_input(self) -> None:
        """Read and take frames of the dispatcher, which is lost at their end. Called by the loop."""
        more = self._input.read()
        self._take_frames()
        if not more:
            self._on_dispatcher_lost()

    def _note_dispatcher_lives(self) -> None:
        """Count the time without a frame from now on."""
        self._lose_dispatcher_at.set(self._loop.now() + self._heartbeat_timeout)

    def _take_frames(self) -> None:
        try:
            while (frame := self._input.take()) is not None:
                self._note_dispatcher_lives()
                self._on_message(*frame)
        except FrameError:
            self._on_dispatcher_lost()

    def _on_message(self, tag: bytes, data: bytes) -> None:
        """Take a message of the dispatcher: a heartbeat, about our output, or what the coordinator says to the agent."""
        if tag == HEARTBEAT and not self._output.size:  # else the output that waits serves as a heartbeat
            self._output.put(HEARTBEAT, b"")
        elif tag == HOLD:
            self._is_output_held = bool(data)  # empty: hold it no longer
        elif tag == TAKEN:  # the dispatcher says so for each TAKEN_STEP bytes
            self._unacknowledged -= TAKEN_STEP
        elif tag == STREAM:
            try:
                self._streams.take(protocol.chunk(data))
            except Malformed:
                self._on_dispatcher_lost()

    def _on_signal(self, signum: int, _frame: object) -> None:
        """Prevent the start of the job, or pass the signal on to the agent: it came to this process directly."""
        if self._agent is None:
            return
        if signum in self._stop_signals and self._agent.prevent_start():
            self._outcome_if_killed_before_job = (of_signal(signum), child.prevented_by(signum))
        self._agent.pipes.request(HOST_SIGNAL, signum)

    def _on_dispatcher_lost(self) -> None:
        """Drop all output, and have the agent end: kill it if the job has not begun, else close the pipe that keeps it alive."""
        if self._is_dispatcher_lost:
            return
        self._is_dispatcher_lost = True
        self._lose_dispatcher_at.cancel()
        self._loop.unwatch(self._input)
        self._streams.close()
        self._output.abandon()
        if self._agent is not None:
            if self._agent.prevent_start():  # it still got ready, and was killed
                self._outcome_if_killed_before_job = (NODE_LOST, "")
            os.close(self._agent.pipes.signals[1])  # at its end the agent ends
            self._ask_whether_it_runs()  # an agent that is stuck would not


def _send_error_of_agent(error: LaunchError, pipes: FrontPipes) -> None:
    """Send this error as the last message of the agent: to the dispatcher, which names the host, unless the job has begun."""
    begun = not child.decide_start(pipes)
    last = (OURS, error.render().encode()) if begun else (CONTROL, protocol.encode(protocol.refusal(error)))
    with suppress(OSError):  # the front has ended, or does not read
        pipes.output[1].sendmsg(last)
