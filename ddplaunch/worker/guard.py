"""Forks the workers of one run from the interpreter that is kept warm, and is their parent until the agent of the run ends.

Their agent is no ancestor of theirs, so what the kernel does for a parent is done here: this process is a subreaper, tells how
each worker has ended, passes SIGCHLD on, and kills whatever is below it when the connection to the agent ends. Where it is
killed itself, the kernel kills its workers, and warm.py what they have started.

On the connection, requests as those to fork_server.py; the first of the fields, each ended by a zero byte, says what is asked:

    agent PID MASK      with descriptors of the working directory, and of what is to be kept open to the end: for all workers
    fork ...            as to fork_server.py, with one descriptor more for each worker: of a pipe to which is written how it
                        has ended
    reap PID            frees the pid of a worker that has ended; the answer is `usage RSS SECONDS`
"""

import os
import sys

before = set(sys.modules)
import _signal  # type: ignore[import-not-found]  # noqa: E402 - what `signal` is made of, with fewer imports
import ctypes  # noqa: E402
import fcntl  # noqa: E402
import select  # noqa: E402
import time  # noqa: E402

for name in set(sys.modules) - before:
    del sys.modules[name]  # the program finds what `modules` import, and nothing of ours

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from typing import Any

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
KILL_TIMEOUT = 2.0  # seconds that what was killed has to end
_LOOK_AGAIN = 0.002  # seconds


class Children:
    """Our children: `fd` is readable when one has ended or stopped. What imports have made of SIGCHLD comes back with `close`."""

    def __init__(self) -> None:
        self.fd, self._write = os.pipe()
        for fd in (self.fd, self._write):
            os.set_blocking(fd, False)
        self._handler = _signal.signal(_signal.SIGCHLD, lambda _signum, _frame: None)
        _signal.set_wakeup_fd(self._write)

    def close(self) -> None:
        """Leave SIGCHLD to the program."""
        _signal.set_wakeup_fd(-1)
        if self._handler is not None:  # which C code has set
            _signal.signal(_signal.SIGCHLD, self._handler)
        os.close(self.fd)
        os.close(self._write)

    def drain(self) -> None:
        """Take note of all that has come."""
        try:
            os.read(self.fd, 4096)
        except BlockingIOError:
            pass

    def now(self) -> "list[int]":
        """Return those that there are, ended ones included; this process has one thread."""
        pid = os.getpid()
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            return [int(child) for child in file.read().split()]

    def kill(self, but_for: "Collection[int]" = ()) -> bool:
        """Kill all but these, and reap those that have ended; say whether any are left. What is below them falls to us later."""
        for child in {*self.now()} - {*but_for}:
            try:
                os.kill(child, _signal.SIGKILL)
            except OSError:  # another user's by now
                pass
            os.waitpid(child, os.WNOHANG)
        return bool({*self.now()} - {*but_for})


def adopt() -> None:
    """Have all orphans below this process fall to it."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def serve(
    control: "Any",
    names: "dict[str, Any]",
    imported: "Any",
    become: "Callable[[int, bytes, list[int], int], list[str]]",
) -> "list[str]":
    """Serve the agent at the other side; return its arguments in each worker. `names` is what fork_server.py defines."""
    os.setsid()
    adopt()
    # the kernel has us go on where we are stopped, so that we see the end of the agent
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
                arguments = become(us, content, stdio, release)
                imported.take_over()
                if hasattr(sys, "orig_argv"):  # since Python 3.10; it is that of the run that was the first
                    sys.orig_argv[-len(sys.argv) :] = [sys.argv[0], *arguments]
                return arguments
            guard.running[worker] = descriptors.pop()
            names["send"](control, f"pid {worker}\n")
        else:
            names["send"](control, "forked\n")
        names["close"](workers)


class _Guard:
    def __init__(self, control: "Any", names: "dict[str, Any]") -> None:
        self._control = control
        self._names = names
        self._agent = 0
        self._kept: list[int] = []
        self._children = Children()
        self.running: dict[int, int] = {}  # worker -> the pipe for how it ends, -1 when that is known

    def close(self) -> None:
        """Leave nothing of this process to a worker."""
        self._control.close()
        self._children.close()
        for fd in (*self._kept, *self.running.values()):
            if fd >= 0:
                os.close(fd)

    def next_request(self) -> "tuple[bytes, list[int]]":
        """Wait for a request to fork, and serve all others; end when the agent has."""
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(self._children.fd, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poll.poll()}
            if self._children.fd in ready:
                self._children.drain()
                self._look()
            if self._control.fileno() not in ready:
                continue
            try:
                content, descriptors = self._names["receive"](self._control)
            except (EOFError, OSError):
                until = time.monotonic() + KILL_TIMEOUT
                while self._children.kill() and time.monotonic() < until:
                    time.sleep(_LOOK_AGAIN)
                os._exit(0)
            kind, _, rest = content.partition(b"\0")
            if kind == b"fork":
                return rest, descriptors
            if kind == b"agent":
                agent, mask, _ = rest.split(b"\0")
                self._agent = int(agent)
                os.umask(int(mask))
                folder, *self._kept = descriptors
                if len(self._kept) != 2:  # the kernel gives none beyond our limit of open files
                    os._exit(0)
                os.fchdir(folder)
                os.close(folder)
            else:
                self._reap(int(rest[:-1]))

    def _look(self) -> None:
        """Tell how workers have ended, whose pids stay theirs; reap all else that has; pass the signal on."""
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
        pipe = self.running.pop(worker, -1)
        if pipe >= 0:
            os.close(pipe)
        try:
            _, _, usage = os.wait4(worker, os.WNOHANG)
            answer = f"usage {usage.ru_maxrss} {usage.ru_utime + usage.ru_stime}\n"
        except ChildProcessError:
            answer = "usage 0 0\n"
        self._names["send"](self._control, answer)
