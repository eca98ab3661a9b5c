"""The interpreter that is kept warm from run to run, and what one must have in common with a run to serve it.

Commands find its socket, start one where there is none, and ask it. Nothing here waits for its imports.
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from msgspec import Struct
from msgspec.structs import replace

from ddplaunch import __version__
from ddplaunch.launcher.workers import inherited
from ddplaunch.launcher.workers.servers import Guard, ServerLost
from ddplaunch.plan import Plan
from ddplaunch.plan.variables import of_warm_interpreter
from ddplaunch.record import run_socket
from ddplaunch.system.process.fork import fork
from ddplaunch.system.process.linux import detach
from ddplaunch.system.words import why_failed

VARIABLE = "DDPLAUNCH_WARM"
ANSWER_WITHIN = 1.0  # seconds
LOCK_TIMEOUT = 0.2  # seconds
MOST = 4  # that a user has on a machine; each may hold what torch takes of memory
_LOOK_AGAIN = 0.005  # seconds
_PREFIX = ".warm-"  # a hidden name: it is no socket of a run
_LONGEST_ANSWER = 8192  # bytes
_PROGRAM = slice(0, 4)  # of a worker's command: interpreter, bootstrap, kind of program, and program


class CannotKeep(Exception):
    """No interpreter can be kept or used here; the text says why."""


class Interpreter(Struct, frozen=True):
    """An interpreter that fits a run, which is there or is to be."""

    name: str  # of its socket
    seconds: int  # that it is kept unused
    folder: str  # of the script
    is_new: bool = False  # this run has started it


# --- the interpreters that there are


def names() -> Iterator[str]:
    """Return the names of the sockets of all interpreters that are kept warm for this user."""
    with suppress(OSError):
        folder = run_socket.open_runtime_folder()
        try:
            yield from sorted(name for name in os.listdir(folder) if name.startswith(_PREFIX))
        finally:
            os.close(folder)


def connect(name: str) -> socket.socket:
    """Connect to the interpreter with this socket.

    Raises:
        FileNotFoundError, ConnectionRefusedError: there is none.
        OSError: it does not answer, or is not ours.
    """
    folder = run_socket.open_runtime_folder()
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.setblocking(False)  # an interpreter whose queue is full does not answer in time either
        sock.connect(run_socket.address(folder, name))
        if run_socket.uid_of(sock) != os.getuid():
            raise PermissionError("its socket is another user's")
        sock.settimeout(ANSWER_WITHIN)
    except OSError:
        sock.close()
        raise
    finally:
        os.close(folder)
    return sock


def ask(name: str, line: str) -> str:
    """Send a line to an interpreter; return the answer, "" if the interpreter has ended meanwhile.

    Raises: as `connect`.
    """
    with connect(name) as sock:
        sock.sendall(os.fsencode(line) + b"\n")
        with suppress(ConnectionResetError):
            return os.fsdecode(sock.recv(_LONGEST_ANSWER)).rstrip("\n")
    return ""


def guard_at(interpreter: Interpreter, output: int) -> Guard:
    """Have the interpreter fork a guard for this run; the guard says when it is ready. `output` is as for `Guard`.

    Raises:
        ServerLost: the interpreter has ended, or does not answer.
    """
    try:
        connection = connect(interpreter.name)
        connection.sendall(os.fsencode(f"guard {interpreter.seconds} {interpreter.folder}\n"))
    except OSError as error:
        raise ServerLost(why_failed(error)) from None
    return Guard(connection, output, inherited.check_same)


# --- the one that fits a plan


def interpreter_for(plan: Plan, caller: Mapping[str, str]) -> Interpreter:
    """Return the interpreter that fits this plan, whether such a process listens or not; CannotKeep if none may be kept here."""
    assert plan.keep_warm is not None
    assert plan.preload is not None
    if os.getpid() == 1:
        raise CannotKeep("it would end with this process, the first of its container")
    if not os.path.exists("/proc/thread-self/children"):
        raise CannotKeep("this kernel has no /proc/PID/task/TID/children")
    with open("/proc/self/status", encoding="utf-8", errors="replace") as file:
        if "\nNoNewPrivs:\t1" in file.read():
            raise CannotKeep("a process that may gain no privileges can be in a sandbox, which the next one is not in")
    argv = plan.workers[0].argv
    try:
        folder = os.getcwd() if argv[2] == "module" else os.path.dirname(os.path.realpath(argv[3]))
    except OSError:
        raise CannotKeep("the working directory was removed") from None
    if "\n" in folder:
        raise CannotKeep("the path of the folder has two lines")
    name = _name_for(argv, of_warm_interpreter(caller, plan), plan.preload, folder)
    if name is None:
        raise CannotKeep("it is not known on such a machine how to find all that a process inherits")
    return Interpreter(name, plan.keep_warm, folder)


def _name_for(argv: Sequence[str], env: Mapping[str, str], modules: Sequence[str], folder: str) -> str | None:
    """Return the name of the socket of an interpreter that fits: a hash of what has to be equal; None: it cannot be known.

    What has to be equal: the program and version of Python and ddplaunch, variables, modules, and what the process inherited.
    If any of the modules lies beside the script, its folder has to be the same too.
    """
    here = inherited.of_this_process()
    if here is None:
        return None
    import hashlib  # most jobs need none

    bootstrap = os.path.dirname(argv[1])
    ours = (f"{bootstrap}/{name}" for name in sorted(os.listdir(bootstrap)) if name.endswith(".py"))
    # the interpreter has made these absolute when it started
    paths = [os.path.abspath(path) for path in env["PYTHONPATH"].split(os.pathsep)] if env.get("PYTHONPATH") else []
    is_beside = any(_lies_in(folder, name) for name in modules)
    parts = [folder if is_beside else "", __version__, *argv[:2], *map(_stamp, (argv[0], sys.executable, *ours))]
    parts += [*modules, *paths, *(f"{name}={value}" for some in (env, here) for name, value in sorted(some.items()))]
    return _PREFIX + hashlib.sha256(b"\0".join(map(os.fsencode, parts))).hexdigest()[:32]


def _lies_in(folder: str, module: str) -> bool:
    """Whether a module, or its package, lies in this folder."""
    stem = f"{folder}/{module.partition('.')[0]}"
    return os.path.exists(stem) or os.path.exists(f"{stem}.py")


def _stamp(path: str) -> str:
    """Return the path with what changes once another file is there."""
    try:
        found = os.stat(path)
    except OSError:  # a name that is looked for on PATH
        return path
    return f"{path} {found.st_mtime_ns} {found.st_size} {found.st_ino}"


def prepare(plan: Plan, caller: Mapping[str, str]) -> tuple[Interpreter, str]:
    """Find or start the interpreter for a plan; return it, and why an older interpreter was not used, or "".

    To be called before this process becomes a subreaper: the interpreter is to be no descendant of any run, and to outlive this
    one.

    Raises:
        CannotKeep: no interpreter can serve the plan, nor be started.
    """
    interpreter = interpreter_for(plan, caller)
    why = ""  # for which an older one ends: "stale ...", "unsafe ..."
    try:
        why = ask(interpreter.name, f"check {interpreter.seconds} {interpreter.folder}")
        if why == "ok":
            return interpreter, ""
        if why.startswith("unfit "):
            raise CannotKeep(why.partition(" ")[2])
    except (FileNotFoundError, ConnectionRefusedError):
        pass  # there is none
    except OSError as error:
        raise CannotKeep(f"the one that is there does not answer: {why_failed(error)}") from None
    try:
        with _lock():
            try:
                connect(interpreter.name).close()  # another run was faster
            except (FileNotFoundError, ConnectionRefusedError):
                _make_room()
                _start(interpreter, plan, caller)
    except OSError as error:
        raise CannotKeep(why_failed(error)) from None
    return replace(interpreter, is_new=True), why.partition(" ")[2]


@contextmanager
def _lock() -> Iterator[None]:
    """Hold the lock under which runs start interpreters, so that two runs do not start the same one."""
    folder = run_socket.open_runtime_folder(make=True)
    until = time.monotonic() + LOCK_TIMEOUT
    try:
        while True:
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= until:
                    raise
                time.sleep(_LOOK_AGAIN)
        yield
    finally:
        os.close(folder)


def _make_room() -> None:
    """Remove sockets of interpreters that were killed; if MOST are left, end those that were used longest ago.

    An interpreter that serves a run ends with its last run.
    """
    folder, used_at = run_socket.runtime_folder(os.getuid()), {}
    for name in names():
        with suppress(OSError):
            try:
                connect(name).close()
            except ConnectionRefusedError:
                run_socket.remove_refusing(folder, name)
                continue
            except OSError:
                pass  # it is there, and busy
            used_at[name] = os.stat(f"{folder}/{name}").st_mtime_ns
    for name in sorted(used_at, key=lambda name: used_at[name])[: 1 - MOST]:  # room for one more
        with suppress(OSError), connect(name) as sock:
            sock.sendall(b"stop\n")  # and waits for no answer: it may import still


def _start(interpreter: Interpreter, plan: Plan, caller: Mapping[str, str]) -> None:
    """Start an interpreter as a child of process 1, or of what adopts orphans here."""
    folder = run_socket.open_runtime_folder()
    listener = socket.socket(socket.AF_UNIX)
    try:
        run_socket.listen(listener, folder, interpreter.name)
        path = f"{run_socket.runtime_folder(os.getuid())}/{interpreter.name}"
        # the other end of the socket is 3, where `detach` puts it
        served = ",".join([path, "3", str(interpreter.seconds), *(plan.preload or ())])
        argv, env = plan.workers[0].argv[_PROGRAM], {**of_warm_interpreter(caller, plan), VARIABLE: served}
        pid = fork()
        if pid == 0:
            try:
                if fork() == 0:  # an orphan at once, so that process 1 adopts it
                    detach(listener.fileno())
                    for signum in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and exec keeps that
                        signal.signal(signum, signal.SIG_DFL)
                    signal.pthread_sigmask(signal.SIG_SETMASK, ())
                    os.execvpe(argv[0], argv, env)
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
    finally:
        listener.close()
        os.close(folder)
