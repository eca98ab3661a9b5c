"""pdb for a client elsewhere: it opens at the frame that the signal has interrupted, and reads and writes a socket.

Loaded when a client attaches. The program goes on when the client leaves, in any way: `q`, the end of input, a lost connection.
"""

import json
import pdb  # noqa: T100 - the user asked for it
import select
import socket
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType
    from typing import Any

PIECE = 50_000  # characters in a frame
CHUNK = 4096  # bytes
CONTINUING = -1  # `stoplineno` of a debugger that stops at breakpoints only


def meet(address: str, names: "dict[str, Any]") -> "Session | None":
    """Ask the agent for the client that wants to attach; None if it has gone. `names` are those of debugger.py."""
    agent = names["ask"](address, "A")
    if agent is None:
        return None
    fds = names["receive"](agent, 1)
    if not fds:
        agent.close()
        return None
    return Session(Client(socket.socket(fileno=fds[0]), agent))


BOOTSTRAP = meet.__code__.co_filename.replace("prompt.py", "bootstrap.py")


class Client:
    """The client as a file for pdb: a text that is written is sent to it, and a line is read from it after the prompt."""

    def __init__(self, sock: socket.socket, agent: socket.socket) -> None:
        sock.setblocking(True)
        self.sock = sock
        self.agent = agent  # as long as this is open, the agent knows that the worker is held
        self.unsent = ""  # the beginning of a line, perhaps a prompt
        self.received = b""
        self.is_open = True
        self.is_lost = False

    def write(self, text: str) -> int:
        """Keep a text until its line is complete."""
        self.unsent += text
        return len(text)

    def flush(self) -> None:
        """Send the complete lines; the rest may be a prompt."""
        lines, newline, self.unsent = self.unsent.rpartition("\n")
        if newline:
            self.send(lines + newline)

    def readline(self) -> str:
        """Send the prompt, and wait for a line; "" if none will come any more."""
        self.flush()
        prompt, self.unsent = self.unsent, ""
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

    def send(self, text: str, **more: bool) -> None:
        """Send a text in frames, if the client is still there."""
        for at in range(0, max(1, len(text)), PIECE):
            message = {"type": "said", "text": text[at : at + PIECE], **more}
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
            self.send(self.unsent, ends=True)
            self.is_open = False
            for sock in (self.agent, self.sock):  # the agent first: it takes the end of the other for a hang-up
                try:
                    sock.shutdown(socket.SHUT_RDWR)  # a child that a C library has forked may have a copy
                except OSError:
                    pass
                sock.close()

    def forget(self) -> None:
        """Leave the session to the worker, in a child that it has forked."""
        if self.is_open:
            self.is_open = False
            sys.settrace(None)
            self.sock.close()
            self.agent.close()

    def leave_if_hung_up(self) -> None:
        """End the session if the client has hung up while the program was on its way to a breakpoint."""
        poll = select.poll()
        poll.register(self.sock, select.POLLRDHUP)
        if poll.poll(0):
            sys.settrace(None)  # the breakpoints stay: we may have interrupted bdb while it looks for one
            self.close()


class Session(pdb.Pdb):
    """One debugger, from the moment that a client attaches until it leaves."""

    def __init__(self, client: Client) -> None:
        super().__init__(stdin=client, stdout=client, nosigint=True, readrc=False)  # type: ignore[arg-type]
        self.client = client
        self.clear_all_breaks()  # they belong to the process: a client that hung up may have left some

    def open_at(self, frame: "FrameType | None") -> None:
        """Open at the interrupted frame, in the middle of a line; the user's commands decide what follows."""
        if sys.gettrace() is not None or frame is None:
            self.client.write("another debugger, or what measures coverage, traces this rank\n")
            self.client.close()
            return
        self.reset()
        each: Any = frame
        while each is not None:
            each.f_trace = self.trace_dispatch
            self.botframe = each
            each = each.f_back
        self.interaction(frame, None)
        if self.client.is_open:
            # last, or it would step into this function
            getattr(self, "start_trace", lambda: sys.settrace(self.trace_dispatch))()

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
