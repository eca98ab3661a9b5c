"""Keeps an interpreter that has imported once for the runs to come, for a while: forks a guard (guard.py) for each of them.

It is started with the command of a worker and one variable: the path and the descriptor of a socket, the seconds that it is
kept unused, and what it imports. A connection, of the same user only, begins with one line:

    check SECONDS FOLDER    answered by `ok`, by `unfit WHY`, or by `stale WHY` or `unsafe WHY`: then it takes no more, and ends
                            with the last guard. FOLDER is that of the script, SECONDS are those that it is kept unused
    guard SECONDS FOLDER    answered alike; after `ok` a guard serves the connection
    status                  answered by pid, runs, running guards, seconds left, interpreter and modules, with tabs between
    stop                    answered by `ok`; it ends with the last guard

It does not serve with what fork_server.py refuses to fork with, nor after a file that was imported has changed.
"""

import os
import sys

before = set(sys.modules)
import select  # noqa: E402
import time  # noqa: E402

for name in set(sys.modules) - before:
    del sys.modules[name]  # the program finds what `modules` import, and nothing of ours

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_ACCEPT_AGAIN = 0.1  # seconds after there was no room for a connection, which is still there then
_BACKLOG = 64
_IMPORTS_WITHIN = 600  # seconds
_LINE_TIMEOUT = 5.0  # seconds that a client has for its line, which it sends with its connection
_MOST_SILENT = 64  # clients whose line is waited for; one more, and the first of them has to go
_LONGEST = 86400  # seconds that it is kept unused
_LONGEST_LINE = 8192  # bytes


def serve(load: "Callable[[str], dict[str, Any]]", path: str, number: str, seconds: str, *modules: str) -> "list[str]":
    """Import, then serve until no run has come for so long; return its arguments in each worker."""
    began = time.time_ns()
    server, guard, become, names = load("fork_server"), load("guard"), load("forked")["become"], load("imported")
    socket = server["_socket"]
    listener = socket.socket(fileno=int(number))
    inode = _inode(path)
    listener.listen(_BACKLOG)  # again: from now on the kernel names this process to who connects
    listener.settimeout(0)
    program = sys.argv[1:3]
    guard["_signal"].alarm(_IMPORTS_WITHIN)  # which ends this process: nobody else would
    imported = names["Imported"](modules, *program)
    guard["_signal"].alarm(0)
    files = load("imported_files")["ImportedFiles"](began, names["folder_of"](*program))
    imported.leave_folder()
    guard["adopt"]()  # what the workers of a guard have started that was killed
    children = guard["Children"]()
    warm = _Warm(socket, path, inode, listener, int(seconds), modules, imported, files, children, guard["KILL_TIMEOUT"])
    while True:
        connection = warm.next_run()
        try:
            pid = os.fork()
        except OSError:  # the agent finds it closed, and does without
            connection.close()
            continue
        if pid == 0:
            warm.close()
            return guard["serve"](connection, server, imported, become)  # type: ignore[no-any-return]
        warm.guards[pid] = connection


class _Warm:
    def __init__(
        self,
        socket: "Any",
        path: str,
        inode: int,
        listener: "Any",
        seconds: int,
        modules: "tuple[str, ...]",
        imported: "Any",
        files: "Any",
        children: "Any",
        kill_timeout: float,
    ) -> None:
        self._socket = socket
        self._path = path
        self._inode = inode
        self._listener = listener
        self._seconds = seconds
        self._modules = modules
        self._imported = imported
        self._files = files
        self._children = children
        self._kill_timeout = kill_timeout
        self._of_imports = {*children.now()}  # every other child is a guard, or was left by one
        # connections of guards that have left something, and when they are closed at the latest
        self._lost: list[tuple[float, Any]] = []
        self._has_left = False  # something that a guard has left was killed, and has not ended yet
        self._silent: list[tuple[float, Any]] = []  # clients whose line has not come, and when they have to go
        self._runs = 0
        self._accepts_at = 0.0  # monotonic
        self._until = time.monotonic() + seconds
        self.guards: dict[int, Any] = {}  # pid -> connection, which is kept open until nothing is left of the run

    def next_run(self) -> "Any":
        """Wait for the next run, and give the connection that its guard is to serve; end when there is to be none."""
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
                self._look()
            self._close_lost()
            if listens and self._listener.fileno() in ready:
                self._accept()
            if (connection := self._run_of(ready)) is not None:
                return connection
            if not self.guards and time.monotonic() >= self._until:
                self._take_no_more()
        os._exit(0)

    def close(self) -> None:
        """Leave nothing of this process to a guard."""
        self._children.close()
        for one in filter(None, [self._listener, *self._connections()]):
            one.close()

    def _connections(self) -> "list[Any]":
        return [*self.guards.values(), *(connection for _, connection in (*self._lost, *self._silent))]

    def _look(self) -> None:
        """Reap guards that have ended, and kill what one has left: each end brings us here again, with what was below."""
        for pid in [pid for pid in self.guards if os.waitpid(pid, os.WNOHANG)[0]]:
            now = time.monotonic()
            self._lost.append((now + self._kill_timeout, self.guards.pop(pid)))
            self._until = now + self._seconds
        if self._lost or self._has_left:
            self._has_left = self._children.kill(but_for={*self.guards, *self._of_imports})

    def _close_lost(self) -> None:
        """Close connections of guards of which nothing is left, for which the agent waits; others in time."""
        now = time.monotonic()
        for lost in [lost for lost in self._lost if not self._has_left or lost[0] <= now]:
            self._lost.remove(lost)
            lost[1].close()

    def _accept(self) -> None:
        """Take a connection, whose line is waited for."""
        try:
            connection = self._socket.socket(fileno=self._listener._accept()[0])
            connection.setblocking(False)
            if not self._is_ours(connection):
                return
        except OSError:  # it has gone again, or there is no room
            self._accepts_at = time.monotonic() + _ACCEPT_AGAIN
            return
        self._silent.append((time.monotonic() + _LINE_TIMEOUT, connection))
        if len(self._silent) > _MOST_SILENT:
            self._silent.pop(0)[1].close()

    def _run_of(self, ready: "set[int]") -> "Any":
        """Answer clients whose line has come; give the first that a guard is to serve. The line of others may come later."""
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
        try:
            line = connection.recv(_LONGEST_LINE)
            what, _, rest = os.fsdecode(line).rstrip("\n").partition(" ")
            answer, is_run = self._answer(what, rest, connection)
            connection.sendall(os.fsencode(answer))
        except (OSError, ValueError):  # it has gone, or asks with what is no number or path
            return False
        connection.settimeout(None)
        return is_run

    def _is_ours(self, connection: "Any") -> bool:
        peer = connection.getsockopt(self._socket.SOL_SOCKET, self._socket.SO_PEERCRED, 12)  # pid, uid, gid: unix(7)
        return int.from_bytes(peer[4:8], sys.byteorder) == os.getuid()

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
        if (
            what not in ("check", "guard") or not seconds.isdecimal()
        ):  # an empty line: it was only looked whether we are there
            return "", False
        if self._listener is None:  # it has connected before that was closed
            return "stale it ends with the runs that it serves\n", False
        ours = {one.fileno() for one in (self._listener, connection, *self._connections())}
        if why := self._imported.why_unsafe(ours, {*self._children.now()} - self._of_imports):
            answer = f"unsafe {why}\n"
        elif why := self._files.why_stale():
            answer = f"stale {why}\n"
        elif why := self._files.why_unfit(folder):
            return f"unfit {why}\n", False
        else:
            self._seconds = min(int(seconds), _LONGEST)
            self._until = time.monotonic() + self._seconds
            self._runs += what == "guard"
            if _inode(self._path) == self._inode:
                os.utime(self._path)  # who starts another sees by it which was taken longest ago
            return "ok\n", what == "guard"
        self._take_no_more()
        return answer, False

    def _take_no_more(self) -> None:
        """Let runs to come find nobody; end when the last guard has."""
        if self._listener is None:
            return
        self._listener.close()
        self._listener = None
        if self._inode and _inode(self._path) == self._inode:
            os.unlink(self._path)


def _inode(path: str) -> int:
    try:
        return os.stat(path).st_ino
    except OSError:  # somebody has removed it: who has connected is served
        return 0
