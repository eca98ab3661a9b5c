"""What the agent starts to serve its workers: NVIDIA's MPS daemon, and torch's store at MASTER_PORT. Few jobs need either."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from functools import partial

from ddplaunch.launcher.node.context import WorkerSetup
from ddplaunch.plan.variables import environment
from ddplaunch.system.loop.loop import Loop
from ddplaunch.system.own_files import worker_program
from ddplaunch.system.process.ask import AskedEnded, ask
from ddplaunch.system.process.child import StartError, Stdio, handled_signals, start
from ddplaunch.system.process.files import remove_within
from ddplaunch.system.process.linux import signal_at_end_of

START_TIMEOUT = 10.0  # seconds in which the daemon must have started
QUIT_TIMEOUT = 5.0  # seconds for the command that tells it to quit
_REMOVED_WITHIN = 1.0  # seconds
_STORE = worker_program("store.py")


class Mps:
    """NVIDIA's MPS daemon (workers share a GPU by it) of one generation, with folders and variables of its own.

    It becomes a child of the agent, which is a subreaper: if it does not quit it is swept. NVIDIA's command talks to the driver,
    so children start the daemon and have it quit, and the loop waits for nothing.
    """

    def __init__(self, loop: Loop, control: str, env: Mapping[str, str], folder: str) -> None:
        """Have a child start the MPS daemon, which makes `folder` for it.

        `control` is the path of nvidia-cuda-mps-control, `env` the workers' environment.
        """
        self._control = control
        self._folder = folder
        self.variables = {
            "CUDA_MPS_PIPE_DIRECTORY": f"{self._folder}/pipe",
            "CUDA_MPS_LOG_DIRECTORY": f"{self._folder}/log",
        }
        # the daemon would renumber the devices visible to it, and its clients apply the variable again
        self._env = {name: value for name, value in env.items() if name != "CUDA_VISIBLE_DEVICES"} | self.variables
        self._loop = loop
        why_if_given_up = "interrupted"
        self._pending_start = loop.ask(self._start_in_time, why_if_given_up)

    @property
    def is_starting(self) -> bool:
        """Whether it is not known yet what came of the start."""
        return bool(self._pending_start.pid)

    @property
    def why_not_started(self) -> str:
        """The reason if it did not start, else ""."""
        return self._pending_start.answer

    def _start_in_time(self) -> str:
        try:
            return ask(self._start, START_TIMEOUT)
        except (OSError, AskedEnded) as error:  # TimeoutError is an OSError
            return f"{self._control} -d did not start: {error}"

    def _start(self) -> str:
        """Start the MPS daemon; return why that failed, or "". Runs in a child, since the command may hang."""
        import subprocess

        for folder in (self._folder, *self.variables.values()):
            os.mkdir(folder, 0o700)
        # not a pipe, which would stay open until the daemon, which inherits it, exits
        with open(f"{self._folder}/stderr", "wb+") as stderr:
            done = subprocess.run(
                [self._control, "-d"],
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                check=False,
                preexec_fn=partial(_end_with_parent, os.getpid()),
            )
            stderr.seek(0)
            why = stderr.read().decode(errors="replace").strip()
        return "" if done.returncode == 0 else f"{self._control} -d did not start: {why or 'no output on stderr'}"

    def dismiss(self) -> None:
        """Have it quit, without waiting for its end."""
        self._pending_start.give_up()
        self._loop.ask(self._quit_in_time, None)

    def _quit_in_time(self) -> None:
        try:
            ask(self._quit, QUIT_TIMEOUT)
        except (OSError, AskedEnded):
            pass  # the sweep ends it

    def _quit(self) -> None:
        """Tell the MPS daemon to quit. Runs in a child, since the command may hang."""
        import subprocess

        null, end_with_us = subprocess.DEVNULL, partial(_end_with_parent, os.getpid())
        subprocess.run(
            [self._control],
            env=self._env,
            input=b"quit\n",
            stdout=null,
            stderr=null,
            check=False,
            preexec_fn=end_with_us,
        )

    def remove(self) -> None:
        """Remove its folders, once it has ended."""
        remove_within(self._folder, _REMOVED_WITHIN)


def _end_with_parent(asked: int) -> None:
    """Prepare NVIDIA's command in a child of the one that is `asked`: take signals, which that has blocked, and end with it.

    A command that hangs has the name of the daemon, which a sweep spares. The daemon is a child of the command, and stays.
    """
    signal_at_end_of(asked, signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def host_store(setup: WorkerSetup) -> None:
    """Start a process on the node of rank 0 that hosts torch's store at MASTER_PORT, for which a worker elsewhere has waited.

    Rank 0, whose torch hosts the store mostly, has not: its program may be none of torch's. The process has the interpreter and
    the environment of the first worker here, and ends with what workers leave behind.
    """
    plan = setup.plan
    if plan.interpreter is None:  # the program is not Python
        return
    env = environment(setup.env, plan, plan.workers[0], generation=setup.generation, term=setup.term, port=setup.port)
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    try:
        with suppress(StartError):  # the worker then waits as long as it would without ddplaunch
            argv = [plan.interpreter, _STORE, str(os.getpid())]
            child = start(argv, env, Stdio(nothing, nothing, nothing), handled=handled_signals())
            child.abandon()
    finally:
        os.close(nothing)
