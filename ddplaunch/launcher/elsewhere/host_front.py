"""The front of an agent on another host: it carries the agent's connection to the coordinator, and the agent's output, as frames.

It serves the agent as `launcher.node.front` does in the command that the user typed, but never blocks. When the connection
closes, or no frame comes for the heartbeat timeout, it closes the agent's signal pipe, and the agent ends its workers.
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
from ddplaunch.reach import messages
from ddplaunch.reach.channel.streams import Streams
from ddplaunch.reach.messages import Report
from ddplaunch.reach.pipes import CONTROL, HOST_SIGNAL, MESSAGE, OURS, FrontPipes
from ddplaunch.reach.protocol import AHEAD, CHANNEL, HEARTBEAT, HOLD, STREAM, TAKEN, TAKEN_STEP, InputPipe, OutputPipe
from ddplaunch.system.errors import LaunchError
from ddplaunch.system.exitcodes import NODE_LOST, of_signal
from ddplaunch.system.fields import Malformed
from ddplaunch.system.loop.loop import Loop
from ddplaunch.system.loop.stream import FrameError
from ddplaunch.system.process.clock import PROCESS_CLOCK
from ddplaunch.system.process.tree import ends_within

# bytes waiting to be sent from which the agent's output is not read: what the agent itself says waits behind
_FULL = 1 << 16


class HostFront:
    """Serves one agent."""

    def __init__(self, input_pipe: InputPipe, output_pipe: OutputPipe, heartbeat_timeout: float, host: str) -> None:
        """Prepare to serve; after `heartbeat_timeout` seconds without a frame the dispatcher is lost.

        `host` is the name of this host in the job.
        """
        self._input = input_pipe
        self._output = output_pipe
        self._heartbeat_timeout = heartbeat_timeout
        PROCESS_CLOCK.protect(heartbeat_timeout)
        self._host = host
        self._loop = Loop()
        self._lost_at = self._loop.timer(self._loop.now() + heartbeat_timeout, self._disconnect)
        self._loop.watch(input_pipe, self._on_input)
        output_pipe.attach(self._loop)
        self._agent: child.AgentProcess | None = None  # while it is there
        self._stops: Collection[int] = ()
        self._prevented: tuple[int, str] | None = None  # status and text of an agent that never began
        # processes that outlive the agent: see `FrontPipes.spared_processes`
        self.spared: tuple[tuple[int, int], ...] = ()
        self._is_held = False  # the command takes no output at present
        self._ahead = 0  # bytes of output that were sent, as far as is known before they were taken
        self._lost = False
        self._streams = Streams(self._loop, lambda chunk: self._output.put(STREAM, messages.encode(chunk)))
        # of the agent, to the coordinator, and what is carried of it here
        self.channel, self._carried = socket.socketpair()
        self._streams.add(CHANNEL, self._carried)
        self._watch: child.Watch | None = None  # of the agent
        self._look_at = self._loop.timer(None, self._look_whether_it_runs)
        self._question: child.Question | None = None  # to an agent that has to end
        self._ask_again = self._loop.timer(None, self._look_whether_stuck)
        self._is_stuck = False  # the agent has not answered

    def report(self, report: Report) -> None:
        """Send a report to the dispatcher."""
        self._output.put(CONTROL, messages.encode(report))

    def serve(
        self,
        agent: Callable[[FrontPipes], int],
        signals: Iterable[int],
        stops: Collection[int],
        *,
        sent_again: frozenset[int] = frozenset(),
    ) -> int:
        """Run the agent, as `front.run` does; which signals escalate, `sent_again` or not, the dispatcher decides.

        Raises LaunchError: the machine has no room for the agent.
        """
        self._lost_at.set(self._loop.now() + self._heartbeat_timeout)  # no frame was read until now
        passed = passed_on(signals)
        self._stops = stops
        if not self._input.read():  # meanwhile, as modules were imported
            return NODE_LOST
        self._output.put(HEARTBEAT, b"")  # from now on frames are answered

        def as_agent(pipes: FrontPipes) -> int:
            self._input.close()
            self._output.close()
            self._carried.close()
            return agent(pipes)

        self._agent = process = child.start(as_agent, passed, _send_error)
        self.channel.close()
        self._watch = child.Watch(process, self._heartbeat_timeout)
        self._look_at.set(self._loop.now() + self._watch.wait(may_rest=False))
        for signum in passed:  # those that come to this process itself
            signal.signal(signum, self._on_signal)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, passed)
        self._take_frames()
        pidfd = os.pidfd_open(process.pid)
        self._loop.watch(pidfd, lambda: None)
        while not process.has_ended:
            self._wait()
            if self._is_stuck:
                process.kill()
                if not ends_within(process.pid, child.KILL_TIMEOUT):
                    self._output.put(OURS, child.describe_leftovers().encode())
                    return NODE_LOST
        self._loop.unwatch(pidfd)
        os.close(pidfd)
        wait_status = process.reap()
        self.spared = tuple(process.pipes.spared_processes())
        self._agent = None
        self._loop.unwatch(process.pipes.output[0])
        while self._on_output(process.pipes):
            pass
        status, message = self._prevented or child.status_of(process.pid, wait_status, self._host)
        if message:
            self._output.put(OURS, message.encode())
        return status

    def finish(self, report: Report) -> None:
        """Send the last report, and wait until all is sent, or the dispatcher is lost."""
        self.report(report)
        self._lost_at.set(self._loop.now() + self._heartbeat_timeout)
        while self._output.size and not self._lost:
            self._wait()

    # --- an agent that does not run

    def _ask(self) -> None:
        """Ask the agent whether it runs."""
        if self._agent is not None and self._question is None:
            self._question = child.Question(self._agent)
            self._ask_again.set(self._loop.now() + child.INTERVAL)

    def _look_whether_it_runs(self) -> None:
        """Give the agent up if it does not run. Called by the loop."""
        if self._agent is None or self._watch is None:
            return
        runs = self._watch.keeps_lease() and (self._question is not None or self._watch.look())
        self._look_at.set(self._loop.now() + self._watch.wait(may_rest=False))
        if not runs:
            self._is_stuck = True
            text = f"ddplaunch: the agent on {self._host} {self._watch.describe()}\n"
            self._output.put(OURS, text.encode())

    def _look_whether_stuck(self) -> None:
        """Find out whether the agent still answers; once the dispatcher is lost, ask again and again until the agent ends."""
        if self._question is None:
            return
        if not self._question.has_answer():
            self._ask_again.set(self._loop.now() + child.INTERVAL)
            self._is_stuck = not self._question.repeat()
            return
        self._question = None
        if self._lost:
            self._ask()

    # --- the loop

    def _wait(self) -> None:
        if self._output.broken:
            self._disconnect()
        self._watch_agent()
        self._loop.run_once()

    def _watch_agent(self) -> None:
        """Read the agent's output, or stop reading it while the command does not take what was sent.

        At most AHEAD bytes are on their way to the command at a time.
        """
        if self._agent is None:
            return
        pipes = self._agent.pipes
        is_taken = self._lost or not (self._is_held or self._ahead >= AHEAD)
        if is_taken and self._output.size < _FULL:
            self._loop.watch(pipes.output[0], partial(self._on_output, pipes))
        else:
            self._loop.unwatch(pipes.output[0])

    def _on_output(self, pipes: FrontPipes) -> bool:
        """Send output of the agent as a frame; return whether there was any."""
        try:
            message = pipes.output[0].recv(MESSAGE + 1, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        if not message:
            self._loop.unwatch(pipes.output[0])
            return False
        self._output.put(message[:1], message[1:])
        self._ahead += len(message) - 1
        return True

    # --- from the dispatcher

    def _on_input(self) -> None:
        """Read and take frames of the dispatcher, or disconnect at their end. Called by the loop."""
        more = self._input.read()
        self._take_frames()
        if not more:
            self._disconnect()

    def _take_frames(self) -> None:
        try:
            while (frame := self._input.take()) is not None:
                self._lost_at.set(self._loop.now() + self._heartbeat_timeout)
                self._on_message(*frame)
        except FrameError:
            self._disconnect()

    def _on_message(self, tag: bytes, data: bytes) -> None:
        """Take a message of the command that has started this host: a heartbeat, or what the coordinator says to the agent."""
        if tag == HEARTBEAT and not self._output.size:  # else the output that waits serves as a heartbeat
            self._output.put(HEARTBEAT, b"")
        elif tag == HOLD:
            self._is_held = bool(data)
        elif tag == TAKEN:
            self._ahead -= TAKEN_STEP
        elif tag == STREAM:
            try:
                self._streams.take(messages.chunk(data))
            except Malformed:
                self._disconnect()

    def _prevent_start(self, signum: int) -> None:
        """End an agent that has not begun, if this signal stops the job; 0 stands for the loss of the dispatcher."""
        if self._agent is None or (signum and signum not in self._stops):
            return
        if self._agent.prevent_start():
            text = child.prevented_by(signum) if signum else ""
            self._prevented = (of_signal(signum) if signum else NODE_LOST, text)

    def _on_signal(self, signum: int, _frame: object) -> None:
        """Prevent the start of the job, or pass the signal on to the agent: it came to this process directly."""
        self._prevent_start(signum)
        if self._agent is not None:
            self._agent.pipes.request(HOST_SIGNAL, signum)

    def _disconnect(self) -> None:
        """Handle the loss of the dispatcher: drop all output, and end the pipe of signals, on which the agent ends."""
        if self._lost:
            return
        self._lost = True
        self._lost_at.cancel()
        self._loop.unwatch(self._input)
        self._streams.close()
        self._output.abandon()
        if self._agent is not None:
            self._prevent_start(0)
            os.close(self._agent.pipes.signals[1])
            self._ask()


def _send_error(error: LaunchError, pipes: FrontPipes) -> None:
    """From the agent, send this as its last message: to the dispatcher, which names the host, unless the job has begun."""
    begun = not child.decide_start(pipes)
    last = (OURS, error.render().encode()) if begun else (CONTROL, messages.encode(messages.refusal(error)))
    with suppress(OSError):  # the front has ended, or does not read
        pipes.output[1].sendmsg(last)
