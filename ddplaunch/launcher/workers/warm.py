"""Finds, starts and asks the interpreter that is kept warm (its imports made) from run to run; runs in a run's command.

An interpreter listens at a socket in the user's runtime folder. The name of the socket says what a run must have in common with
the interpreter to be served, among that what a process inherits and cannot change later. worker/warm.py is the interpreter
itself, and worker/fork_server.py lists what it is asked. Nothing here waits for its imports.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from ddplaunch import __version__
from ddplaunch.launcher.workers.servers import Guard, ServerLost, packed_request
from ddplaunch.plan import Plan
from ddplaunch.plan.variables import of_warm_interpreter
from ddplaunch.record import run_socket
from ddplaunch.system.process.fork import fork
from ddplaunch.system.process.linux import detach
from ddplaunch.system.words import why_failed

SERVE_VARIABLE = "DDPLAUNCH_WARM"
ANSWER_WITHIN = 1.0  # seconds that an interpreter has to answer, which it does at once unless it imports
LOCK_TIMEOUT = 0.2  # seconds to wait for another run that starts an interpreter
MOST = 4  # that a user has on a machine; each may hold what torch takes of memory
_LOOK_AGAIN = 0.005  # seconds
_PREFIX = ".warm-"  # a hidden name: it is no socket of a run
_LONGEST_ANSWER = 8192  # bytes


class _Command(NamedTuple):
    """How the command of a worker begins; the arguments of the program follow."""

    interpreter: str
    bootstrap: str  # path of our file that runs the program
    kind: str  # "module", or how else the program is given
    program: str

    @classmethod
    def of(cls, plan: Plan) -> _Command:
        return cls(*plan.workers[0].argv[:4])


class CannotKeep(Exception):
    """No interpreter can be kept or used here; the text says why."""


class Interpreter(Struct, frozen=True):
    """An interpreter that fits a run, which is there or is to be."""

    name: str  # of its socket
    seconds: int  # that it is kept unused
    folder: str  # of the script
    is_new: bool = False  # this run has started it


# --- the interpreters that there are


def socket_names() -> Iterator[str]:
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


def ask(name: str, *request: str) -> str:
    """Send a request to an interpreter; return the answer, "" if the interpreter has ended meanwhile.

    Raises: FileNotFoundError or ConnectionRefusedError: there is none; OSError: it does not answer, or is not ours.
    """
    with connect(name) as sock:
        sock.sendall(packed_request(*request))
        with suppress(ConnectionResetError):
            return os.fsdecode(sock.recv(_LONGEST_ANSWER)).rstrip("\n")
    return ""


def guard_at(interpreter: Interpreter, front_pipe: int) -> Guard:
    """Have the interpreter fork a guard for this run; the guard says when it is ready, and keeps `front_pipe` open.

    Raises ServerLost: the interpreter has ended, or does not answer.
    """
    try:
        connection = connect(interpreter.name)
        connection.sendall(packed_request("guard", str(interpreter.seconds), interpreter.folder))
    except OSError as error:
        raise ServerLost(why_failed(error)) from None
    return Guard(connection, front_pipe)


# --- the one that fits a plan


def interpreter_for(plan: Plan, env_of_command: Mapping[str, str]) -> Interpreter:
    """Return the interpreter that fits this plan, whether such a process listens or not; CannotKeep if none may be kept here.

    `env_of_command` are the variables of the command that was typed.
    """
    assert plan.keep_warm is not None
    assert plan.preload is not None
    if os.getpid() == 1:
        raise CannotKeep("it would end with this process, the first of its container")
    if not os.path.exists("/proc/thread-self/children"):
        raise CannotKeep("this kernel has no /proc/PID/task/TID/children")
    with open("/proc/self/status", encoding="utf-8", errors="replace") as file:
        if "\nNoNewPrivs:\t1" in file.read():
            raise CannotKeep("a process that may gain no privileges can be in a sandbox, which the next one is not in")
    command = _Command.of(plan)
    try:
        folder = os.getcwd() if command.kind == "module" else os.path.dirname(os.path.realpath(command.program))
    except OSError:
        raise CannotKeep("the working directory was removed") from None
    if "\n" in folder:  # answers name it, and are lines
        raise CannotKeep("the path of the folder has two lines")
    name = _name_for(command, of_warm_interpreter(env_of_command, plan), plan.preload, folder)
    if name is None:
        raise CannotKeep("it is not known on such a machine how to find all that a process inherits")
    return Interpreter(name=name, seconds=plan.keep_warm, folder=folder)


def _name_for(command: _Command, env: Mapping[str, str], modules: Sequence[str], folder: str) -> str | None:
    """Return the name of the socket of an interpreter that fits: a hash of what has to be equal; None: it cannot be known.

    What has to be equal: the files and version of Python and ddplaunch, variables, modules, and what the process inherited.
    If any of the modules lies beside the script, its folder has to be the same too.
    """
    from_parent = of_this_process()
    if from_parent is None:
        return None
    import hashlib  # most jobs need none

    worker = os.path.dirname(command.bootstrap)  # the folder of our files that run in workers
    ours = (f"{worker}/{name}" for name in sorted(os.listdir(worker)) if name.endswith(".py"))
    files = map(_path_and_identity, (command.interpreter, sys.executable, *ours))
    # relative paths depend on the folder of the command: an interpreter has made them absolute when it started
    paths = [os.path.abspath(path) for path in env["PYTHONPATH"].split(os.pathsep)] if env.get("PYTHONPATH") else []
    is_beside = any(_lies_in(folder, name) for name in modules)
    variables = [f"{name}={value}" for given in (env, from_parent) for name, value in sorted(given.items())]
    of_modules = [folder if is_beside else "", *modules, *paths]
    parts = [__version__, command.interpreter, command.bootstrap, *files, *of_modules, *variables]
    return _PREFIX + hashlib.sha256(b"\0".join(map(os.fsencode, parts))).hexdigest()[:32]


def _lies_in(folder: str, module: str) -> bool:
    """Whether a module, or its package, lies in this folder."""
    stem = f"{folder}/{module.partition('.')[0]}"
    return os.path.exists(stem) or os.path.exists(f"{stem}.py")


def _path_and_identity(path: str) -> str:
    """Return the path with what changes once another file is there: time, size and inode."""
    try:
        found = os.stat(path)
    except OSError:  # a name that is looked for on PATH
        return path
    return f"{path} {found.st_mtime_ns} {found.st_size} {found.st_ino}"


def prepare(plan: Plan, env_of_command: Mapping[str, str]) -> tuple[Interpreter, str]:
    """Find or start the interpreter for a plan; return it, and why an older interpreter was not used, or "".

    To be called before this process becomes a subreaper: the interpreter is to be no descendant of any run, and to outlive this
    one.

    Raises CannotKeep: no interpreter can serve the plan, nor be started.
    """
    interpreter = interpreter_for(plan, env_of_command)
    why_older_ends = ""
    try:
        answer = ask(interpreter.name, "check", str(interpreter.seconds), interpreter.folder)
        what, _, text = answer.partition(" ")
        if what == "ok":
            return interpreter, ""
        if what == "unfit":  # it can serve other runs, and stays
            raise CannotKeep(text)
        why_older_ends = text  # "stale ..." or "unsafe ...": it ends, and makes room for a new one
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
                _start(interpreter, plan, env_of_command)
    except OSError as error:
        raise CannotKeep(why_failed(error)) from None
    return replace(interpreter, is_new=True), why_older_ends


@contextmanager
def _lock() -> Iterator[None]:
    """Hold the lock under which runs start interpreters, so that no two start the same one. OSError: it is not free in time."""
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
    """Make room for one more interpreter: remove sockets of those that were killed; if MOST are left, tell the oldest to end.

    The oldest is the one that was used least recently; where it serves runs, it ends with the last of them.
    """
    folder = run_socket.runtime_folder(os.getuid())
    used_at: dict[str, int] = {}  # by name: each run that connects to a socket sets its time, in nanoseconds
    for name in socket_names():
        with suppress(OSError):
            try:
                connect(name).close()
            except ConnectionRefusedError:
                run_socket.remove_refusing(folder, name)
                continue
            except OSError:
                pass  # it is there, and busy
            used_at[name] = os.stat(f"{folder}/{name}").st_mtime_ns
    oldest_first = sorted(used_at, key=lambda name: used_at[name])
    surplus = max(len(oldest_first) - (MOST - 1), 0)
    for name in oldest_first[:surplus]:
        with suppress(OSError), connect(name) as sock:
            sock.sendall(packed_request("stop"))  # and waits for no answer: it may import still


def _start(interpreter: Interpreter, plan: Plan, env_of_command: Mapping[str, str]) -> None:
    """Start an interpreter that already listens, as a child of process 1, or of what adopts orphans here."""
    folder = run_socket.open_runtime_folder()
    listener = socket.socket(socket.AF_UNIX)
    try:
        run_socket.listen(listener, folder, interpreter.name)
        path = f"{run_socket.runtime_folder(os.getuid())}/{interpreter.name}"
        # the interpreter finds its listening socket as descriptor 3, where `detach` puts it
        served = ",".join([path, "3", str(interpreter.seconds), *(plan.preload or ())])
        argv, env = [*_Command.of(plan)], {**of_warm_interpreter(env_of_command, plan), SERVE_VARIABLE: served}
        pid = fork()
        if pid == 0:  # this child ends at once, which makes an orphan of its own child
            try:
                if fork() == 0:
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


_NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "time", "user", "uts", "pid_for_children", "time_for_children")
# each with the words for a process that has other ones
_FILES = {
    "cgroup": "another control group",
    "limits": "other resource limits (ulimit)",
    "oom_score_adj": "another OOM score adjustment (choom)",
    "loginuid": "another login user (loginuid)",
    "sessionid": "another audit session (sessionid)",
    "attr/current": "another security context (AppArmor profile, SELinux label)",
    "coredump_filter": "another core dump filter",
    "personality": "another execution domain (setarch)",
}
_STATUS_LINES = {
    "Uid": "another user",
    "Gid": "another group",
    "Groups": "other supplementary groups",
    **dict.fromkeys(("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"), "other capabilities"),
    "NoNewPrivs": "another no_new_privs",
    **dict.fromkeys(("Seccomp", "Seccomp_filters"), "other seccomp filters"),
    **dict.fromkeys(("Speculation_Store_Bypass", "SpeculationIndirectBranch"), "another speculation control"),
    "THP_enabled": "another setting of transparent huge pages",
    "Cpus_allowed": "other CPUs (taskset, cpuset)",
    "Mems_allowed": "other memory nodes (numactl, cpuset)",
}
# what another value of each means
WORDS = {
    **_FILES,
    **_STATUS_LINES,
    **{f"ns/{name}": f"another {name.removesuffix('_for_children')} namespace" for name in _NAMESPACES},
    "root": "another root directory (chroot)",
    "scheduling": "another priority or scheduling policy (nice, chrt)",
}
# fields of /proc/PID/stat, counted from the state, which follows the name: priority, nice; rt_priority, policy
_SCHEDULING_FIELDS = slice(15, 17), slice(37, 39)
# linux/prctl.h: securebits, timer slack, THP, memory-deny-write-execute, memory merging
_PRCTL_OPTIONS = (27, 30, 42, 66, 68)


class _Calls(NamedTuple):
    """The numbers of system calls (unistd.h) that libc has no functions for."""

    keyctl: int
    get_mempolicy: int
    ioprio_get: int


_CALLS: Mapping[str, _Calls] = {"x86_64": _Calls(250, 239, 252), "aarch64": _Calls(219, 236, 31)}
_GET_KEYRING_ID, _SESSION_KEYRING = 0, ctypes.c_int(-3)  # linux/keyctl.h
_PROCESS = 1  # linux/ioprio.h: of one process; the pid 0 is this one
_MOST_NODES = 1024  # of memory


def shown_by_proc(pid: int) -> dict[str, str]:
    """Return what /proc shows of one of our processes, by name (proc(5)), to compare two; "" for what it does not show."""
    found = {name: _read(f"/proc/{pid}/{name}") for name in _FILES}
    for name in (*(f"ns/{name}" for name in _NAMESPACES), "root"):
        try:
            found[name] = os.readlink(f"/proc/{pid}/{name}")
        except OSError:
            found[name] = ""
    lines = dict(line.partition(":")[::2] for line in _read(f"/proc/{pid}/status").splitlines())  # "NAME:\tVALUE"
    found |= {name: lines.get(name, "").strip() for name in _STATUS_LINES}
    fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()  # "PID (NAME) STATE ..."
    return {**found, "scheduling": " ".join(" ".join(fields[part]) for part in _SCHEDULING_FIELDS)}


def check_same(pid: int) -> None:
    """Raise ServerLost unless a process has inherited what this one has, as far as /proc shows it, and still lives."""
    ours, theirs = shown_by_proc(os.getpid()), shown_by_proc(pid)
    different = [name for name, value in ours.items() if theirs[name] != value]
    if different:
        raise ServerLost(f"it has {WORDS[different[0]]}")


def of_this_process() -> dict[str, str] | None:
    """Return everything that a child of this process inherits, by name; None on machines whose system calls are unknown.

    The values are only compared: of a call that the kernel does not have, each process gets the same error.
    """
    calls = _CALLS.get(platform.machine())
    if calls is None:
        return None
    libc = ctypes.CDLL(None)
    mode, nodes = ctypes.c_int(), (ctypes.c_ulong * (_MOST_NODES // 64))()  # a bit for each node of memory
    libc.syscall(calls.get_mempolicy, ctypes.byref(mode), nodes, ctypes.c_ulong(_MOST_NODES), None, ctypes.c_ulong(0))
    ignored = [signum for signum in signal.valid_signals() if signal.getsignal(signum) is signal.SIG_IGN]
    return {
        **shown_by_proc(os.getpid()),
        "prctl": str([libc.prctl(option, 0, 0, 0, 0) for option in _PRCTL_OPTIONS]),
        "keyring": str(libc.syscall(calls.keyctl, _GET_KEYRING_ID, _SESSION_KEYRING, 0)),
        "memory": f"{mode.value} {[*nodes]}",
        "ioprio": str(libc.syscall(calls.ioprio_get, _PROCESS, 0)),
        "ignored": str(sorted(map(int, ignored))),
    }


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read()
    except OSError:
        return ""
