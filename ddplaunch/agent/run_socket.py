"""The socket of the run in the agent's loop, where the job is coordinated. It costs nothing until a client connects.

What fails here never ends a job: its files may have been replaced by those of another version since it started.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ddplaunch.agent.context import AgentContext
from ddplaunch.coordinator.link import JobEnd, Link
from ddplaunch.errors import expendable
from ddplaunch.loop.loop import Loop
from ddplaunch.output.file_messages import LISTEN, pack

if TYPE_CHECKING:  # only a job that is looked into needs it
    from ddplaunch.agent.client import Client
    from ddplaunch.agent.clients import Clients
    from ddplaunch.control.requests import Request
    from ddplaunch.coordinator.coordinator import Coordinator

_LONGEST_NAME = 100  # characters of the run's name in that of its socket


class RunSocket:
    """Takes connections from the moment that the writer of files has given it its place."""

    def __init__(self, loop: Loop, context: AgentContext) -> None:
        self._loop = loop
        self._context = context
        self._coordinator: Coordinator | None = None
        self._clients: Clients | None = None
        self._listens = False

    def open(self, link: Link) -> None:
        """Have the socket made, if the coordinator is here and there is a process that writes files."""
        files, context = self._context.files, self._context
        if link.coordinator is None or files.listener is None:
            return
        self._coordinator = link.coordinator
        files.listening = self._listening
        name = f"{context.draft.run_id[:_LONGEST_NAME]}.{os.urandom(4).hex()}"
        in_folder = context.folder is not None and context.inputs.spec.log_dir is None
        files.put(LISTEN, pack({"name": name, "in_folder": in_folder}))

    def _listening(self, reply: Mapping[str, Any]) -> None:
        if why := reply.get("why"):
            self._warn(f"do not reach this run: {why}")
        elif self._coordinator is not None:
            assert self._context.files.listener is not None
            self._listens = True
            self._loop.watch(self._context.files.listener, lambda: expendable(self._accept, self.fail))

    def _accept(self) -> None:
        if self._clients is None:
            from socket import socket  # with accept()

            from ddplaunch.agent.clients import Clients

            files = self._context.files
            assert self._coordinator is not None
            assert files.listener is not None
            self._loop.unwatch(files.listener)
            listener, files.listener = socket(fileno=files.listener.detach()), None
            self._clients = Clients(self._loop, self._context, self._coordinator, listener)

    def client(self, number: int) -> Client | None:
        """Return the client of this number while its connection is there."""
        return self._clients.get(number) if self._clients is not None else None

    def answer(self, client: int, request: Request) -> None:
        """Answer the request of a client."""
        if (clients := self._clients) is not None:
            expendable(lambda: clients.answer(client, request), self.fail)

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
            expendable(lambda: clients.ended(end), self.fail)

    def close(self) -> None:
        """Take no connections any more, and drop those that there are."""
        clients, self._clients, self._coordinator = self._clients, None, None
        if clients is not None:
            clients.close()
        if self._listens and (listener := self._context.files.listener) is not None:
            self._loop.unwatch(listener)
            listener.close()
        self._listens = False
