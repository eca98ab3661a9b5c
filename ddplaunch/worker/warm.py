"""Keeps an interpreter warm: its imports are made once for several runs, and each run gets a guard, forked from it.

It is started with the command of a worker and one variable: the path and the descriptor of a socket, the seconds for which it is
kept while it is unused, and the modules to import. A connection, of the same user only, begins with one line:

    check SECONDS FOLDER    would it serve a script in FOLDER, and then be kept for SECONDS unused? The answer is `ok`; or
                            `unfit WHY` for this script; or `stale WHY` or `unsafe WHY`, and it ends with its last guard
    guard SECONDS FOLDER    the same answers; after `ok` a guard serves the connection
    status                  the answer is pid, runs, running guards, seconds left, interpreter and modules, with tabs between
    stop                    the answer is `ok`; it ends with its last guard

It is unsafe where fork_server.py refuses to fork, and stale once a file that was imported has changed.

A guard forks the workers of one run, and is their parent until the agent of the run ends. The agent is no ancestor of these
workers, so the guard does the work of a parent for it: it is a subreaper, reports how each worker has ended, passes SIGCHLD on,
and kills everything below it when the connection to the agent ends. If the guard itself is killed, the kernel kills its workers,
and the warm interpreter kills the processes that they have started.

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
    from collections.abc import Callable, Collection
    from typing import Any

_ACCEPT_AGAIN = 0.1  # seconds from a connection for which there was no room to the next try
_BACKLOG = 64
_IMPORTS_WITHIN = 600  # seconds; nobody else would end imports that hang
_LINE_TIMEOUT = 5.0  # seconds that a client has to send its line
_MOST_SILENT = 64  # clients that have not sent their line; one more, and the first of them is closed
_LONGEST = 86400  # seconds for which it is kept unused at most
_LONGEST_LINE = 8192  # bytes
_NAME = "ddplaunch-warm"  # for `ps`, as long as a name may be
_TITLE = "ddplaunch-warm (`ddplaunch warm --stop` ends it)"
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_KILL_TIMEOUT = 2.0  # seconds that killed processes have to end
_TIDY_TIMEOUT = 3.0  # seconds for processes that clean up: torch's manager of shared memory ends 2 s after its users
_PAUSE = 0.002  # seconds between two looks whether they have
# of the fields behind the name in /proc/PID/stat, counted from 0: where the command line begins and ends (proc(5))
_ARG_START, _ARG_END = 45, 46


def serve(load: "Callable[[str], dict[str, Any]]", path: str, number: str, seconds: str, *modules: str) -> "list[str]":
    """Import, then serve runs until none has come for `seconds`. Returns only in a worker, with the worker's arguments."""
    warm = _Warm(load, path, int(number), int(seconds), modules)
    undo_title = _change_title(_NAME, _TITLE)  # a worker's would be mistaken for one that a job has left
    while True:
        connection = warm.next_run()
        try:
            pid = os.fork()
        except OSError:  # the agent finds it closed, and does without
            connection.close()
            continue
        if pid == 0:
            warm.close()
            undo_title()
            return _guard(connection, warm.server, warm.imported)
        warm.guards[pid] = connection


class _Warm:
    """A warm interpreter, its clients, and the guards that were forked from it."""

    def __init__(
        self, load: "Callable[[str], dict[str, Any]]", path: str, number: int, seconds: int, modules: "tuple[str, ...]"
    ) -> None:
        """Import the modules; `number` is the descriptor of the socket at `path`."""
        began = time.time_ns()
        self.server = load("fork_server")
        self._socket = self.server["_socket"]
        self._path = path
        self._inode = _inode(path)
        self._listener = self._socket.socket(fileno=number)
        self._listener.listen(_BACKLOG)  # again: from now on the kernel tells clients the pid of this process
        self._listener.settimeout(0)
        self._seconds = seconds
        self._modules = modules
        program = sys.argv[1:3]
        _signal.alarm(_IMPORTS_WITHIN)  # ends this process
        self.imported = self.server["Imported"](modules, *program)
        _signal.alarm(0)
        self._files = self.server["ImportedFiles"](began, self.server["folder_of"](*program))
        self.imported.leave_folder()
        _adopt_orphans()  # the processes that workers have started, where their guard was killed
        self._children = _Children()
        self._of_imports = {*self._children.now()}  # every child that comes later is a guard, or was left by one
        self.guards: dict[int, Any] = {}  # pid -> connection, kept open until no process of the run is left
        # connections of guards that have ended, and when each is closed if processes of theirs are still left
        self._lost: list[tuple[float, Any]] = []
        self._has_left = False  # processes that a guard has left were killed, and have not ended yet
        self._silent: list[tuple[float, Any]] = []  # clients that have not sent their line, and when each is closed
        self._runs = 0
        self._accepts_at = 0.0  # monotonic
        self._until = time.monotonic() + seconds

    def next_run(self) -> "Any":
        """Wait for the next run, and return the connection that its guard is to serve; exit when no run is to come."""
        while self._listener is not None or self.guards or self._lost:
            listens = self._listener is not None and time.monotonic() >= self._accepts_at
            times = [until for until, _ in (*self._lost, *self._silent)]
            if self._listener is not None and not listens:
                times.append(self._accepts_at)
            if self._listener is not None and not self.guards:
                times.append(self._until)
            wait = max(0.0, min(times) - time.monotonic()) * 1000 if times else None
            silent = [connection for _, connection in self._silent]
            poll = select.poll()  # select() takes no descriptor above 1023, and what was imported may hold all below
            for one in (self._children.fd, *silent, *([self._listener] if listens else [])):
                poll.register(one, select.POLLIN)
            ready = {fd for fd, _ in poll.poll(wait)}
            if self._children.fd in ready:
                self._children.drain()
                self._on_children()
            now = time.monotonic()
            if any(until <= now for until, _ in self._lost):
                self._has_left = self._children.kill(spared={*self.guards, *self._of_imports}, may_tidy=False)
            # agents wait until no process of their guard is left, or its time is up
            for lost in [lost for lost in self._lost if not self._has_left or lost[0] <= now]:
                self._lost.remove(lost)
                lost[1].close()
            if listens and self._listener.fileno() in ready:
                self._accept()
            if (connection := self._next_of(ready)) is not None:
                return connection
            if not self.guards and time.monotonic() >= self._until:
                self._take_no_more()
        os._exit(0)

    def close(self) -> None:
        """Close in a guard what belongs to the warm interpreter."""
        self._children.close()
        for one in filter(None, [self._listener, *self._connections()]):
            one.close()

    def _connections(self) -> "list[Any]":
        return [*self.guards.values(), *(connection for _, connection in (*self._lost, *self._silent))]

    def _on_children(self) -> None:
        """Reap guards that have ended and kill the processes that they left; each further end calls this again."""
        for pid in [pid for pid in self.guards if os.waitpid(pid, os.WNOHANG)[0]]:
            now = time.monotonic()
            self._lost.append((now + _TIDY_TIMEOUT, self.guards.pop(pid)))
            self._until = now + self._seconds
        if self._lost or self._has_left:
            self._has_left = self._children.kill(spared={*self.guards, *self._of_imports}, may_tidy=True)

    def _accept(self) -> None:
        """Accept a client."""
        try:
            connection = self._socket.socket(fileno=self._listener._accept()[0])
            connection.setblocking(False)
            peer = connection.getsockopt(
                self._socket.SOL_SOCKET, self._socket.SO_PEERCRED, 12
            )  # pid, uid, gid: unix(7)
            if int.from_bytes(peer[4:8], sys.byteorder) != os.getuid():
                return
        except OSError:  # the client has gone again, or there is no room
            self._accepts_at = time.monotonic() + _ACCEPT_AGAIN
            return
        self._silent.append((time.monotonic() + _LINE_TIMEOUT, connection))
        if len(self._silent) > _MOST_SILENT:
            self._silent.pop(0)[1].close()

    def _next_of(self, ready: "set[int]") -> "Any":
        """Answer the `ready` clients; return the first client that asks for a guard. Close clients that are silent too long."""
        now = time.monotonic()
        for client in self._silent[:]:
            until, connection = client
            if connection.fileno() in ready:
                self._silent.remove(client)
                if self._asks_for_guard(connection):
                    return connection
                connection.close()
            elif until <= now:
                self._silent.remove(client)
                connection.close()
        return None

    def _asks_for_guard(self, connection: "Any") -> bool:
        """Read and answer the line of a client; return whether the client asks for a guard."""
        try:
            line = connection.recv(_LONGEST_LINE)
            what, _, rest = os.fsdecode(line).rstrip("\n").partition(" ")
            answer, is_run = self._answer(what, rest, connection)
            connection.sendall(os.fsencode(answer))
        except (OSError, ValueError):  # the client has gone, or sent no number or path
            return False
        connection.settimeout(None)
        return is_run

    def _answer(self, what: str, rest: str, connection: "Any") -> "tuple[str, bool]":
        """Return the answer to a line, and whether a guard is to serve what follows."""
        if what == "status":
            left = round(self._until - time.monotonic())
            fields = (os.getpid(), self._runs, len(self.guards), left, sys.executable, ",".join(self._modules))
            return "\t".join(map(str, fields)) + "\n", False
        if what == "stop":
            self._take_no_more()
            return "ok\n", False
        seconds, _, folder = rest.partition(" ")
        if what not in ("check", "guard") or not seconds.isdecimal():
            return "", False  # an empty line: the client only looked whether we are there
        if refusal := self._refusal(connection, folder):
            return refusal, False
        self._seconds = min(int(seconds), _LONGEST)
        self._until = time.monotonic() + self._seconds
        self._runs += what == "guard"
        if _inode(self._path) == self._inode:
            os.utime(self._path)  # shows which interpreter was unused for longest, when another is to be started
        return "ok\n", what == "guard"

    def _refusal(self, connection: "Any", folder: str) -> str:
        """Return why no guard may serve a script in `folder`, "" if a guard may; take no more runs if no script can be served."""
        if self._listener is None:
            return "stale it ends with the runs that it serves\n"  # the client connected before it was closed
        ours = {one.fileno() for one in (self._listener, connection, *self._connections())}
        unsafe = self.imported.why_unsafe(ours, {*self._children.now()} - self._of_imports)
        stale = None if unsafe else self._files.why_stale()
        if unsafe or stale:
            self._take_no_more()
            return f"unsafe {unsafe}\n" if unsafe else f"stale {stale}\n"
        unfit = self._files.why_unfit(folder)
        return f"unfit {unfit}\n" if unfit else ""

    def _take_no_more(self) -> None:
        """Accept no further run; this process exits after its last guard."""
        if self._listener is None:
            return
        self._listener.close()
        self._listener = None
        if self._inode and _inode(self._path) == self._inode:
            os.unlink(self._path)


def _inode(path: str) -> int:
    try:
        return os.stat(path).st_ino
    except OSError:  # removed: clients that have connected are still served
        return 0


# --- the guard of a run


class _Children:
    """The children of this process: `fd` is readable when one has ended or stopped."""

    def __init__(self) -> None:
        self.fd, self._write = os.pipe()
        for fd in (self.fd, self._write):
            os.set_blocking(fd, False)
        self._handler = _signal.signal(_signal.SIGCHLD, lambda _signum, _frame: None)
        self._woken = _signal.set_wakeup_fd(self._write)

    def close(self) -> None:
        """Restore what imports had set: the handler of SIGCHLD, and the descriptor that signals write to."""
        _signal.set_wakeup_fd(self._woken)
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

    def kill(self, spared: "Collection[int]" = (), *, may_tidy: bool) -> bool:
        """Kill all children that are not `spared`, reap those that have ended; return whether any are left.

        `may_tidy`: those that clean up after others go on. The children of those that end become ours.
        """
        for child in {*self.now()} - {*spared}:
            try:
                os.kill(child, _signal.SIGCONT if may_tidy and _tidies(child) else _signal.SIGKILL)
            except OSError:  # it has changed its user
                pass
            os.waitpid(child, os.WNOHANG)
        return bool({*self.now()} - {*spared})


def _tidies(pid: int) -> bool:
    """Return whether a process cleans up after others and then ends by itself, as in ddplaunch/system/process/tree.py.

    A process in uninterruptible sleep may be one that reads a page for a moment: its caller looks again.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            state, *fields = file.read().rpartition(b")")[2].split()
        if state == b"D":
            return True
        if state not in (b"S", b"R", b"T") or fields[16] != b"1":  # its memory may be locked
            return False
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            command = file.read()
    except OSError:  # it has ended
        return False
    return b"resource_tracker import main" in command or b"torch_shm_manager" in command.partition(b"\0")[0]


def _adopt_orphans() -> None:
    """Make this process the parent of all orphans below it."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _guard(control: "Any", names: "dict[str, Any]", imported: "Any") -> "list[str]":
    """Serve the agent at the other side of `control`: fork its workers and report their ends. Returns only in a worker.

    The result is the worker's arguments. `names` is what fork_server.py defines.
    """
    os.setsid()
    _adopt_orphans()
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
        self._children = _Children()
        self.running: dict[int, int] = {}  # worker -> the pipe for how it ends, -1 when that is known

    def close(self) -> None:
        """Close in a worker what belongs to the guard."""
        self._control.close()
        self._children.close()
        for fd in (*self._kept, *self.running.values()):
            if fd >= 0:
                os.close(fd)

    def next_request(self) -> "tuple[bytes, list[int]]":
        """Return the next request to fork a worker; meanwhile serve other requests, and exit when the agent has ended."""
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
                tidied = time.monotonic() + _TIDY_TIMEOUT
                until = tidied + _KILL_TIMEOUT
                while self._children.kill(may_tidy=time.monotonic() < tidied) and time.monotonic() < until:
                    time.sleep(_PAUSE)
                os._exit(0)
            kind, _, rest = content.partition(b"\0")
            if kind == b"fork":
                return rest, descriptors
            if kind == b"agent":
                self._take_over(rest, descriptors)
            else:
                self._names["send"](self._control, self._reap(int(rest[:-1])))

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

    def _reap(self, worker: int) -> str:
        """Free the pid of a worker that has ended; return the answer to the agent, with the worker's usage."""
        pipe = self.running.pop(worker, -1)
        if pipe >= 0:
            os.close(pipe)
        try:
            _, _, usage = os.wait4(worker, os.WNOHANG)
        except ChildProcessError:
            return "usage 0 0\n"
        return f"usage {usage.ru_maxrss} {usage.ru_utime + usage.ru_stime}\n"

    def _report_ends(self) -> None:
        """Report how workers ended; keep their pids until the agent frees them. Reap orphans, and pass SIGCHLD on."""
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


# --- what `ps` shows


def _change_title(name: str, text: str) -> "Callable[[], None]":
    """Show this name, and as much of this text as fits; return what undoes both.

    Where the kernel does not allow it nothing changes.
    """
    try:
        with open("/proc/self/comm", "rb") as file:
            old_name = file.read().rstrip(b"\n")
        with open("/proc/self/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        start, end = int(fields[_ARG_START]), int(fields[_ARG_END])
        with open("/proc/self/cmdline", "rb") as file:
            old_line = file.read()
        if len(old_line) != end - start:  # a library shows something else already
            return lambda: None
        # what ends with no zero would be read on, into the environment
        _write_title(name.encode(), start, text.encode()[: end - start - 1].ljust(end - start, b"\0"))
    except (OSError, ValueError, IndexError):
        return lambda: None

    def undo() -> None:
        try:
            _write_title(old_name, start, old_line)
        except OSError:
            pass

    return undo


def _write_title(name: bytes, start: int, line: bytes) -> None:
    with open("/proc/self/comm", "wb", buffering=0) as file:
        file.write(name)
    memory = os.open("/proc/self/mem", os.O_WRONLY)
    try:
        os.pwrite(memory, line, start)
    finally:
        os.close(memory)
