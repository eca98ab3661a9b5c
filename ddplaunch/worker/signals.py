"""Handles the two real-time signals by which the agent looks into a worker while the program runs.

At one, faulthandler writes all stacks to a file of the agent's. That works while the GIL is held in C, needs no thread, and holds
for forked children too. At the other, the main thread asks the agent for a client of `ddplaunch attach` or `profile`, and opens a
debugger or a profile for it; until then it costs a handler. A profile sends this signal to the main thread, too.

A program that takes one of these signals for itself keeps it. The agent learns of that by the file for stacks, which both have
open: for the first signal the worker closes the file. For the second, the file's permissions say whether a debugger can get in:
the worker takes them from others once our handler is there, and from the group once the handler is replaced.
"""

import atexit
import faulthandler
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType, ModuleType
    from typing import Any

STACKS_FILE = "/memfd:ddplaunch-stacks"  # how /proc shows the agent's file for stacks
OF_OTHERS, OF_GROUP = 0o006, 0o060  # permissions of that file
PROFILE = b"P"  # the wish of a client that wants a profile, and no debugger


def offer_stacks(fd: int, signum: int) -> None:
    """Have faulthandler write all stacks to the file `fd` at this signal, until the program takes the signal for itself."""
    try:
        if not is_file_for_stacks(fd):  # under a low limit of open files the agent could not give us its file
            return
        os.set_inheritable(fd, False)
        if is_caught(signum):  # a .pth file or sitecustomize has it
            os.close(fd)
            return
        faulthandler.register(signum, file=fd)
    except Exception:  # noqa: BLE001 - the program does without it
        return

    def close_file() -> None:
        """Tell the agent that the program has taken the signal."""
        try:
            if is_file_for_stacks(fd):
                os.close(fd)
        except OSError:  # the program has closed it
            pass

    # not in `signal`: Python's own `signal.signal` calls that of `_signal` by its name
    for module, name in ((sys.modules["_signal"], "signal"), (faulthandler, "register"), (faulthandler, "unregister")):
        setattr(module, name, followed_by(close_file, getattr(module, name), signum))


def offer_debugger(fd: int, signum: int, address: str, load_sibling: "Callable[[str], ModuleType]") -> None:
    """Have a debugger, or a profile, open at this signal for the client that the agent at `address` gives us.

    `fd` is the file for stacks.
    """
    _signal: Any = sys.modules["_signal"]
    handler = _ClientHandler(signum, address, load_sibling)
    try:
        if is_caught(signum):  # a .pth file or sitecustomize has it
            return
        _signal.signal(signum, handler.on_signal)
        atexit.register(ignore_at_exit, handler, _signal.signal)
        os.register_at_fork(after_in_child=handler.forget)
    except Exception:  # noqa: BLE001 - the program does without it
        return

    def take_permissions(bits: int) -> None:
        """Take these from the file for stacks, which tells the agent: OF_OTHERS, that our handler is there; OF_GROUP, no more."""
        try:
            if os.getpid() == handler.worker and is_file_for_stacks(fd):
                os.fchmod(fd, os.fstat(fd).st_mode & 0o777 & ~bits)
        except OSError:
            pass

    take_permissions(OF_OTHERS)
    # when the program sets a handler of its own for the signal
    _signal.signal = followed_by(lambda: take_permissions(OF_OTHERS | OF_GROUP), _signal.signal, signum)


class _ClientHandler:
    """The handler of the second signal in a worker: opens a debugger or a profile for the client that the agent has for it."""

    def __init__(self, signum: int, address: str, load_sibling: "Callable[[str], ModuleType]") -> None:
        self.signum = signum
        self.worker = os.getpid()
        self._address = address  # the agent's
        self._load_sibling = load_sibling
        self._client: Any = None  # of the debugger that is open, or was open last
        self._profile: Any = None  # that is open, or was open last

    def on_signal(self, _signum: int, frame: "FrameType | None") -> None:
        """Open what the agent's client wants; `frame` is the interrupted one. In a forked child, do nothing.

        While a debugger or a profile is open, the signal is meant for that.
        """
        if os.getpid() != self.worker:
            return
        if self._client is not None and self._client.is_open:
            self._client.leave_if_hung_up()
            return
        if self._profile is not None and self._profile.on_signal(frame):
            return  # the thread of the profile has sent it, and not the agent
        session: Any = None
        try:
            met = self._load_sibling("asking").fetch_client(self._address)
            if met is None:
                return
            wish, sock, agent = met
            if wish == PROFILE:
                agent.close()
                # the one that is open, if there is one: the client is refused then
                self._profile = self._load_sibling("profiler").begin(sock, self._profile, self.signum)
            else:
                debugger = self._load_sibling("debugger")
                client = debugger.Client(sock, agent)
                session, self._client = debugger.Session(client), client
        except Exception:  # noqa: BLE001 - such as files of another version: the program goes on
            return
        if session is not None:
            session.open_at(frame)  # not in the `try`: what a user raises in the debugger is the program's

    def forget(self) -> None:
        """Leave debugger and profile to the worker, in a child that it has forked."""
        for each in (self._client, self._profile):
            if each is not None:
                each.forget()


def ignore_at_exit(handler: _ClientHandler, set_signal: "Callable[..., Any]") -> None:
    """Ignore the handler's signal from now on: an interpreter that ends restores the default action, and this one would kill."""
    _signal: Any = sys.modules["_signal"]
    if _signal.getsignal(handler.signum) == handler.on_signal:  # the program has not taken the signal
        set_signal(handler.signum, _signal.SIG_IGN)


def is_caught(signum: int) -> bool:
    """Whether this process has a handler for a signal, perhaps one in C that Python does not know, as faulthandler's are."""
    with open("/proc/self/status", "rb") as file:
        caught = next(line for line in file if line.startswith(b"SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (signum - 1) & 1)


def is_file_for_stacks(fd: int) -> bool:
    """Whether this descriptor is the agent's file for stacks, and not one that the program has opened since."""
    return os.readlink(f"/proc/self/fd/{fd}").startswith(STACKS_FILE)


def followed_by(then: "Callable[[], None]", original: "Callable[..., Any]", signum: int) -> "Callable[..., Any]":
    """Return a function like `original` that calls `then` afterwards if its first argument is this signal."""

    def function(*args: "Any", **keywords: "Any") -> "Any":
        found = original(*args, **keywords)
        if (args[0] if args else keywords.get("signum")) == signum:
            then()
        return found

    function.__name__ = function.__qualname__ = original.__name__
    function.__doc__ = original.__doc__
    function.__module__ = original.__module__
    return function
