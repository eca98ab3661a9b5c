"""The two real-time signals by which the agent looks into this process while the program runs.

At one, faulthandler writes all stacks to a file of the agent's. That works while the GIL is held in C, needs no thread, and holds
for forked children too. At the other, the main thread asks the agent for a client of `ddplaunch attach` or `profile`, and opens a
debugger or a profile for it; until then it costs a handler. A profile sends this signal to the main thread, too.

A program that takes one of them for itself keeps it. The agent learns of it by the file for stacks: for the first signal the file
is closed. For the second, its mode says whether a debugger can get in: others lose access once our handler is there, and the
group once it is replaced.
"""

import atexit
import faulthandler
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import Any

NAME = "/memfd:ddplaunch-stacks"
OTHERS, GROUP = 0o006, 0o060


def offer_stacks(fd: int, signum: int) -> None:
    """Have the stacks written to `fd` at this signal; not if that is not the agent's file, as under a low limit of open files."""
    try:
        if not is_file_for_stacks(fd):
            return
        os.set_inheritable(fd, False)
        if is_caught(signum):  # a .pth file or sitecustomize has it
            os.close(fd)
            return
        faulthandler.register(signum, file=fd)
    except Exception:  # noqa: BLE001 - the program does without it
        return

    def give_up() -> None:
        try:
            if is_file_for_stacks(fd):
                os.close(fd)
        except OSError:  # the program has closed it
            pass

    # Python's own `signal.signal` calls that of `_signal` by its name
    for module, name in ((sys.modules["_signal"], "signal"), (faulthandler, "register"), (faulthandler, "unregister")):
        setattr(module, name, noticed(getattr(module, name), signum, give_up))


def offer_debugger(fd: int, signum: int, address: str, load: "Callable[[str], dict[str, Any]]") -> None:
    """Have a debugger, or a profile, open at this signal for the client that the agent at `address` gives us.

    `fd` is the file for stacks.
    """
    own: Any = sys.modules["_signal"]
    worker = os.getpid()
    client: Any = None  # of the debugger that is open, or was open last
    profile: Any = None  # that is open, or was open last

    def asked(_signum: int, frame: "FrameType | None") -> None:
        """Handle the signal: open a debugger or a profile for the client that the agent has. In a forked child, do nothing."""
        nonlocal client, profile
        if os.getpid() != worker:
            return
        if client is not None and client.is_open:
            client.leave_if_hung_up()
            return
        if profile is not None and profile.on_main(frame):
            return
        session: Any = None
        try:
            met = load("asking")["meet"](address)
            if met is None:
                return
            wish, sock, agent = met
            if wish == b"P":
                agent.close()
                profile = load("profiler")["begin"](sock, profile, signum)
            else:
                debugger = load("debugger")
                opened = debugger["Client"](sock, agent)
                session, client = debugger["Session"](opened), opened
        except Exception:  # noqa: BLE001 - such as files of another version: the program goes on
            return
        if session is not None:
            session.open_at(frame)

    def forked() -> None:
        for each in (client, profile):
            if each is not None:
                each.forget()

    def ignore(original: "Callable[..., Any]" = own.signal) -> None:
        # an interpreter that ends gives signals their default action back, and this one would kill
        if own.getsignal(signum) is asked:
            original(signum, own.SIG_IGN)

    def mark(bits: int) -> None:
        try:
            if os.getpid() == worker and is_file_for_stacks(fd):
                os.fchmod(fd, os.fstat(fd).st_mode & 0o777 & ~bits)
        except OSError:
            pass

    try:
        if is_caught(signum):  # a .pth file or sitecustomize has it
            return
        own.signal(signum, asked)
        atexit.register(ignore)
        os.register_at_fork(after_in_child=forked)
    except Exception:  # noqa: BLE001 - the program does without it
        return
    mark(OTHERS)
    own.signal = noticed(own.signal, signum, lambda: mark(OTHERS | GROUP))


def is_caught(signum: int) -> bool:
    """Whether this process has a handler for a signal, perhaps one in C that Python does not know, as faulthandler's are."""
    with open("/proc/self/status", "rb") as file:
        caught = next(line for line in file if line.startswith(b"SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (signum - 1) & 1)


def is_file_for_stacks(fd: int) -> bool:
    """Whether this descriptor is the agent's file for stacks, and not one that the program has opened since."""
    return os.readlink(f"/proc/self/fd/{fd}").startswith(NAME)


def noticed(original: "Callable[..., Any]", signum: int, then: "Callable[[], None]") -> "Callable[..., Any]":
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
