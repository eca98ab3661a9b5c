"""Debuggers that hold the program: at the exception that ends it, by debugpy before it begins, or for a client that attaches.

The agent lends the terminal to one worker at a time. The debugger there is the one that PYTHONBREAKPOINT names, else pdb. For a
client of `ddplaunch attach`, pdb opens at the frame that the signal has interrupted, and reads and writes a socket. The program
goes on when the client leaves, in any way: `q`, the end of input, a lost connection. Loaded only when it is needed.
"""

import importlib
import json
import os
import pdb  # noqa: T100 - the user asked for it
import select
import socket
import sys
import traceback

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType, ModuleType, TracebackType
    from typing import Any

LONGEST = 120  # characters of a message about an exception
PIECE = 50_000  # characters in a frame
CHUNK = 4096  # bytes
CONTINUING = -1  # `stoplineno` of a debugger that stops at breakpoints only


def post_mortem(error: BaseException, address: str, load_sibling: "Callable[[str], ModuleType]") -> None:
    """Open a debugger where `error` was raised, before `error` ends the program, once the agent at `address` lends a terminal.

    Do nothing if the program chose to exit, or the user to leave another debugger (BdbQuit).
    """
    if not isinstance(error, Exception) or type(error).__name__ == "BdbQuit" or error.__traceback__ is None:
        return
    summary = traceback.format_exception_only(type(error), error)[-1].strip().partition("\n")[0]
    asking = load_sibling("asking")
    agent = asking.ask(address, asking.HAS_FAILED + summary[:LONGEST])
    if agent is None:
        return
    with agent:  # the terminal is ours until this is closed
        _, descriptors = asking.receive(agent, 2)
        if not descriptors:
            return
        stdin, stdout = descriptors
        with Terminal(stdin, stdout):
            traceback.print_exception(type(error), error, error.__traceback__)
            open_debugger = chosen_post_mortem()
            try:
                open_debugger(error.__traceback__)
            except (KeyboardInterrupt, SystemExit):  # another way to leave the debugger
                pass


class Terminal:
    """Makes the terminal stdin, stdout and stderr of this worker, until the user leaves the debugger."""

    def __init__(self, stdin: int, stdout: int) -> None:
        self.terminal = [stdin, stdout, stdout]  # in place of the descriptors 0, 1 and 2
        self.old_fds: list[int] = []  # duplicates of these three; -1 for one that the program had closed
        self.old_streams: tuple[Any, ...] = ()

    def __enter__(self) -> None:
        """Put the descriptors of the terminal in place of the streams 0 to 2, and keep the old ones."""
        self.old_streams = sys.stdin, sys.stdout, sys.stderr
        flush()
        for target, fd in enumerate(self.terminal):
            try:
                self.old_fds.append(os.dup(target))
            except OSError:  # the program has closed it
                self.old_fds.append(-1)
            os.dup2(fd, target)
        for fd in set(self.terminal):
            os.close(fd)
        sys.stdin = open(0, closefd=False)
        sys.stdout, sys.stderr = (open(fd, "w", buffering=1, closefd=False) for fd in (1, 2))  # noqa: SIM115

    def __exit__(self, *_: object) -> None:
        """Put the old streams back."""
        flush()
        sys.stdin, sys.stdout, sys.stderr = self.old_streams
        for target, old in enumerate(self.old_fds):
            if old < 0:
                os.close(target)
            else:
                os.dup2(old, target)
                os.close(old)


def flush() -> None:
    """Write the buffered output."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:  # noqa: BLE001, S110 - it is closed, or none
            pass


def chosen_post_mortem() -> "Callable[[TracebackType | None], object]":
    """Return the function that opens the user's debugger at a traceback: of the module that PYTHONBREAKPOINT names, else pdb's.

    That variable names another function of the module: `ipdb.set_trace`.
    """
    module_name = os.environ.get("PYTHONBREAKPOINT", "").rpartition(".")[0]
    if not module_name:
        return pdb.post_mortem
    try:
        if module_name.partition(".")[0] == "IPython":  # which has no such function
            return post_mortem_of_ipython
        module: Any = importlib.import_module(module_name)
        return module.post_mortem  # type: ignore[no-any-return]
    except (ImportError, AttributeError) as error:
        print(f"pdb, since {module_name} of PYTHONBREAKPOINT has no post-mortem debugger: {error}")
        return pdb.post_mortem


def post_mortem_of_ipython(found: "TracebackType | None") -> None:
    """Open IPython's debugger at a traceback."""
    module: Any = importlib.import_module("IPython.terminal.debugger")
    debugger = module.TerminalPdb()
    debugger.reset()
    debugger.interaction(None, found)


def wait_for_client(address: str, load_sibling: "Callable[[str], ModuleType]") -> "socket.socket | None":
    """Wait for a client of debugpy, such as VS Code, at a free port that the agent at `address` prints.

    As long as the connection that is returned is open, the agent knows that a debugger may hold this worker.

    Raises:
        ImportError: the interpreter has no debugpy.
        RuntimeError: other users could not be kept out.
    """
    os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")  # else it warns of Python's own frozen modules
    debugpy: Any = importlib.import_module("debugpy")
    port = load_sibling("own_user").listen(debugpy)
    asking = load_sibling("asking")
    agent: socket.socket | None = asking.ask(address, f"{asking.LISTENS_FOR_DEBUGPY}{port}")
    debugpy.wait_for_client()
    return agent


BOOTSTRAP = post_mortem.__code__.co_filename.replace("debugger.py", "bootstrap.py")


class Client:
    """A client of `ddplaunch attach`, as the file that pdb reads and writes: texts go to the client, lines come from it."""

    def __init__(self, sock: socket.socket, agent: socket.socket) -> None:
        sock.setblocking(True)
        self.sock = sock
        self.agent = agent  # as long as this is open, the agent knows that the worker is held
        self.begun_line = ""  # not sent before its end, unless it is a prompt
        self.received = b""  # that was not read yet
        self.is_open = True  # until the session ends
        self.is_lost = False  # the client has hung up

    def write(self, text: str) -> int:
        """Keep a text until its line is complete."""
        self.begun_line += text
        return len(text)

    def flush(self) -> None:
        """Send the complete lines; the rest may be a prompt."""
        lines, newline, self.begun_line = self.begun_line.rpartition("\n")
        if newline:
            self.send(lines + newline)

    def readline(self) -> str:
        """Send the prompt, and wait for a line of the client; "" if none will come any more, which pdb takes for EOF."""
        self.flush()
        prompt, self.begun_line = self.begun_line, ""
        self.send(prompt, asks=True)
        while self.is_open and not self.is_lost and b"\n" not in self.received:
            try:
                data = self.sock.recv(CHUNK)
            except OSError:
                data = b""
            self.received += data
            self.is_lost = not data
        line, newline, self.received = self.received.partition(b"\n")
        return (line + newline).decode("utf-8", "replace") if newline else ""

    def send(self, text: str, **flags: bool) -> None:
        """Send a text in frames, if the client is still there. Flags: `asks` for a line as the answer, `ends` the session."""
        for at in range(0, max(1, len(text)), PIECE):
            message = {"text": text[at : at + PIECE], **flags}
            payload = json.dumps(message, ensure_ascii=True).encode()
            try:
                if self.is_open and not self.is_lost:
                    self.sock.sendall(len(payload).to_bytes(4, "big") + payload, socket.MSG_NOSIGNAL)
            except OSError:
                self.is_lost = True

    def close(self) -> None:
        """End the session: the agent learns that the worker is not held any more."""
        if self.is_open:
            self.flush()
            self.send(self.begun_line, ends=True)
            self.is_open = False
            # the agent first, which would take the end of the client for a hang-up
            for sock in (self.agent, self.sock):
                try:
                    sock.shutdown(socket.SHUT_RDWR)  # a child that a C library has forked may have a copy
                except OSError:
                    pass
                sock.close()

    def forget(self) -> None:
        """Leave the session to the worker, in a child that it has forked."""
        if self.is_open:
            self.is_open = False
            stop_tracing()
            self.sock.close()
            self.agent.close()

    def leave_if_hung_up(self) -> None:
        """End the session if the client has hung up while the program was on its way to a breakpoint."""
        poll = select.poll()
        poll.register(self.sock, select.POLLRDHUP)
        if poll.poll(0):
            stop_tracing()  # the breakpoints stay: we may have interrupted bdb while it looks for one
            self.close()


def stop_tracing() -> None:
    """Have our debugger trace nothing any more; another tool may have begun to trace since ours did."""
    if isinstance(getattr(sys.gettrace(), "__self__", None), Session):
        sys.settrace(None)


class Session(pdb.Pdb):
    """The debugger in a worker, pdb, from the moment that a client attaches until the client leaves."""

    def __init__(self, client: Client) -> None:
        super().__init__(stdin=client, stdout=client, nosigint=True, readrc=False)  # type: ignore[arg-type]
        self.client = client
        self.clear_all_breaks()  # they belong to the process: a client that hung up may have left some

    def open_at(self, frame: "FrameType | None") -> None:
        """Open at the interrupted frame, in the middle of a line; the user's commands decide what follows."""
        if sys.gettrace() is not None or frame is None:
            self.client.write("another debugger, or a coverage tool, traces this rank\n")
            self.client.close()
            return
        self.reset()
        # as `bdb.Bdb.set_trace` does, which would open only at the next line
        each: Any = frame
        while each is not None:
            each.f_trace = self.trace_dispatch
            self.botframe = each  # the outermost one in the end
            each = each.f_back
        self.interaction(frame, None)
        if self.client.is_open:  # a command has set a breakpoint, or goes on by a step
            # `start_trace` is there since Python 3.14
            start = getattr(self, "start_trace", None) or (lambda: sys.settrace(self.trace_dispatch))
            start()  # last, or it would step into this function

    def interaction(self, frame: "FrameType | None", *more: "Any") -> None:
        """Take commands; once nothing can stop the program any more, the session is over."""
        super().interaction(frame, *more)
        if not self.breaks and getattr(self, "stoplineno", CONTINUING) == CONTINUING:
            self.client.close()
        self.client.flush()

    def get_stack(self, f: "FrameType | None", t: "Any") -> "Any":
        """Return the program's frames, without the frame of the bootstrap below them."""
        stack, at = super().get_stack(f, t)
        while at > 0 and stack[0][0].f_code.co_filename == BOOTSTRAP:
            del stack[0]
            at -= 1
        return stack, at

    def _cmdloop(self) -> None:
        self.cmdloop()  # pdb's own swallows Ctrl-C, which does not come from the client: it ends the job

    def do_quit(self, arg: str) -> "bool | None":
        """Leave the debugger; the rank goes on."""
        self.clear_all_breaks()
        self.set_continue()
        self.client.close()
        return True

    do_q = do_exit = do_EOF = do_detach = do_quit  # noqa: N815 - pdb's names

    def do_run(self, arg: str) -> "bool | None":
        """Refuse: one rank of a job cannot start again."""
        self.error("a rank of a running job cannot start again")
        return None

    do_restart = do_run

    def do_interact(self, arg: str) -> "bool | None":
        """Refuse: it would read the program's stdin."""
        self.error("not where the terminal is elsewhere; `!statement` runs one")
        return None
