"""Forks the workers of one run from the interpreter that is kept warm, and is their parent until the agent of the run ends.

The agent is no ancestor of these workers, so this process does the work of a parent for it: it is a subreaper, reports how each
worker has ended, passes SIGCHLD on, and kills everything below it when the connection to the agent ends. If the guard itself is
killed, the kernel kills its workers, and warm.py kills the processes that they have started.

On the connection, requests are framed as for fork_server.py. Their fields end with a zero byte each; the first is the kind:

    agent PID MASK      for all workers; with descriptors of the working directory, and of two files to be kept open to the end
    fork ...            as to fork_server.py, with one descriptor more for each worker: of the pipe for how it has ended
    reap PID            frees the pid of a worker that has ended; the answer is `usage RSS SECONDS`
"""

import os
import sys

before = set(sys.modules)
import _signal  # type: ignore[import-not-found]  # noqa: E402 - the C part of `signal`, with fewer imports
import ctypes  # noqa: E402
import fcntl  # noqa: E402
import select  # noqa: E402
import time  # noqa: E402

for name in set(sys.modules) - before:
    del sys.modules[name]  # the program finds what `modules` import, and nothing of ours

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection
    from typing import Any

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
KILL_TIMEOUT = 2.0  # seconds that killed processes have to end
_PAUSE = 0.002  # seconds between two looks whether they have


class Children:
    """The children of this process: `fd` is readable when one has ended or stopped."""

    def __init__(self) -> None:
        self.fd, self._write = os.pipe()
        for fd in (self.fd, self._write):
            os.set_blocking(fd, False)
        self._handler = _signal.signal(_signal.SIGCHLD, lambda _signum, _frame: None)
        _signal.set_wakeup_fd(self._write)

    def close(self) -> None:
        """Give SIGCHLD back the handler that imports had set."""
        _signal.set_wakeup_fd(-1)
        if self._handler is not None:  # None: C code had set it
            _signal.signal(_signal.SIGCHLD, self._handler)
        os.close(self.fd)
        os.close(self._write)

    def drain(self) -> None:
        """Empty `fd`."""
        try:
            os.read(self.fd, 4096)
        except BlockingIOError:
            pass

    def now(self) -> "list[int]":
        """Return the pids of all children, ended ones included; this process has one thread."""
        pid = os.getpid()
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            return [int(child) for child in file.read().split()]

    def kill(self, spared: "Collection[int]" = ()) -> bool:
        """Kill all children that are not `spared`, reap those that have ended; return whether any are left.

        Their own children become ours when they end.
        """
        for child in {*self.now()} - {*spared}:
            try:
                os.kill(child, _signal.SIGKILL)
            except OSError:  # it has changed its user
                pass
            os.waitpid(child, os.WNOHANG)
        return bool({*self.now()} - {*spared})


def adopt() -> None:
    """Make this process the parent of all orphans below it."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def serve(control: "Any", names: "dict[str, Any]", imported: "Any") -> "list[str]":
    """Serve the agent at the other side of `control`. It returns in each worker, with the arguments of that worker.

    `names` is what fork_server.py defines.
    """
    os.setsid()
    adopt()
    # at the end of the agent the kernel sends SIGCONT, in case that we are stopped
    fd, us = control.fileno(), os.getpid()
    fcntl.fcntl(fd, fcntl.F_SETOWN, us)
    fcntl.fcntl(fd, fcntl.F_SETSIG, _signal.SIGCONT)
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | fcntl.FASYNC)
    guard = _Guard(control, names)
    names["send"](control, f"guard {us}\n{imported.lines}")
    while True:
        workers = names["parts"](control, *guard.next_request())
        if not workers:
            continue
        for mine, (content, descriptors) in enumerate(workers):
            try:
                worker = os.fork()
            except OSError as error:
                names["send"](control, f"errno {error.errno}\n")
                break
            if worker == 0:
                del workers[mine]
                names["close"](workers)
                *stdio, release, status = descriptors
                os.close(status)
                guard.close()
                arguments: list[str] = names["become"](us, content, stdio, release)
                imported.take_over()
                if hasattr(sys, "orig_argv"):  # since Python 3.10; until here it was that of the first run
                    sys.orig_argv[-len(sys.argv) :] = [sys.argv[0], *arguments]
                return arguments
            guard.running[worker] = descriptors.pop()
            names["send"](control, f"pid {worker}\n")
        else:
            names["send"](control, "forked\n")
        names["close"](workers)


class _Guard:
    """The requests of one agent, and the workers that were forked for it."""

    def __init__(self, control: "Any", names: "dict[str, Any]") -> None:
        self._control = control
        self._names = names
        self._agent = 0
        self._kept: list[int] = []
        self._children = Children()
        self.running: dict[int, int] = {}  # worker -> the pipe for how it ends, -1 when that is known

    def close(self) -> None:
        """Close in a worker what belongs to the guard."""
        self._control.close()
        self._children.close()
        for fd in (*self._kept, *self.running.values()):
            if fd >= 0:
                os.close(fd)

    def next_request(self) -> "tuple[bytes, list[int]]":
        """Return the next request to fork; serve all others meanwhile, and exit when the agent has ended."""
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(self._children.fd, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poll.poll()}
            if self._children.fd in ready:
                self._children.drain()
                self._report_ends()
            if self._control.fileno() not in ready:
                continue
            try:
                content, descriptors = self._names["receive"](self._control)
            except (EOFError, OSError):
                until = time.monotonic() + KILL_TIMEOUT
                while self._children.kill() and time.monotonic() < until:
                    time.sleep(_PAUSE)
                os._exit(0)
            kind, _, rest = content.partition(b"\0")
            if kind == b"fork":
                return rest, descriptors
            if kind == b"agent":
                self._take_over(rest, descriptors)
            else:
                self._reap(int(rest[:-1]))

    def _take_over(self, fields: bytes, descriptors: "list[int]") -> None:
        """Take over the working directory, the umask and the open files of the agent's run."""
        agent, mask, _ = fields.split(b"\0")
        self._agent = int(agent)
        os.umask(int(mask))
        folder, *self._kept = descriptors
        if len(self._kept) != 2:  # the kernel gives none beyond our limit of open files
            os._exit(0)
        os.fchdir(folder)
        os.close(folder)

    def _report_ends(self) -> None:
        """Report how workers have ended, keep their pids until the agent frees them; reap orphans; pass SIGCHLD on."""
        for worker, pipe in self.running.items():
            end = os.waitid(os.P_PID, worker, os.WEXITED | os.WNOWAIT | os.WNOHANG) if pipe >= 0 else None
            if end is not None:
                try:
                    os.write(pipe, b"%d %d" % (end.si_code, end.si_status))
                except OSError:  # the agent reads no more
                    pass
                os.close(pipe)
                self.running[worker] = -1
        for child in {*self._children.now()} - self.running.keys():
            os.waitpid(child, os.WNOHANG)
        if self._agent:
            try:
                os.kill(self._agent, _signal.SIGCHLD)
            except OSError:  # it has ended
                pass

    def _reap(self, worker: int) -> None:
        """Free the pid of a worker that has ended, and answer what it used."""
        pipe = self.running.pop(worker, -1)
        if pipe >= 0:
            os.close(pipe)
        try:
            _, _, usage = os.wait4(worker, os.WNOHANG)
            answer = f"usage {usage.ru_maxrss} {usage.ru_utime + usage.ru_stime}\n"
        except ChildProcessError:
            answer = "usage 0 0\n"
        self._names["send"](self._control, answer)
