"""The agent's end of debuggers: workers connect to a Unix address that they know to ask for the terminal or come for a client.

The address is abstract, never a port, and the kernel says which process asks. A connection lasts as long as the debugger does.
Clients that profile a worker come to it in the same way; they hold nothing, and once a worker has its client the agent has no
part in a profile. Decides nothing.
"""

from __future__ import annotations

import os
import select
import socket
import struct
from collections.abc import Collection, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

from msgspec import Struct

from ddplaunch.launcher.decide import node
from ddplaunch.launcher.look.stacks import has_our_handler, read_status
from ddplaunch.plan.cluster.endpoints import LOOPBACK
from ddplaunch.record.window.requests import Attach, Done, Reply
from ddplaunch.system.errors import indented
from ddplaunch.system.loop.loop import Acceptor, Loop
from ddplaunch.system.process.child import ATTACH_SIGNAL, RunningWorker
from ddplaunch.system.words import compress

if TYPE_CHECKING:
    from ddplaunch.launcher.tell.reporter import Reporter

_CREDENTIALS = struct.Struct("iII")  # struct ucred, unix(7)
_BACKLOG = 1024
_LONGEST_PACKET = 4096  # bytes of what a worker asks
# how a packet of a worker begins: see `_on_packet`
_HAS_FAILED, _COMES_FOR_VISITOR, _LISTENS_FOR_DEBUGPY = b"E", b"A", b"P"
_DEBUGS, _PROFILES = b"A", b"P"  # the wishes of clients, as the worker gets them
_TERMINAL = (0, 1)  # our stdin and stdout, which were the command's
# bits of the mode of a worker's file for stacks, which worker/signals.py clears: others' once it handles ATTACH_SIGNAL,
# the group's as well once the program has taken that signal
_UNTIL_WE_HANDLE, _UNTIL_PROGRAM_HANDLES = 0o006, 0o060


class Visitor(Protocol):
    """The connection of a client, such as `ddplaunch attach`, that wants to debug or profile a worker."""

    number: int

    def hand_over(self, *last: Reply) -> socket.socket | None:
        """Give the connection away behind these replies, unless it is lost."""

    def refuse(self, reason: str, *, runs_no_python: bool = False) -> None:
        """Refuse to answer, and say why."""


class _Attachment(Struct, frozen=True):
    """A debugger between a worker and a client, which talk past the agent."""

    worker_socket: socket.socket  # the worker's connection to the agent: its end is the end of the debugger
    visitor_socket: socket.socket  # our copy of the client's connection, which the worker has been handed


class _WaitingVisitor(Struct, frozen=True):
    """A visitor for whom a worker is to come."""

    visitor: Visitor
    until: float  # then the visitor is refused
    profiles: bool  # else the visitor debugs


class _DebugpyPort(NamedTuple):
    """Where a worker listens for a client of debugpy."""

    connection: socket.socket  # of the worker to the agent
    port: int


class Debuggers:
    """The workers of this node that debuggers hold, or that ask for one; visitors are clients that debug or profile a worker."""

    def __init__(self, loop: Loop, running: Mapping[int, RunningWorker], reporter: Reporter, address: str) -> None:
        """Bind the abstract Unix address, and listen there later; `running`, which the agent changes, are its workers by rank.

        Raises OSError: there are too many open files.
        """
        self._loop = loop
        self._running = running
        self._reporter = reporter
        self._debugpy_ranks: Collection[int] = ()  # workers of this node that are to wait for a client of debugpy
        self._debugpy_ports: dict[int, _DebugpyPort] = {}  # by rank
        # by rank: connections of workers that ask for the terminal; one of them may have it
        self._asked_for_terminal: dict[int, socket.socket] = {}
        self._waiting_visitors: dict[int, _WaitingVisitor] = {}  # by the rank that is to come
        self._give_up_timer = loop.timer(None, self._refuse_late_visitors)
        self._attached: dict[int, _Attachment] = {}  # by rank
        self._hang_ups = select.epoll()  # tells which visitors hang up; what they send is for the worker alone to read
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.setblocking(False)
        self._listener.bind("\0" + address)
        self._acceptor = Acceptor(loop, self._listener, self)
        loop.watch(self._hang_ups, self._on_hang_up)

    @property
    def held_ranks(self) -> frozenset[int]:
        """The workers that have a debugger, or wait for one."""
        return frozenset((*self._asked_for_terminal, *self._attached, *self._debugpy_ports))

    def listen(self, debugpy_ranks: Collection[int] | None = None) -> None:
        """Take connections; `debugpy_ranks` are the workers of this node that are to wait for a client of debugpy."""
        if debugpy_ranks is not None:
            self._debugpy_ranks = debugpy_ranks
        self._listener.listen(_BACKLOG)
        self._acceptor.start()

    def on_connection(self, sock: socket.socket, _address: object) -> None:
        """Take the connection of a worker of ours, known by its pid; refuse any other. Called by the acceptor."""
        pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        rank = next((rank for rank, worker in self._running.items() if worker.pid == pid), None)
        if rank is None or uid != os.getuid():
            sock.close()
            return
        self._loop.watch(sock, partial(self._on_packet, sock, rank))

    def on_pause(self, error: OSError) -> None:
        """Let workers wait. Called by the acceptor."""

    def _on_packet(self, sock: socket.socket, rank: int) -> None:
        """Act on what a worker says: it has failed and wants the terminal, comes for a visitor, or listens for debugpy at a port.

        Anything else ends the worker's debugger, as does the end of the connection, an empty packet. Called by the loop.
        """
        try:
            packet = sock.recv(_LONGEST_PACKET)
        except BlockingIOError:
            return
        except OSError:  # the connection is reset: it has ended
            packet = b""
        what, text = packet[:1], packet[1:]
        if what == _HAS_FAILED and rank not in self._asked_for_terminal:
            self._asked_for_terminal[rank] = sock
            self._loop.post(node.TerminalRequested(rank, indented(text.decode(errors="replace")), self._loop.now()))
        elif what == _COMES_FOR_VISITOR and rank in self._waiting_visitors:
            self._introduce(sock, rank, self._waiting_visitors.pop(rank))
        elif what == _LISTENS_FOR_DEBUGPY and text.isdigit() and rank not in self._debugpy_ports:
            self._debugpy_ports[rank] = _DebugpyPort(sock, int(text))
            self._loop.post(node.DebuggerAttached(rank, self._loop.now()))
            self._announce_ports()
        else:
            self._drop(sock, rank)

    def _introduce(self, sock: socket.socket, rank: int, waiting: _WaitingVisitor) -> None:
        """Hand a worker the connection of the visitor that waits for this worker, unless the visitor has left."""
        visitor = waiting.visitor.hand_over(Done())  # the answer: its request is done
        if visitor is None:
            self._drop(sock, rank)
            return
        with suppress(OSError):  # the worker has ended, as the next packet says
            socket.send_fds(sock, [_PROFILES if waiting.profiles else _DEBUGS], [visitor.fileno()])
        if waiting.profiles:  # a profile holds no worker: the agent has no more part in it
            visitor.close()
            self._drop(sock, rank)
        else:
            self._attached[rank] = _Attachment(sock, visitor)
            self._hang_ups.register(visitor, select.EPOLLRDHUP | select.EPOLLONESHOT)  # a hang-up is told once
            self._loop.post(node.DebuggerAttached(rank, self._loop.now()))

    def _on_hang_up(self) -> None:
        """Signal workers whose visitors have hung up: a worker that runs to a breakpoint would learn of that only there."""
        departed = {fd for fd, _ in self._hang_ups.poll(0)}
        for rank, attachment in list(self._attached.items()):
            if attachment.visitor_socket.fileno() not in departed:
                continue
            # the worker may have ended the debugger itself, which its packet says: then it must get no signal
            self._on_packet(attachment.worker_socket, rank)
            is_still_attached = rank in self._attached
            worker = self._running.get(rank)
            if worker is not None and is_still_attached and not _why_signal_is_unsafe(worker):
                worker.signal(ATTACH_SIGNAL)

    def _announce_ports(self) -> None:
        """Print how to connect to the workers that wait for a client of debugpy, once all of this node do."""
        if self._debugpy_ports.keys() >= {*self._debugpy_ranks}:
            self._reporter.stderr.write(
                announcement({rank: port for rank, (_, port) in sorted(self._debugpy_ports.items())})
            )

    def _drop(self, sock: socket.socket, rank: int) -> None:
        """Close a connection of a worker, and post what that ends: its use of the terminal, or that a debugger holds it.

        A worker may have several connections: each ends only what has begun on it.
        """
        is_closed = sock.fileno() < 0
        if is_closed:
            return
        self._loop.unwatch(sock)
        sock.close()
        if self._asked_for_terminal.get(rank) is sock:
            del self._asked_for_terminal[rank]
            self._loop.post(node.TerminalReturned(rank, self._loop.now()))
        if rank in self._debugpy_ports and self._debugpy_ports[rank].connection is sock:
            del self._debugpy_ports[rank]
            self._loop.post(node.DebuggerDetached(rank, self._loop.now()))
        if rank in self._attached and self._attached[rank].worker_socket is sock:
            visitor = self._attached.pop(rank).visitor_socket
            self._hang_ups.unregister(visitor)  # closing alone would leave it there while the worker has a copy
            visitor.close()
            self._loop.post(node.DebuggerDetached(rank, self._loop.now()))

    def lend_terminal(self, rank: int) -> None:
        """Lend the terminal to a worker that has asked for it."""
        if (sock := self._asked_for_terminal.get(rank)) is not None:
            with suppress(OSError):  # the worker has ended, as the next packet says
                socket.send_fds(sock, [b"T"], _TERMINAL)

    def refuse_terminal(self, rank: int) -> None:
        """Let a worker that has asked for the terminal end without its debugger."""
        if (sock := self._asked_for_terminal.get(rank)) is not None:
            self._drop(sock, rank)

    def attach(self, request: Attach, visitor: Visitor) -> None:
        """Have a worker come for a client, by a signal; tell the client if none can come, or if none does in time."""
        rank, until = request.rank, self._loop.now() + request.within
        if why := self._why_unreachable(rank):
            visitor.refuse(f"rank {rank} {why}")
            return
        self.listen()  # the worker connects to the address, and then `_introduce` brings the two together
        self._waiting_visitors[rank] = _WaitingVisitor(visitor, until, request.profiles)
        self._give_up_timer.set_by(until)
        self._running[rank].signal(ATTACH_SIGNAL)

    def _why_unreachable(self, rank: int) -> str:
        """Return why no client can get into a worker, as a predicate; "" if one can."""
        worker = self._running.get(rank)
        if worker is None:
            return "has not been started yet"
        if worker.look() is not None:
            return "has ended"
        if rank in self.held_ranks or (rank in self._waiting_visitors and not self._waiting_visitors[rank].profiles):
            return "has a debugger already"
        if rank in self._waiting_visitors:
            return "is about to be profiled"
        return _why_no_debugger(worker)

    def forget(self, client: int) -> None:
        """Have no worker come for the client of this number any more."""
        for rank, waiting in list(self._waiting_visitors.items()):
            if waiting.visitor.number == client:
                del self._waiting_visitors[rank]

    def _refuse_late_visitors(self) -> None:
        """Tell visitors for whom no worker has come in time that none will."""
        now = self._loop.now()
        for rank, waiting in list(self._waiting_visitors.items()):
            if now >= waiting.until:
                del self._waiting_visitors[rank]
                reason = f"rank {rank} runs no Python in its main thread just now"
                waiting.visitor.refuse(reason, runs_no_python=True)
        self._give_up_timer.set(min((waiting.until for waiting in self._waiting_visitors.values()), default=None))

    def detach_all(self) -> None:
        """Disconnect all visitors, so that the workers that these hold can end, as they were asked to."""
        for attachment in self._attached.values():
            with suppress(OSError):
                attachment.visitor_socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close all connections with workers and the visitors they have, and the address; others close visitors that wait."""
        self._acceptor.close()
        attached = [(rank, attachment.worker_socket) for rank, attachment in self._attached.items()]
        with_port = [(rank, sock) for rank, (sock, _) in self._debugpy_ports.items()]
        for rank, sock in [*self._asked_for_terminal.items(), *attached, *with_port]:
            self._drop(sock, rank)
        self._give_up_timer.cancel()
        self._loop.unwatch(self._hang_ups)
        self._hang_ups.close()


def _why_no_debugger(worker: RunningWorker) -> str:
    """Return, as a predicate, why a worker would not come, or would be killed by the signal; "" if it would come."""
    status = read_status(worker.pid)
    if status is not None and status.is_stopped:
        return "is stopped" if status.state == "T" else "is held by a debugger"
    blocks = status is not None and status.blocks(ATTACH_SIGNAL)
    return _why_signal_is_unsafe(worker) or ("blocks the signal by which a debugger would get in" if blocks else "")


def _why_signal_is_unsafe(worker: RunningWorker) -> str:
    """Return why the signal to attach might kill a worker, or not reach our handler, as a predicate; "" if it is safe.

    Bits in the mode of the worker's file for stacks tell whose handlers it has: the worker clears them.
    """
    status = read_status(worker.pid)
    if status is None:
        return "has ended"
    mode = 0 if worker.stacks is None else os.fstat(worker.stacks).st_mode
    has_no_handler, program_has_signal = bool(mode & _UNTIL_WE_HANDLE), not mode & _UNTIL_PROGRAM_HANDLES
    if worker.stacks is None or has_no_handler:
        return "is no Python, or has not begun to run its program"
    if program_has_signal:
        return f"handles signal {ATTACH_SIGNAL} (SIGRTMAX-6) itself, by which a debugger would get in: its program has taken it"
    if not has_our_handler(worker.pid, worker.stacks) or not status.catches(ATTACH_SIGNAL):
        return "is about to end, runs another program, or has taken the signals by which a debugger would get in"
    return ""


def announcement(ports: Mapping[int, int]) -> str:
    """Return a message on which ranks wait for a client of debugpy, at these ports, with the file that VS Code needs."""
    who = f"rank {compress(list(ports))} waits" if len(ports) == 1 else f"ranks {compress(list(ports))} wait"
    what = "for a client of debugpy; for VS Code, this is .vscode/launch.json"
    return f"ddplaunch: {who} {what}:\n{_launch_json(ports)}\n"


def _launch_json(ports: Mapping[int, int]) -> str:
    """Return VS Code's launch.json: a configuration for each rank, and, for several ranks, one that attaches to all."""
    import json  # a job that is debugged otherwise needs none

    names = [f"rank {rank}" for rank in ports]
    configurations = [
        {"name": name, "type": "debugpy", "request": "attach", "connect": {"host": LOOPBACK, "port": port}}
        for name, port in zip(names, ports.values(), strict=True)
    ]
    data: dict[str, object] = {"version": "0.2.0", "configurations": configurations}
    if len(names) > 1:
        data["compounds"] = [{"name": "all ranks", "configurations": names, "stopAll": False}]
    return json.dumps(data, indent=2)
