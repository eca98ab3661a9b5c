"""The caller's side of `launch()`: one loop, in the thread that called, serves the ddplaunch command, its workers and output.

It has no thread, no signal handler and no child but the command. It returns when no process of the job is left.
"""

from __future__ import annotations

import codecs
import errno
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from typing import IO, Any

from msgspec.structs import replace

from ddplaunch.reach.repeated_stop import Meaning, StopRequests, typed_at
from ddplaunch.spec import order
from ddplaunch.spec.call import stop_signal
from ddplaunch.spec.job import Given, JobSpec
from ddplaunch.spec.order import Order
from ddplaunch.system.errors import MORE_OPEN_FILES, LaunchError
from ddplaunch.system.loop.loop import Loop
from ddplaunch.system.own_files import PACKAGE
from ddplaunch.system.process.linux import check_kernel
from ddplaunch.tools.functions import exceptions
from ddplaunch.tools.functions.connection import ERROR, RESULT, StackFiles, WorkerCall, WorkerConnection, WorkerListener
from ddplaunch.tools.functions.pickling import CannotSend, Function, import_path

_PROGRAM = "import sys; sys.path.append({folder!r}); from ddplaunch.launcher.start.call import main; main()"
_FOLDER = os.path.dirname(PACKAGE)  # from which the command imports ddplaunch, as this program does
_BEFORE_TIMEOUT = 0.5  # seconds: stacks are written so long before the timeout, or a tenth of it if that is less
_LOST_TIMEOUT = 10.0  # seconds after the grace period in which the agent of a killed command must have ended
_LONGEST_PATH = 1 << 16  # bytes; Linux takes twice as many in a variable (MAX_ARG_STRLEN)
_CHUNK = 1 << 16  # bytes


class Caller:
    """The job of one call: its command (a ddplaunch process, which runs the workers), the workers' connections, the output."""

    def __init__(self, function: Function, given: list[Given], spec: JobSpec, *, result_limit: int) -> None:
        """Listen for workers and start the command; `run` serves the job. `given` are the options of which `spec` is made."""
        self._function = function
        self._spec = spec
        self._result_limit = result_limit
        self._began = time.monotonic()
        self._resources = ExitStack()  # closed when the job has ended, or could not be started
        self._loop = Loop()
        self._resources.callback(self._loop.close)
        self._resources.callback(function.close)
        self._resources.callback(self._close_connections)
        self._workers: dict[int, WorkerConnection] = {}  # of the latest generation, by rank
        # that have sent no hello, or whose rank the worker of a later generation has
        self._without_rank: set[WorkerConnection] = set()
        self._stack_files = StackFiles()
        self._open_pipes = 0  # from the command, that are not at their end: two of output, and the control socket
        # set once the command has ended: for so long its agent may live on, to end the workers
        self._agent_timer = self._loop.timer(None, self._give_up_agent)
        self._world_size = 0  # until a worker has said hello
        self._cannot_send: CannotSend | None = None  # why a worker got no call, which `_wait` raises
        self._is_ending = False  # it is being stopped: no worker gets a call any more
        self._is_muted = False  # the caller's own stream has raised: no output is forwarded any more
        self._partial_line = b""  # from the control socket
        self._outcome = exceptions.CallOutcome()
        self._stop_signal = stop_signal(spec)
        # what a Ctrl-C here sends to the command
        self._interrupt = signal.SIGINT if signal.SIGINT in spec.stop_signals else self._stop_signal
        self._listener = WorkerListener()
        self._resources.callback(self._listener.close)
        try:
            self._loop.watch(self._listener.socket, self._on_connection)
            self._start(given)
        except BaseException:
            self._resources.close()
            raise

    def run(self) -> list[Any]:
        """Serve the job until it has ended; return what each rank returned."""
        try:
            try:
                while self._is_going_on:
                    self._wait()
            except KeyboardInterrupt:
                self._stop_job(self._interrupt)
                raise
            except BaseException:
                self._stop_job(self._stop_signal)
                raise
            for worker in self._workers.values():
                worker.drain()  # what it sent just before the job ended
            return self._results()
        finally:
            self._resources.close()

    # --- the command

    def _start(self, given: list[Given]) -> None:
        """Start the ddplaunch command in a session of its own; its stdin is a socket, over which it gets its options."""
        _check_can_start()
        path = ""
        if self._spec.start_method == "forkserver":  # which imports from where this program does
            path = "\n".join(import_path())
            if len(os.fsencode(path)) >= _LONGEST_PATH:  # it does not fit into a variable
                path = ""
        self._control, theirs = socket.socketpair()
        self._resources.enter_context(self._control)
        self._loop.watch(self._control, self._on_control)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _PROGRAM.format(folder=_FOLDER), str(os.getpid())],
                stdin=theirs.fileno(),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**os.environ, "DDPLAUNCH_CALL": f"{self._listener.address}\n{path}"},
                start_new_session=True,  # Ctrl-C reaches it once: from here
            )
        self._resources.enter_context(self._process)  # waits for it
        self._resources.callback(self._process.kill)  # does nothing unless we were interrupted more than once
        # the spec goes without the variables of the workers, which are among the options
        self._control.sendall(order.encode(Order.of(given, replace(self._spec, env=()))) + b"\n")
        self._control.setblocking(False)
        self._open_pipes = 1  # the control socket
        for pipe, name in ((self._process.stdout, "stdout"), (self._process.stderr, "stderr")):
            assert pipe is not None
            self._forward(pipe, name)
        self._pidfd = os.pidfd_open(self._process.pid)
        self._resources.callback(os.close, self._pidfd)
        self._loop.watch(self._pidfd, self._on_command_end)

    def _forward(self, pipe: IO[bytes], name: str) -> None:
        """Forward the output of the command's pipe to sys.stdout or sys.stderr (`name`), whatever these are when it comes."""
        decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        descriptor = pipe.fileno()
        self._open_pipes += 1

        def on_readable() -> None:
            """Copy what has come; at the end of the pipe what is left of a character. Called by the loop."""
            data = os.read(descriptor, _CHUNK)
            is_at_end = not data
            if is_at_end:
                self._loop.unwatch(descriptor)
                self._open_pipes -= 1
            text = decode(data, final=is_at_end)
            stream = getattr(sys, name)
            if text and stream is not None and not self._is_muted:
                try:
                    stream.write(text)
                    stream.flush()
                except (OSError, ValueError):  # closed: the job goes on, and the output is in its logs
                    pass

        self._loop.watch(descriptor, on_readable)

    def _on_control(self) -> None:
        """Read what the command reports about the job: one JSON object a line. Called by the loop."""
        try:
            data = self._control.recv(_CHUNK)
        except OSError:
            data = b""
        if not data:
            self._loop.unwatch(self._control)
            self._open_pipes -= 1
        *lines, self._partial_line = (self._partial_line + data).split(b"\n")
        for line in lines:
            self._outcome.update(json.loads(line))

    def _on_command_end(self) -> None:
        """Reap the command, and give its agent some time to end the workers. Called by the loop."""
        self._loop.unwatch(self._pidfd)
        self._process.wait()
        self._agent_timer.set(self._loop.now() + self._spec.grace_period + _LOST_TIMEOUT)

    def _give_up_agent(self) -> None:
        """Wait no longer for the agent, which has not closed its ends of our pipes. Called by the loop."""
        self._open_pipes = 0

    # --- the loop

    @property
    def _is_going_on(self) -> bool:
        if self._process.returncode is None:
            return True
        # the agent of a command that was killed ends its workers before it closes its ends of our pipes
        return self._open_pipes > 0

    def _wait(self) -> None:
        self._loop.run_once()
        if self._cannot_send is not None and not self._is_ending:
            raise self._cannot_send

    def _stop_job(self, signum: int) -> None:
        """Stop the job by a signal to the command and wait until it has ended; a Ctrl-C that insists has it kill the workers."""
        self._is_ending = True
        requests = StopRequests()  # tells a request that insists from the first one that has come twice
        requests.take(signum, time.monotonic())
        is_unsent = True
        while True:
            try:
                if is_unsent and self._process.returncode is None:
                    self._process.send_signal(signum)
                is_unsent = False
                while self._is_going_on:
                    self._wait()
                return
            except KeyboardInterrupt:
                # without a terminal uv and others interrupt this program twice for one Ctrl-C
                signum = self._interrupt
                typed = typed_at(os.getpid(), signal.SIGINT)  # whether a person has typed it at our terminal
                meaning = requests.take(signum, time.monotonic(), typed)
                is_unsent = meaning is Meaning.INSISTS
                if meaning is Meaning.SAME:  # one request, which has come twice
                    self._say("another interrupt counts as the first one. A third one kills the workers at once")
            except Exception:  # noqa: BLE001 - the first one is raised; stop writing to the stream that raised it
                self._is_muted = True

    def _say(self, text: str) -> None:
        """Print a line to the caller's stderr, if that takes any."""
        with suppress(OSError, ValueError, AttributeError):
            print(f"ddplaunch: {text}", file=sys.stderr, flush=True)

    # --- workers

    def _on_connection(self) -> None:
        """Take the connection of a worker. Called by the loop."""
        try:
            connection = self._listener.accept()
        except OSError as error:
            self._loop.unwatch(self._listener.socket)  # which stays readable while the job is ended
            hint = f"; {MORE_OPEN_FILES}" if error.errno == errno.EMFILE else ""
            raise exceptions.JobError(f"cannot take the connection of a worker: {error.strerror}{hint}") from None
        if connection is not None:
            worker = WorkerConnection(self._loop, connection, self._listener, self, self._result_limit)
            self._without_rank.add(worker)

    def call_for(self, worker: WorkerConnection, rank: int, world_size: int) -> WorkerCall | None:
        """Return the call for the worker of this rank, in place of an earlier one; None if the job ends or pickling fails."""
        if self._is_ending:
            return None
        try:
            payload = self._function.payload()
        except CannotSend as error:
            self._cannot_send = error
            return None
        self._without_rank.discard(worker)
        if rank in self._workers:  # the worker of this rank in the generation before
            self._without_rank.add(self._workers[rank])
        self._workers[rank] = worker
        self._world_size = world_size
        stacks_after = None
        if self._spec.timeout is not None:
            stacks_at = self._spec.timeout - min(_BEFORE_TIMEOUT, self._spec.timeout / 10)  # seconds from the beginning
            stacks_after = max(0.01, stacks_at - (time.monotonic() - self._began))  # from now
            stack_file = self._stack_files.renew(rank)
            # the worker takes the last descriptor for its stacks
            payload = replace(payload, descriptors=(*payload.descriptors, stack_file))
        return WorkerCall(payload, {"result_limit": self._result_limit, "stacks_after": stacks_after})

    # --- the end

    def _results(self) -> list[Any]:
        """Return what each rank returned, in order; raise the failure of the job or of a result."""
        outcome = self._outcome
        status = outcome.status
        if status is None:  # the command was killed before it could say how the job ended
            status = self._process.returncode
        if status != 0:
            replies = ((rank, worker.reply) for rank, worker in self._workers.items())
            returned = sorted(rank for rank, reply in replies if reply is not None and reply.kind == RESULT)
            raise outcome.failure(status, self._exception_of, self._stack_files.read, returned)
        results = []
        for rank in range(self._world_size):
            reply = self._workers[rank].reply if rank in self._workers else None
            if reply is None or reply.kind != RESULT:
                why = f"rank {rank} ended with exit status 0 before its function had returned"
                raise exceptions.without_result(rank, why, "it called sys.exit() or os._exit(): return instead")
            try:
                results.append(pickle.loads(reply.data))
            except Exception as error:
                why = f"the result of rank {rank} cannot be read here: {type(error).__name__}: {error}"
                raise exceptions.without_result(rank, why) from error
        return results

    def _exception_of(self, rank: int) -> exceptions.Raised | None:
        """Return the exception that this rank sent, if any; its parts are pickled apart: their modules may be missing here."""
        worker = self._workers.get(rank)
        if worker is None or worker.reply is None or worker.reply.kind != ERROR:
            return None
        sent = pickle.loads(worker.reply.data)
        parts = None
        if sent["parts"] is not None:
            with suppress(Exception):  # without them its text is known
                parts = pickle.loads(sent["parts"])
        return exceptions.Raised(rank=rank, **{**sent, "parts": parts})

    def _close_connections(self) -> None:
        for worker in (*self._workers.values(), *self._without_rank):
            worker.close()
        self._stack_files.close()


def _check_can_start() -> None:
    """Raise a JobError if no command can be started from this program, or on this kernel."""
    if not sys.executable:
        why = "this program has no Python interpreter to start workers with (sys.executable is empty)"
        raise exceptions.JobError(why)
    try:
        check_kernel()
    except LaunchError as error:
        raise exceptions.JobError(f"{error.message}; {error.hint}") from None
