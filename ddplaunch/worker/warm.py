"""Runs in a warm interpreter: a process that imports modules once, outlives jobs, and forks a guard (guard.py) for each run.

It is started with the command of a worker and one variable: the path and the descriptor of a socket, the seconds for which it is
kept while it is unused, and the modules to import. A client, of the same user only, asks once: a request of fork_server.py. It is
unsafe where fork_server.py refuses to fork, and stale once a file that was imported has changed.
"""

import os
import sys

before = set(sys.modules)
import _signal  # type: ignore[import-not-found]  # noqa: E402 - the C part of `signal`, with fewer imports
import select  # noqa: E402
import time  # noqa: E402

for name in set(sys.modules) - before:
    del sys.modules[name]  # the program finds what `modules` import, and nothing of ours

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType
    from typing import Any

_ACCEPT_AGAIN = 0.1  # seconds from a connection for which there was no room to the next try
_BACKLOG = 64  # connections that wait to be accepted
_IMPORTS_WITHIN = 600  # seconds; nobody else would end imports that hang
_REQUEST_TIMEOUT = 5.0  # seconds that a client has to send its request
_MOST_SILENT = 64  # clients that have not asked; one more, and the first of them is closed
_LONGEST_IDLE = 86400  # seconds for which it is kept unused at most
_NAME = "ddplaunch-warm"  # for `ps`, as long as a name may be
_TITLE = "ddplaunch-warm (`ddplaunch warm --stop` ends it)"
# of the fields behind the name in /proc/PID/stat, counted from 0: where the command line begins and ends (proc(5))
_ARG_START, _ARG_END = 45, 46


def serve(load_sibling: "Callable[[str], ModuleType]", path: str, fd: str, seconds: str, *modules: str) -> "list[str]":
    """Import, then serve runs until none has come for `seconds`. Returns only in a worker, with the worker's arguments.

    `fd` is the descriptor of the socket that is bound to `path`.
    """
    warm = _Warm(load_sibling, path, int(fd), int(seconds), modules)
    # with the title of a worker, `ps` would show a process that a job seems to have left
    title = _Title(_NAME, _TITLE)
    while True:
        connection = warm.next_run()
        try:
            pid = os.fork()
        except OSError:  # the agent finds its connection closed, and does without a guard
            connection.close()
            continue
        if pid == 0:
            warm.close()
            title.restore()
            arguments: list[str] = warm.guard.serve(connection, warm.fork_server, warm.imported)
            return arguments
        warm.guards[pid] = connection  # kept open until nothing of the run is left: the agent waits for its end


class _Expiring:
    """A connection that is kept until a time at most."""

    def __init__(self, connection: "Any", until: float) -> None:
        self.connection = connection
        self.until = until  # monotonic seconds


class _Warm:
    """A warm interpreter, its clients (launchers that look for one), and the guards that were forked from it."""

    def __init__(
        self, load_sibling: "Callable[[str], ModuleType]", path: str, fd: int, seconds: int, modules: "tuple[str, ...]"
    ) -> None:
        """Import the modules, and have clients connect; `fd` is the descriptor of the socket at `path`."""
        began = time.time_ns()
        self.fork_server, self.guard = load_sibling("fork_server"), load_sibling("guard")
        self._socket_module = self.fork_server._socket
        self._path = path
        self._inode = _inode(path)  # of our socket
        self._listener = self._socket_module.socket(fileno=fd)  # None once no further run is accepted
        self._listener.listen(_BACKLOG)  # again: from now on the kernel tells clients the pid of this process
        self._listener.settimeout(0)
        self._idle_limit = seconds
        self._modules = modules
        kind, target = sys.argv[1:3]  # of the first run's program
        _signal.alarm(_IMPORTS_WITHIN)  # ends this process
        self.imported = self.fork_server.Imported(modules, kind, target)
        _signal.alarm(0)
        folder = self.fork_server.folder_of(kind, target)
        # says whether a later run would import the same
        self._imported_files = load_sibling("imported_files").ImportedFiles(began, folder)
        self.imported.leave_working_directory()  # whose file system may be unmounted between runs
        self.guard.adopt_orphans()  # the processes that workers have started, where their guard was killed
        self._children = self.guard.Children()
        # every child that comes later is a guard, or was left by one
        self._children_of_imports = {*self._children.now()}
        self.guards: dict[int, Any] = {}  # pid -> connection, kept open until no process of the run is left
        # guards that have ended: closed at their time even if processes of theirs are left
        self._ended_guards: list[_Expiring] = []
        self._has_leftovers = False  # processes that a guard has left were killed, and have not ended yet
        self._silent_clients: list[_Expiring] = []  # clients that have not asked: closed at their time
        self._runs_served = 0
        self._accepts_at = (
            0.0  # when the next client is accepted: late only after an accept() that failed; monotonic seconds
        )
        self._idle_until = time.monotonic() + seconds  # when this process takes no more runs, unless one comes before

    def next_run(self) -> "Any":
        """Wait for the next run, and return the connection that its guard is to serve; exit when no run is to come."""
        # a run may come, or one goes on or is cleaned up
        while self._listener is not None or self.guards or self._ended_guards:
            ready = self._wait()
            if self._children.fd in ready:
                self._children.drain()
                self._on_children_ended()
            self._close_ended_guards()
            if self._listener is not None and self._listener.fileno() in ready:
                self._accept()
            if (connection := self._answer_clients(ready)) is not None:
                return connection
            if not self.guards and time.monotonic() >= self._idle_until:
                self._take_no_more()
        os._exit(0)

    def _wait(self) -> "set[int]":
        """Sleep until a child ends, a client connects or asks, or a time has come; return the ready descriptors."""
        accepts = self._listener is not None and time.monotonic() >= self._accepts_at
        times = [one.until for one in (*self._ended_guards, *self._silent_clients)]
        if self._listener is not None and not accepts:
            times.append(self._accepts_at)
        if self._listener is not None and not self.guards:
            times.append(self._idle_until)
        timeout = max(0.0, min(times) - time.monotonic()) * 1000 if times else None  # ms
        poll = select.poll()  # select() takes no descriptor above 1023, and what was imported may hold all below
        for one in (self._children.fd, *(client.connection for client in self._silent_clients)):
            poll.register(one, select.POLLIN)
        if accepts:
            poll.register(self._listener, select.POLLIN)
        return {fd for fd, _ in poll.poll(timeout)}

    def _close_ended_guards(self) -> None:
        """Close connections of guards that have ended, once no process of theirs is left or their time is up.

        An agent waits for the end of its connection.
        """
        now = time.monotonic()
        if any(ended.until <= now for ended in self._ended_guards):
            self._has_leftovers = self._children.kill(spared={*self.guards, *self._children_of_imports}, may_tidy=False)
        for ended in self._ended_guards[:]:
            if not self._has_leftovers or ended.until <= now:
                self._ended_guards.remove(ended)
                ended.connection.close()

    def close(self) -> None:
        """Close in a guard what belongs to the warm interpreter."""
        self._children.close()
        for one in filter(None, [self._listener, *self._connections()]):
            one.close()

    def _connections(self) -> "list[Any]":
        return [*self.guards.values(), *(one.connection for one in (*self._ended_guards, *self._silent_clients))]

    def _on_children_ended(self) -> None:
        """Reap guards that have ended and kill the processes that they left; each further end calls this again."""
        for pid in [pid for pid in self.guards if os.waitpid(pid, os.WNOHANG)[0]]:
            now = time.monotonic()
            self._ended_guards.append(_Expiring(self.guards.pop(pid), until=now + self.guard.TIDY_TIMEOUT))
            self._idle_until = now + self._idle_limit
        if self._ended_guards or self._has_leftovers:
            self._has_leftovers = self._children.kill(spared={*self.guards, *self._children_of_imports}, may_tidy=True)

    def _accept(self) -> None:
        """Accept a client of this user, which then has some seconds to send its request."""
        try:
            connection = self._socket_module.socket(fileno=self._listener._accept()[0])
            connection.setblocking(False)
            credentials = connection.getsockopt(self._socket_module.SOL_SOCKET, self._socket_module.SO_PEERCRED, 12)
            uid = int.from_bytes(credentials[4:8], sys.byteorder)  # behind the pid, unix(7)
            if uid != os.getuid():
                return  # without a reference, the connection is closed
        except OSError:  # the client has gone again, or there is no room
            self._accepts_at = time.monotonic() + _ACCEPT_AGAIN
            return
        self._silent_clients.append(_Expiring(connection, until=time.monotonic() + _REQUEST_TIMEOUT))
        if len(self._silent_clients) > _MOST_SILENT:
            self._silent_clients.pop(0).connection.close()

    def _answer_clients(self, ready: "set[int]") -> "Any":
        """Answer clients whose descriptors are `ready`, and close them, until one asks for a guard; return that one, else None.

        Close clients that are silent too long.
        """
        now = time.monotonic()
        for client in self._silent_clients[:]:
            if client.connection.fileno() in ready:
                self._silent_clients.remove(client)
                if self._asks_for_guard(client.connection):
                    return client.connection
                client.connection.close()
            elif client.until <= now:
                self._silent_clients.remove(client)
                client.connection.close()
        return None

    def _asks_for_guard(self, connection: "Any") -> bool:
        """Read and answer the request of a client; return whether the client asks for a guard."""
        try:
            # which a client sends whole: this never waits
            kind, fields, descriptors = self.fork_server.receive(connection)
            self.fork_server.close_descriptors([(b"", descriptors)])  # no request that is made here has any
            answer, asks_for_guard = self._answer(kind, os.fsdecode(fields).split("\0")[:-1], connection)
            connection.sendall(os.fsencode(answer))
        except (EOFError, OSError, ValueError):  # the client only looked whether we are there, or sent nonsense
            return False
        connection.settimeout(None)  # a guard waits for requests
        return asks_for_guard

    def _answer(self, kind: str, fields: "list[str]", connection: "Any") -> "tuple[str, bool]":
        """Return the answer to a request, "" to one that is not known, and whether a guard is to serve the connection then."""
        if kind == "status":
            seconds_left = round(self._idle_until - time.monotonic())
            modules = ",".join(self._modules)
            state = os.getpid(), self._runs_served, len(self.guards), seconds_left, sys.executable, modules
            return "\t".join(map(str, state)) + "\n", False
        if kind == "stop":
            self._take_no_more()
            return "ok\n", False
        if kind not in ("check", "guard") or len(fields) != 2 or not fields[0].isdecimal():
            return "", False
        seconds, folder = fields
        if refusal := self._refusal(connection, folder):
            return refusal, False
        self._idle_limit = min(int(seconds), _LONGEST_IDLE)
        self._idle_until = time.monotonic() + self._idle_limit
        if kind == "guard":
            self._runs_served += 1
        if self._has_path():
            os.utime(self._path)  # shows which interpreter was unused for longest, when another is to be started
        return "ok\n", kind == "guard"

    def _refusal(self, connection: "Any", folder: str) -> str:
        """Return the line that says why no guard may serve a script in `folder`, "" if a guard may.

        Take no more runs if no script could be served: workers would share something to their harm (unsafe), or an imported
        file has changed (stale).
        """
        if self._listener is None:
            return "stale it ends with the runs that it serves\n"  # the client connected before it was closed
        our_sockets = {one.fileno() for one in (self._listener, connection, *self._connections())}
        our_children = {*self._children.now()} - self._children_of_imports
        if unsafe := self.imported.why_unsafe(our_sockets, our_children):
            self._take_no_more()
            return f"unsafe {unsafe}\n"
        if stale := self._imported_files.why_stale():
            self._take_no_more()
            return f"stale {stale}\n"
        if unfit := self._imported_files.why_unfit(folder):
            return f"unfit {unfit}\n"
        return ""

    def _take_no_more(self) -> None:
        """Accept no further run, and remove the socket's name; this process exits after its last guard."""
        if self._listener is None:
            return
        self._listener.close()
        self._listener = None
        if self._has_path():
            os.unlink(self._path)

    def _has_path(self) -> bool:
        """Return whether its path still leads to our socket, and not to nothing, or to that of another interpreter."""
        return self._inode is not None and _inode(self._path) == self._inode


def _inode(path: str) -> "int | None":
    """Return the inode of the file at a path; None if there is none."""
    try:
        return os.stat(path).st_ino
    except OSError:  # removed: clients that have connected are still served
        return None


# --- what `ps` shows


class _Title:
    """What `ps` shows of this process; where the kernel allows no change it stays what it was."""

    def __init__(self, name: str, text: str) -> None:
        """Have `ps` show this name and, in place of the command line, as much of this text as fits."""
        self._before: tuple[bytes, int, bytes] | None = None  # name, address of the command line, and that line
        try:
            with open("/proc/self/comm", "rb") as file:
                old_name = file.read().rstrip(b"\n")
            with open("/proc/self/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
            start, end = int(fields[_ARG_START]), int(fields[_ARG_END])
            with open("/proc/self/cmdline", "rb") as file:
                old_line = file.read()
            if len(old_line) != end - start:  # a library shows something else already
                return
            # ends with a zero byte: after a line without one the kernel reads on, into the environment
            new_line = text.encode()[: end - start - 1].ljust(end - start, b"\0")
            _write_title(name.encode(), start, new_line)
            self._before = old_name, start, old_line
        except (OSError, ValueError, IndexError):
            pass

    def restore(self) -> None:
        """Have `ps` show what it showed before."""
        try:
            if self._before is not None:
                _write_title(*self._before)
        except OSError:
            pass


def _write_title(name: bytes, start: int, line: bytes) -> None:
    """Set the name of this process, and write the line where its memory holds the command line, from the address `start`."""
    with open("/proc/self/comm", "wb", buffering=0) as file:
        file.write(name)
    memory = os.open("/proc/self/mem", os.O_WRONLY)
    try:
        os.pwrite(memory, line, start)
    finally:
        os.close(memory)
