"""The fork server of a node, seen from the agent: starts it, and has it fork workers. Its other half is worker/fork_server.py.

A worker that it has forked is a child of the agent, as one that the agent has started itself.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import socket
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack

from ddplaunch.process.child import Child
from ddplaunch.process.fork_requests import Fork, ForkRequests, nothing_failed
from ddplaunch.process.start import StartError, Stdio, start

VARIABLE = "DDPLAUNCH_FORK_SERVER"
END_TIMEOUT = 1.0  # seconds that the agent waits for its end; one that cannot be killed is not waited for longer


class ForkServer(ForkRequests):
    """A process that imports modules once, and then forks workers."""

    def __init__(
        self, argv: Sequence[str], env: Mapping[str, str], modules: Iterable[str], *, handled: Collection[int]
    ) -> None:
        """Start it with the command of a worker, and what the environments of all workers have in common.

        Raises:
            StartError: the machine cannot create another process.
        """
        with ExitStack() as opened:
            try:
                ours, theirs = socket.socketpair()
                opened.enter_context(theirs)
                failed = opened.enter_context(ExitStack())
                failed.callback(ours.close)
                read, write = os.pipe()  # stdout and stderr are pipes, as those of workers are
                opened.callback(os.close, read)
                opened.callback(os.close, write)
                devnull = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
                opened.callback(os.close, devnull)
            except OSError as error:
                raise StartError(error.errno or errno.EMFILE, "cannot start the fork server") from None
            theirs.set_inheritable(True)
            served = ",".join([str(theirs.fileno()), *modules])
            self._child = start(argv, {**env, VARIABLE: served}, Stdio(devnull, write, write), handled=handled)
            failed.pop_all()
        super().__init__(ours)

    @property
    def pid(self) -> int:
        """Its process."""
        return self._child.pid

    def fork(self, forks: Sequence[Fork]) -> list[Child]:
        """Fork workers, which begin together.

        Raises:
            StartError: the machine cannot create one of the processes; none of them begins.
            ServerLost: it has ended, or does not answer; none of them begins.
        """
        return self._fork(forks, _adopted)

    def close(self) -> None:
        """End it, whatever it is doing."""
        self._socket.close()
        try:
            signal.pidfd_send_signal(self._child.pidfd, signal.SIGKILL)
            select.select([self._child.pidfd], [], [], END_TIMEOUT)
            os.waitpid(self.pid, os.WNOHANG)
        except OSError:
            pass  # it has ended before
        os.close(self._child.failure)
        os.close(self._child.pidfd)


def _adopted(pid: int) -> Child:
    failure = nothing_failed()
    try:
        return Child(pid, os.pidfd_open(pid), failure)
    except OSError:
        os.close(failure)
        raise
