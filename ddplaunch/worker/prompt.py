"""pdb for somebody elsewhere: it opens at the frame that the signal has interrupted, and reads and writes a socket.

Loaded when somebody attaches. To leave it lets the program go on, whatever the way: `q`, the end of input, a lost connection.
"""

import json
import pdb  # noqa: T100 - it is what was asked for
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
    """Ask the agent for who wants to look; None if nobody does any more. `names` are those of debugger.py."""
    agent = names["ask"](address, "A")
    if agent is None:
        return None
    fds = names["receive"](agent, 1)
    if not fds:
        agent.close()
        return None
    return Session(Peer(socket.socket(fileno=fds[0]), agent))


BOOTSTRAP = meet.__code__.co_filename.replace("prompt.py", "bootstrap.py")


class Peer:
    """Who looks, as a file: what is written goes there in frames, a line that is read is asked for with the prompt."""

    def __init__(self, sock: socket.socket, agent: socket.socket) -> None:
        sock.setblocking(True)
        self.sock = sock
        self.agent = agent  # who knows that the worker is held as long as this is open
        self.waiting = ""
        self.received = b""
        self.is_open = True
        self.is_lost = False

    def write(self, text: str) -> int:
        """Keep a text until it is a line."""
        self.waiting += text
        return len(text)

    def flush(self) -> None:
        """Send the lines that wait; what follows them may be a prompt."""
        lines, newline, rest = self.waiting.rpartition("\n")
        self.waiting = rest
        if newline:
            self.send(lines + newline)

    def readline(self) -> str:
        """Ask for a line; "" if there will be none any more."""
        self.flush()
        prompt, self.waiting = self.waiting, ""
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
        """Send a text, if there is still somebody to read it."""
        for at in range(0, max(1, len(text)), PIECE):
            message = {"type": "said", "text": text[at : at + PIECE], **more}
            payload = json.dumps(message, ensure_ascii=True).encode()
            try:
                if self.is_open and not self.is_lost:
                    self.sock.sendall(len(payload).to_bytes(4, "big") + payload, socket.MSG_NOSIGNAL)
            except OSError:
                self.is_lost = True

    def close(self) -> None:
        """Let the agent know that the worker is not held any more."""
        if self.is_open:
            self.flush()
            self.send(self.waiting, ends=True)
            self.is_open = False
            for sock in (self.agent, self.sock):  # the agent first, which takes the end of the other for a hang-up
                try:
                    sock.shutdown(socket.SHUT_RDWR)  # whoever else has a copy, as a child that a C library has forked
                except OSError:
                    pass
                sock.close()

    def forget(self) -> None:
        """Leave all to the worker: this is a child that it has forked."""
        if self.is_open:
            self.is_open = False
            sys.settrace(None)
            self.sock.close()
            self.agent.close()

    def leave_if_hung_up(self) -> None:
        """Let the program go on, which may be on its way to a breakpoint, if nobody looks any more."""
        poll = select.poll()
        poll.register(self.sock, select.POLLRDHUP)
        if poll.poll(0):
            sys.settrace(None)  # the breakpoints stay: it may be bdb, looking for one, that we have interrupted
            self.close()


class Session(pdb.Pdb):
    """One debugger, from the moment that somebody attaches until they leave."""

    def __init__(self, peer: Peer) -> None:
        super().__init__(stdin=peer, stdout=peer, nosigint=True, readrc=False)  # type: ignore[arg-type]
        self.peer = peer
        self.clear_all_breaks()  # which are the process's, of somebody who has hung up

    def open_at(self, frame: "FrameType | None") -> None:
        """Open at the interrupted frame, in the middle of a line; from then on as the user has it."""
        if sys.gettrace() is not None or frame is None:
            self.peer.write("another debugger, or what measures coverage, traces this rank\n")
            self.peer.close()
            return
        self.reset()
        each: Any = frame
        while each is not None:
            each.f_trace = self.trace_dispatch
            self.botframe = each
            each = each.f_back
        self.interaction(frame, None)
        if self.peer.is_open:
            # last, or it would step into ourselves
            getattr(self, "start_trace", lambda: sys.settrace(self.trace_dispatch))()

    def interaction(self, frame: "FrameType | None", *more: "Any") -> None:
        """Take commands; once nothing can stop the program any more, the session is over."""
        super().interaction(frame, *more)
        if not self.breaks and getattr(self, "stoplineno", CONTINUING) == CONTINUING:
            self.peer.close()
        self.peer.flush()

    def get_stack(self, f: "FrameType | None", t: "Any") -> "Any":
        """Return the program's frames, without that of the bootstrap below them."""
        stack, at = super().get_stack(f, t)
        while at > 0 and stack[0][0].f_code.co_filename == BOOTSTRAP:
            del stack[0]
            at -= 1
        return stack, at

    def _cmdloop(self) -> None:
        self.cmdloop()  # pdb's own swallows Ctrl-C, which is not that of who looks but ends the job

    def do_quit(self, arg: str) -> "bool | None":
        """Leave the debugger; the rank goes on."""
        self.clear_all_breaks()
        self.set_continue()
        self.peer.close()
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
