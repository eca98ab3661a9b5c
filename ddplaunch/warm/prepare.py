"""Finds the interpreter that is kept warm for runs like this one, or starts it. Waits for no imports."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from ddplaunch.plan import Plan
from ddplaunch.plan.variables import of_warm_interpreter
from ddplaunch.process.linux import detach
from ddplaunch.runlog import run_socket
from ddplaunch.warm import find
from ddplaunch.words import why_failed

VARIABLE = "DDPLAUNCH_WARM"
LOCK_TIMEOUT = 0.2  # seconds
_LOOK_AGAIN = 0.005  # seconds
_PROGRAM = slice(0, 4)  # of a worker's command: interpreter, bootstrap, kind of program, and program


class CannotKeep(Exception):
    """No interpreter can be kept or used here; the text says why."""


def place_of(plan: Plan, caller: Mapping[str, str]) -> find.Place:
    """Return where an interpreter listens, or would listen, that fits this plan.

    Raises:
        CannotKeep: none may be kept here.
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
    argv = plan.workers[0].argv
    try:
        folder = os.getcwd() if argv[2] == "module" else os.path.dirname(os.path.realpath(argv[3]))
    except OSError:
        raise CannotKeep("the working directory was removed") from None
    if "\n" in folder:
        raise CannotKeep("the path of the folder has two lines")
    name = find.name_for(argv, of_warm_interpreter(caller, plan), plan.preload, folder)
    if name is None:
        raise CannotKeep("it is not known on such a machine how to find all that a process inherits")
    return find.Place(name, plan.keep_warm, folder)


def prepare(plan: Plan, caller: Mapping[str, str]) -> tuple[find.Place, str]:
    """Find it, or start it; give where it is, and why one that was there is not used, "" if there was none or it is.

    To be called before this process becomes a subreaper: it is to be no descendant of any run, and to outlive this one.

    Raises:
        CannotKeep: there is none, and will be none.
    """
    place = place_of(plan, caller)
    why = ""
    try:
        why = find.ask(place.name, f"check {place.seconds} {place.folder}")
        if why == "ok":
            return place, ""
        if why.startswith("unfit "):
            raise CannotKeep(why.partition(" ")[2])
    except (FileNotFoundError, ConnectionRefusedError):
        pass
    except OSError as error:
        raise CannotKeep(f"the one that is there does not answer: {why_failed(error)}") from None
    try:
        with _lock():
            try:
                find.connect(place.name).close()  # another run was faster
            except (FileNotFoundError, ConnectionRefusedError):
                find.remove_ended()
                find.make_room()
                _start(place, plan, caller)
    except OSError as error:
        raise CannotKeep(why_failed(error)) from None
    return find.Place(place.name, place.seconds, place.folder, is_new=True), why.partition(" ")[2]


@contextmanager
def _lock() -> Iterator[None]:
    """Let no other run start one meanwhile."""
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


def _start(place: find.Place, plan: Plan, caller: Mapping[str, str]) -> None:
    """Start one as a child of process 1, or of what adopts orphans here."""
    folder = run_socket.open_runtime_folder()
    listener = socket.socket(socket.AF_UNIX)
    try:
        run_socket.listen(listener, folder, place.name)
        path = f"{run_socket.runtime_folder(os.getuid())}/{place.name}"
        pid = os.fork()
        if pid == 0:
            try:
                if os.fork() == 0:
                    _become(path, listener.fileno(), place, plan, caller)
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
    finally:
        listener.close()
        os.close(folder)


def _become(path: str, listener: int, place: find.Place, plan: Plan, caller: Mapping[str, str]) -> None:
    detach(listener)
    for signum in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and exec keeps that
        signal.signal(signum, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    given = ",".join([path, "3", str(place.seconds), *(plan.preload or ())])
    argv = plan.workers[0].argv[_PROGRAM]
    os.execvpe(argv[0], argv, {**of_warm_interpreter(caller, plan), VARIABLE: given})
