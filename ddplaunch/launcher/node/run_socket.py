"""The socket of the run, where its coordinator is; those of other agents say where to ask. Costs nothing until somebody asks.

What fails here never ends a job: its files may have been replaced by those of another version since it started.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ddplaunch.launcher.job.link import Link
from ddplaunch.launcher.job.orders import JobEnd
from ddplaunch.launcher.node.context import AgentContext
from ddplaunch.reach.pipes import SOCKET
from ddplaunch.record.file_queue import LISTEN, pack
from ddplaunch.system.errors import expendable
from ddplaunch.system.fields import text
from ddplaunch.system.loop.loop import Loop

if TYPE_CHECKING:  # only a job that is looked into needs it
    from ddplaunch.launcher.node.clients import Client, RunClients
    from ddplaunch.reach.channel.streams import Chunk, Streams
    from ddplaunch.record.window.requests import Request

_LONGEST_NAME = 100  # characters of the run's name in that of its socket


class RunSocket:
    """Takes connections from the moment that the writer of files has made it."""

    def __init__(self, loop: Loop, context: AgentContext, run_id: Callable[[], str]) -> None:
        """`run_id` returns the name that all nodes know the run by; "" before the nodes have met."""
        self._loop = loop
        self._context = context
        self._run_id = run_id
        self._link: Link | None = None  # while there is a socket
        self._clients: RunClients | None = None
        self._streams: Streams | None = None  # of clients that have connected to the coordinator
        self._newest = 0  # number of a stream
        self._listens = False
        self._place: tuple[str, str] | None = None  # the folder that it lies in, and its name there

    def open(self, link: Link) -> None:
        """Have the writer of the run's files make the socket. Simulated nodes have none."""
        files, context = self._context.files, self._context
        self._link = link
        if files.listener is None or (link.coordinator is None and context.inputs.spec.simulate):
            return
        files.listening = self._on_socket_made
        name = f"{context.draft.run_id[:_LONGEST_NAME]}.{os.urandom(4).hex()}"
        in_folder = context.folder is not None and context.inputs.spec.log_dir is None
        files.put(LISTEN, pack({"name": name, "in_folder": in_folder}))

    def _on_socket_made(self, reply: Mapping[str, Any]) -> None:
        """Begin to listen, or report why there is no socket: the reply of the process that writes files."""
        if self._link is None:
            return
        if why := reply.get("why"):
            if self._link.coordinator is not None:
                self._warn(f"do not reach this run: {why}")
            return
        assert self._context.files.listener is not None
        self._listens = True
        self._loop.watch(self._context.files.listener, lambda: expendable(self._on_connection, self.fail))
        self._place = reply["folder"], reply["name"]
        if self._link.coordinator is not None:
            self._register()

    def _register(self) -> None:
        """Say where this socket is, now that it answers for the job."""
        if self._place is None:
            return
        folder, name = self._place
        if self._context.inputs.spec.live:
            self._context.queue.put(SOCKET, os.fsencode(f"{folder}\0{name}"))

    def _on_connection(self) -> None:
        """Hand the listening socket to `RunClients`, which is imported when the first client connects."""
        from socket import socket  # with accept()

        files = self._context.files
        assert files.listener is not None
        self._loop.unwatch(files.listener)
        listener, files.listener = socket(fileno=files.listener.detach()), None
        self._listens = False
        self._made_clients().listen(listener)

    def _made_clients(self) -> RunClients:
        if self._clients is None:
            from ddplaunch.launcher.node.clients import RunClients

            assert self._link is not None
            self._clients = RunClients(self._loop, self._context, self._link, self._run_id)
        return self._clients

    def client(self, number: int) -> Client | None:
        """Return the client of this number while its connection is there."""
        return self._clients.get(number) if self._clients is not None else None

    def answer(self, client: int, request: Request) -> None:
        """Answer the request of a client."""
        if (clients := self._clients) is not None:
            expendable(lambda: clients.answer(client, request), self.fail)

    def take(self, chunk: Chunk) -> None:
        """Take a piece of what a client has sent to the coordinator, which needs this node for it.

        With the first piece begins a stream, whose numbers ascend.
        """
        expendable(lambda: self._take_chunk(chunk), self.fail)

    def _take_chunk(self, chunk: Chunk) -> None:
        """Take a chunk of a client that is connected to another node; its first chunk makes a client here, over a socket pair."""
        if self._link is None:
            return
        if self._streams is None:
            from ddplaunch.reach.channel.streams import Streams

            self._streams = Streams(self._loop, self._link.send)
        if chunk.number > self._newest and chunk.data:
            import socket

            self._newest = chunk.number
            ours, its = socket.socketpair()
            its.setblocking(False)
            self._streams.add(chunk.number, ours)
            self._made_clients().add_of_coordinator(its)
        self._streams.take(chunk)

    def forget(self, client: int) -> None:
        """Have nothing more found out for a client that has gone."""
        if (clients := self._clients) is not None:
            expendable(lambda: clients.forget(client), self.fail)

    def fail(self, why: str) -> None:
        """Do without the socket, because something failed; the job goes on."""
        self.close()
        self._warn(f"no longer reach this run: {why}")

    def _warn(self, what: str) -> None:
        self._context.reporter.print(f"warning: `ddplaunch ps`, `stop` and `stacks` {what}")

    def ended(self, end: JobEnd) -> None:
        """Tell those that wait for it how the job has ended."""
        if (clients := self._clients) is not None:
            from ddplaunch.record.window.requests import RunEnded

            expendable(lambda: clients.ended(RunEnded(end.status, end.why, text(end.text))), self.fail)

    def close(self) -> None:
        """Take no connections any more, and drop those that there are."""
        parts = self._clients, self._streams
        self._clients = self._streams = self._link = None
        for part in parts:
            if part is not None:
                part.close()
        if self._listens and (listener := self._context.files.listener) is not None:
            self._loop.unwatch(listener)
            listener.close()
        self._listens = False
