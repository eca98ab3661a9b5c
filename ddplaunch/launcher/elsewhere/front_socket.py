"""The socket of the run where it was typed, if node 0 runs elsewhere: it passes questions on to node 0's agent, and ends the job.

It lies and looks like an agent's, so `ps` and the others find it. Each client is a stream over the connection to node 0's host;
what comes back is for the client to judge, as that of an agent. No client waits longer than it has said, whatever becomes of that
host.
"""

from __future__ import annotations

import os
import shlex
import socket
import time
from contextlib import suppress

from ddplaunch import __version__
from ddplaunch.launcher.node.clients import MAX_CLIENTS, TOO_MANY, Clients
from ddplaunch.launcher.node.events import StopAsked
from ddplaunch.reach import messages
from ddplaunch.reach.channel.handshake import pack
from ddplaunch.reach.channel.streams import Chunk, Streams
from ddplaunch.reach.connections import HostConnection, RemoteJob
from ddplaunch.reach.protocol import CONNECT, STREAM
from ddplaunch.record import run_socket
from ddplaunch.record.folders import runs_folder
from ddplaunch.record.window import requests
from ddplaunch.record.window.questions import NoAnswer
from ddplaunch.system.errors import LaunchError
from ddplaunch.system.fields import host as host_name
from ddplaunch.system.fields import line, piece
from ddplaunch.system.loop.loop import Loop
from ddplaunch.system.redaction import Redactor, literals

_LONGEST_NAME = 100  # characters of the run's name in that of its socket
_ON_THE_WAY = 0.5  # seconds, beyond those that the nodes have: a client waits for one more than these
_ATTACHED_LATE = 5.0  # seconds, beyond those that a worker has to come for its client
_SILENT = "does not answer"


def is_here(job: RemoteJob, registered: messages.Registered) -> bool:
    """Whether node 0 runs on this host, since its socket answers here; its disk may hang.

    That host has named the folder, so only where a run of ours can be is looked at.
    """
    if registered.folder not in (run_socket.runtime_folder(os.getuid()), f"{runs_folder(job.env)}/{job.run_id}"):
        return False
    try:
        run_socket.connect(registered.folder, registered.name).close()
    except (OSError, LaunchError):
        return False
    return True


class FrontSocket:
    """Listens from when node 0's agent does until the job has ended."""

    def __init__(self, loop: Loop, job: RemoteJob, host: HostConnection, registered: messages.Registered) -> None:
        """Listen; `registered` says where the socket of node 0 lies, on its host.

        Raises OSError: no socket can be made.
        """
        self._loop = loop
        self._job = job
        self._host = host
        self._registered = registered
        self._began = time.monotonic()
        self.clients = Clients(loop)
        self.streams = Streams(loop, self._send)
        self._name = f"{job.run_id[:_LONGEST_NAME]}.{os.urandom(4).hex()}"
        self._folder = run_socket.open_runtime_folder(make=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            run_socket.listen(listener, self._folder, self._name)
        except OSError:
            listener.close()
            os.close(self._folder)
            raise
        self.clients.listen(listener)

    @property
    def place(self) -> tuple[str, str]:
        """The folder in which it lies, and its name there."""
        return run_socket.runtime_folder(os.getuid()), self._name

    def follow(self, host: HostConnection, registered: messages.Registered) -> None:
        """Pass questions on to the coordinator that has taken over on another host."""
        self.streams.close()
        self._host, self._registered = host, registered

    # --- clients

    def answer(self, number: int, request: requests.Request, world_size: int) -> None:
        """Answer a client that wants the job to end; connect any other to node 0. `world_size`: 0 before the job has begun."""
        if (client := self.clients.get(number)) is None:
            return
        run = self._run(world_size)
        if isinstance(request.asked, requests.StopRun):
            client.awaits_end = True
            client.send(run)
            self._loop.post(StopAsked())
        elif len(self.streams) >= MAX_CLIENTS:
            client.refuse(TOO_MANY)
        elif (sock := client.hand_over(run, self._hosts())) is not None:
            connect = messages.Connect(number, self._registered.folder, self._registered.name)
            self._host.send(CONNECT, messages.encode(connect))
            self._send(Chunk(number, pack(requests.encode(request))))
            self.streams.add(number, sock, *self._give_up(request))

    def _give_up(self, request: requests.Request) -> tuple[float, bytes]:
        """Return the seconds in which node 0 has to reply, and the replies to a client if node 0 does not."""
        host = host_name(str(self._host))
        replies: tuple[requests.Reply, ...]
        within, replies = (
            request.within + _ON_THE_WAY,
            (requests.NodeReply(0, host, NoAnswer(_SILENT)), requests.Done()),
        )
        if isinstance(request.asked, requests.Attach | requests.Profile):
            within = requests.reached_within(request.asked) + _ATTACHED_LATE
            replies = (requests.RequestRefused(line(f"node 0 ({host}) {_SILENT}")),)
        return within, b"".join(pack(requests.encode(reply)) for reply in replies)

    def _send(self, chunk: Chunk) -> None:
        self._host.send(STREAM, messages.encode(chunk))

    def _run(self, world_size: int) -> requests.Run:
        """Return what is known here."""
        program = self._job.spec.program
        redactor = Redactor(literals({**os.environ, **dict(self._job.spec.env)}))
        return requests.Run(
            run_id=piece(self._job.run_id),
            host=host_name(socket.gethostname()),
            pid=os.getpid(),
            folder="",
            command=piece(shlex.join(redactor.argv((program.target, *program.args)))),
            phase="running" if world_size else "rendezvous",
            seconds=max(0.0, time.monotonic() - self._began),
            world_size=world_size,
            nnodes=len(self._job.agents),
            generation=0,
            restarts=0,
            max_restarts=0,
            ddplaunch=line(__version__),
        )

    def _hosts(self) -> requests.TypedHere:
        hosts = tuple(piece(agent.host) for agent in self._job.agents) if self._job.starter == "ssh" else ()
        return requests.TypedHere(hosts, piece(self._job.python))

    # --- the end

    def end(self, status: int) -> None:
        """Tell the clients that wait for the end of the job how it has ended."""
        self.clients.ended(requests.RunEnded(status, "ended"))
        self.close()

    def close(self) -> None:
        """Take no connections any more; a second time changes nothing."""
        if self._folder >= 0:
            self.clients.close()
            self.streams.close()
            with suppress(OSError):
                os.unlink(self._name, dir_fd=self._folder)
            os.close(self._folder)
            self._folder = -1
