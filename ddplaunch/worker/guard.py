"""Runs in the guard of a run: a process, forked from a warm interpreter (warm.py), that forks the workers of the run.

The guard is the parent of these workers until the agent of the run ends. The agent (ddplaunch on this node) is no ancestor of
theirs, so the guard does the work of a parent: it is a subreaper, reports how each worker has ended, passes SIGCHLD on, and kills
everything below it when the connection to the agent ends. If the guard itself is killed, the kernel kills its workers, and the
warm interpreter kills the processes that they have started. fork_server.py lists what the agent asks.
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
    from types import ModuleType
    from typing import Any, NoReturn

    Request = tuple[bytes, list[int]]  # what the agent sends for one worker: content and descriptors

TIDY_TIMEOUT = 3.0  # seconds for processes that clean up: torch's manager of shared memory ends 2 s after its users
_KILL_TIMEOUT = 2.0  # seconds that killed processes have to end
_PAUSE = 0.002  # seconds between two looks whether they have
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_THREADS = 17  # of the fields behind the name in /proc/PID/stat, counted from 0: the number of threads (proc(5))


def serve(control: "Any", fork_server: "ModuleType", imported: "Any") -> "list[str]":
    """Serve the agent at the other side of `control` until it ends. Returns only in a worker, with the worker's arguments.

    `fork_server` is the module of fork_server.py; `imported` its record of what the warm interpreter has imported. The last
    descriptors of a worker are the pipe from which it reads a byte before it begins, and the pipe for how it ends.
    """
    os.setsid()
    adopt_orphans()
    _be_continued_at_end_of(control.fileno())  # by SIGCONT: a guard that was stopped has to end its workers then, too
    us = os.getpid()
    guard = _Guard(control, fork_server)
    fork_server.send(control, f"guard {us}\n{imported.report_to_agent}")
    while True:
        fields, descriptors = guard.next_fork_request()
        workers = fork_server.split_fork_request(control, fields, descriptors)
        if not workers:
            continue
        worker = guard.fork_all(workers)
        if worker is not None:  # in the worker
            content, (*files, release, end_pipe) = worker
            os.close(end_pipe)
            guard.close()
            arguments: list[str] = fork_server.become_worker(us, content, files, release)
            imported.repeat_side_effects()
            if hasattr(sys, "orig_argv"):  # since Python 3.10; it still is that of the warm interpreter's first run
                sys.orig_argv[-len(sys.argv) :] = [sys.argv[0], *arguments]
            return arguments
        fork_server.close_descriptors(workers)


def adopt_orphans() -> None:
    """Make this process the parent of all processes below it whose parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _be_continued_at_end_of(connection: int) -> None:
    """Have the kernel send this process SIGCONT when the connection ends: it may be stopped, and has to end its workers then."""
    fcntl.fcntl(connection, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(connection, fcntl.F_SETSIG, _signal.SIGCONT)
    fcntl.fcntl(connection, fcntl.F_SETFL, fcntl.fcntl(connection, fcntl.F_GETFL) | fcntl.FASYNC)


class _Guard:
    """What a guard knows: its agent, and the workers that were forked for that agent."""

    def __init__(self, control: "Any", fork_server: "ModuleType") -> None:
        self._control = control
        self._fork_server = fork_server
        self._agent_pid = 0  # not known yet
        self._kept_open: list[int] = []  # copies by which the agent and the front learn of the end of this process
        self._children = Children()
        self._end_pipes: dict[int, int] = {}  # pid of a worker -> the pipe for how it ends; -1 once that is written

    def close(self) -> None:
        """Close in a worker what belongs to the guard."""
        self._control.close()
        self._children.close()
        for fd in (*self._kept_open, *self._end_pipes.values()):
            if fd >= 0:
                os.close(fd)

    def fork_all(self, workers: "list[Request]") -> "Request | None":
        """Fork these workers, and tell the agent their pids; return in each worker its own request, and None in the guard.

        The last descriptor of each is the pipe for how the worker ends, which the guard keeps.
        """
        for index, (_, descriptors) in enumerate(workers):
            try:
                pid = os.fork()
            except OSError as error:
                self._fork_server.send(self._control, f"errno {error.errno}\n")
                return None
            if pid == 0:
                worker = workers.pop(index)
                self._fork_server.close_descriptors(workers)
                return worker
            self._end_pipes[pid] = descriptors.pop()
            self._fork_server.send(self._control, f"pid {pid}\n")
        self._fork_server.send(self._control, "forked\n")
        return None

    def next_fork_request(self) -> "Request":
        """Return the next request to fork workers; meanwhile serve other requests, and exit when the agent has ended."""
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
                kind, fields, descriptors = self._fork_server.receive(self._control)
            except (EOFError, OSError):
                self._end_all_and_exit()
            if kind == "fork":
                return fields, descriptors
            if kind == "agent":
                self._take_over(fields, descriptors)
            else:  # reap
                self._fork_server.send(self._control, self._reap(int(fields.rstrip(b"\0"))))

    def _end_all_and_exit(self) -> "NoReturn":
        """Kill everything below this process, and exit. Processes that clean up have some seconds to do so first."""
        tidy_until = time.monotonic() + TIDY_TIMEOUT
        until = tidy_until + _KILL_TIMEOUT
        while self._children.kill(may_tidy=time.monotonic() < tidy_until) and time.monotonic() < until:
            time.sleep(_PAUSE)
        os._exit(0)

    def _take_over(self, fields: bytes, descriptors: "list[int]") -> None:
        """Take over working directory and umask of the agent's run, and two pipes by which agent and front see our end."""
        agent, umask = fields.rstrip(b"\0").split(b"\0")
        self._agent_pid = int(agent)
        os.umask(int(umask))
        working_directory, *self._kept_open = descriptors
        # the kernel gives none beyond our limit of open files; the agent does without a guard
        if len(self._kept_open) != 2:
            os._exit(0)
        os.fchdir(working_directory)
        os.close(working_directory)

    def _reap(self, worker: int) -> str:
        """Free the pid of a worker that has ended; return the answer to the agent: memory (KiB) and seconds of CPU time."""
        pipe = self._end_pipes.pop(worker, -1)
        if pipe >= 0:
            os.close(pipe)
        try:
            _, _, usage = os.wait4(worker, os.WNOHANG)
        except ChildProcessError:  # an imported module has reaped it
            return "usage 0 0\n"
        return f"usage {usage.ru_maxrss} {usage.ru_utime + usage.ru_stime}\n"

    def _report_ends(self) -> None:
        """Report how workers ended; keep their pids until the agent frees them. Reap all other children, and pass SIGCHLD on."""
        for worker, pipe in self._end_pipes.items():
            end = os.waitid(os.P_PID, worker, os.WEXITED | os.WNOWAIT | os.WNOHANG) if pipe >= 0 else None
            if end is not None:
                try:
                    os.write(pipe, b"%d %d" % (end.si_code, end.si_status))
                except OSError:  # the agent reads no more
                    pass
                os.close(pipe)
                self._end_pipes[worker] = -1
        for orphan in {*self._children.now()} - self._end_pipes.keys():
            os.waitpid(orphan, os.WNOHANG)
        if self._agent_pid:  # which comes with its first request
            try:
                os.kill(self._agent_pid, _signal.SIGCHLD)
            except OSError:  # it has ended
                pass


class Children:
    """The children of this process, a guard or a warm interpreter: `fd` is readable when one has ended or stopped."""

    def __init__(self) -> None:
        self.fd, self._write = os.pipe()  # Python's handler of signals writes to it
        for fd in (self.fd, self._write):
            os.set_blocking(fd, False)
        self._old_handler = _signal.signal(_signal.SIGCHLD, lambda _signum, _frame: None)
        self._old_wakeup_fd = _signal.set_wakeup_fd(self._write)

    def close(self) -> None:
        """Restore what imports had set: the handler of SIGCHLD, and the descriptor that signals write to."""
        _signal.set_wakeup_fd(self._old_wakeup_fd)
        if self._old_handler is not None:  # None: C code had set it
            _signal.signal(_signal.SIGCHLD, self._old_handler)
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

    def kill(self, spared: "Collection[int]" = (), *, may_tidy: bool) -> bool:
        """Kill all children whose pids are not `spared`, reap those that have ended; return whether any are left.

        `may_tidy`: those that clean up after others go on. The children of those that end become ours, so the caller repeats it.
        """
        for child in {*self.now()} - {*spared}:
            try:
                # one that cleans up may have been stopped
                os.kill(child, _signal.SIGCONT if may_tidy and _tidies(child) else _signal.SIGKILL)
            except OSError:  # it has changed its user
                pass
            os.waitpid(child, os.WNOHANG)
        return bool({*self.now()} - {*spared})


def _tidies(pid: int) -> bool:
    """Return whether a process cleans up after others and then ends by itself: one of multiprocessing's or torch's.

    A process in uninterruptible sleep (D) may be one that reads a page for a moment: say yes, since the caller looks again.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        state = fields[0]
        if state == b"D":
            return True
        # one that cleans up has one thread; of others the command line is not read, as the memory that holds it may be locked
        if state not in (b"S", b"R", b"T") or fields[_THREADS] != b"1":
            return False
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            command = file.read()
    except OSError:  # it has ended
        return False
    # the same in ddplaunch/system/process/tree.py
    return b"resource_tracker import main" in command or b"torch_shm_manager" in command.partition(b"\0")[0]
