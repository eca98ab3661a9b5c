"""Debuggers that hold the program: at the exception that ends it, on the terminal; or before it begins, by debugpy.

The agent lends the terminal to one worker at a time. The debugger is the one that PYTHONBREAKPOINT names, else pdb. Loaded only
when it is needed; `prompt` opens one while the program runs.
"""

import importlib
import os
import socket
import struct
import sys
import traceback

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Any

LONGEST = 120  # characters of a message about an exception
CREDENTIALS = struct.Struct("iII")  # struct ucred, unix(7)


def post_mortem(error: BaseException, address: str) -> None:
    """Open a debugger where `error` was raised, before it ends the program; not if the program chose to exit."""
    if not isinstance(error, Exception) or type(error).__name__ == "BdbQuit" or error.__traceback__ is None:
        return
    what = traceback.format_exception_only(type(error), error)[-1].strip().partition("\n")[0]
    agent = ask(address, "E" + what[:LONGEST])
    if agent is None:
        return
    with agent:
        terminal = receive(agent, 2)
        if not terminal:
            return
        with Terminal(*terminal):
            traceback.print_exception(type(error), error, error.__traceback__)
            debug = chosen()
            try:
                debug(error.__traceback__)
            except (KeyboardInterrupt, SystemExit):  # another way to leave the debugger
                pass


def ask(address: str, what: str) -> "socket.socket | None":
    """Connect to the agent and send it `what`; return the connection, None if there is no agent of this user."""
    agent = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        agent.connect("\0" + address)
        uid = CREDENTIALS.unpack(agent.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))[1]
        if uid in (os.getuid(), 0):
            agent.sendall(what.encode("utf-8", "replace"), socket.MSG_NOSIGNAL)
            return agent
    except OSError:
        pass
    agent.close()
    return None


def receive(agent: socket.socket, most: int) -> "list[int]":
    """Wait for at most `most` descriptors from the agent; return them, [] if it refuses."""
    number = struct.Struct("i")
    try:
        _, ancillary, _, _ = agent.recvmsg(16, socket.CMSG_SPACE(most * number.size))
    except OSError:
        return []
    fds = []
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds += [fd for (fd,) in number.iter_unpack(data[: len(data) // number.size * number.size])]
    return fds


class Terminal:
    """Makes the terminal stdin, stdout and stderr, until the user leaves the debugger."""

    def __init__(self, stdin: int, stdout: int) -> None:
        self.terminal = [stdin, stdout, stdout]
        self.kept: list[int] = []
        self.streams: tuple[Any, ...] = ()

    def __enter__(self) -> None:
        self.streams = sys.stdin, sys.stdout, sys.stderr
        flush()
        for target, fd in enumerate(self.terminal):
            try:
                self.kept.append(os.dup(target))
            except OSError:  # the program has closed it
                self.kept.append(-1)
            os.dup2(fd, target)
        for fd in set(self.terminal):
            os.close(fd)
        sys.stdin = open(0, closefd=False)
        sys.stdout, sys.stderr = (open(fd, "w", buffering=1, closefd=False) for fd in (1, 2))  # noqa: SIM115

    def __exit__(self, *_: object) -> None:
        flush()
        sys.stdin, sys.stdout, sys.stderr = self.streams
        for target, fd in enumerate(self.kept):
            if fd < 0:
                os.close(target)
            else:
                os.dup2(fd, target)
                os.close(fd)


def flush() -> None:
    """Write the buffered output."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:  # noqa: BLE001, S110 - it is closed, or none
            pass


def chosen() -> "Callable[[TracebackType | None], object]":
    """Return the post-mortem function of the debugger that PYTHONBREAKPOINT names, as `ipdb.set_trace`; else pdb's."""
    import pdb  # noqa: T100 - the user asked for it

    module = os.environ.get("PYTHONBREAKPOINT", "").rpartition(".")[0]
    if not module:
        return pdb.post_mortem
    try:
        if module.partition(".")[0] == "IPython":
            return of_ipython
        found: Any = importlib.import_module(module)
        return found.post_mortem  # type: ignore[no-any-return]
    except (ImportError, AttributeError) as error:
        print(f"pdb, since {module} of PYTHONBREAKPOINT has no post-mortem debugger: {error}")
        return pdb.post_mortem


def of_ipython(found: "TracebackType | None") -> None:
    """Open IPython's debugger at a traceback; IPython has no such function."""
    module: Any = importlib.import_module("IPython.terminal.debugger")
    debugger = module.TerminalPdb()
    debugger.reset()
    debugger.interaction(None, found)


def wait_for_client(address: str, load: "Callable[[str], dict[str, Any]]") -> "socket.socket | None":
    """Wait for a client of debugpy, such as VS Code, at a free port that the agent prints.

    As long as the connection that is returned is open, the agent knows that a debugger may hold this worker.

    Raises:
        ImportError: the interpreter has no debugpy.
        RuntimeError: other users could not be kept out.
    """
    os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")  # else it warns of Python's own frozen modules
    debugpy: Any = importlib.import_module("debugpy")
    port = load("own_user")["listen"](debugpy)
    agent = ask(address, f"P{port}")
    debugpy.wait_for_client()
    return agent
