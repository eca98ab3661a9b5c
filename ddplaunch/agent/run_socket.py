"""The socket of the run in the agent's loop, where the job is coordinated. It costs nothing until a client connects.

What fails here never ends a job: its files may have been replaced by those of another version since it started.
"""

from __future__ import annotations

import os
import selectors
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ddplaunch.agent.setup import AgentSetup
from ddplaunch.coordinator.link import JobEnd, Link
from ddplaunch.errors import expendable
from ddplaunch.output.file_messages import LISTEN, pack

if TYPE_CHECKING:  # only a job that is looked into needs it
    from ddplaunch.agent.clients import Clients
    from ddplaunch.agent.debuggers import Debuggers

_LONGEST_NAME = 100  # characters of the run's name in that of its socket


class RunSocket:
    """Takes connections from the moment that the writer of files has given it its place."""

    def __init__(
        self,
        setup: AgentSetup,
        selector: selectors.BaseSelector,
        stop: Callable[[], None],
        warn: Callable[[str], None],
        debuggers: Callable[[], Debuggers],
    ) -> None:
        """`stop` ends the job as Ctrl-C does, `warn` prints a line, `debuggers` gives what gets debuggers into workers."""
        self._setup = setup
        self._selector = selector
        self._stop = stop
        self._warn = warn
        self._debuggers = debuggers
        self._link: Link | None = None
        self._clients: Clients | None = None
        self._listens = False

    def open(self, link: Link) -> None:
        """Have the socket made, if the coordinator is here and there is a process that writes files."""
        files, setup = self._setup.files, self._setup
        if link.coordinator is None or files.listener is None:
            return
        self._link = link
        files.listening = self._listening
        name = f"{setup.draft.run_id[:_LONGEST_NAME]}.{os.urandom(4).hex()}"
        in_folder = setup.folder is not None and setup.inputs.spec.log_dir is None
        files.put(LISTEN, pack({"name": name, "in_folder": in_folder}))

    def _listening(self, reply: Mapping[str, Any]) -> None:
        if why := reply.get("why"):
            self._warn(f"warning: `ddplaunch ps`, `stop` and `stacks` do not reach this run: {why}")
        elif self._link is not None:
            assert self._setup.files.listener is not None
            self._listens = True
            self._selector.register(self._setup.files.listener, selectors.EVENT_READ, lambda: self._guard(self._accept))

    def _accept(self) -> None:
        if self._clients is None:
            from socket import socket  # with accept()

            from ddplaunch.agent.clients import Clients

            files = self._setup.files
            assert self._link is not None
            assert self._link.coordinator is not None
            assert files.listener is not None
            self._selector.unregister(files.listener)
            listener, files.listener = socket(fileno=files.listener.detach()), None
            self._clients = Clients(
                listener,
                self._selector,
                self._link.coordinator,
                self._setup,
                stop=self._stop,
                debuggers=self._debuggers,
                guard=self._guard,
            )

    def _guard(self, call: Callable[[], None]) -> None:
        """Call this; if it fails there is no socket any more, and the job goes on."""
        expendable(call, self._failed)

    def _failed(self, why: str) -> None:
        self.close()
        self._warn(f"warning: `ddplaunch ps`, `stop` and `stacks` no longer reach this run: {why}")

    @property
    def deadline(self) -> float | None:
        """When `expire` is to be called at the latest."""
        return self._clients.deadline if self._clients is not None else None

    def expire(self, now: float) -> None:
        """Do what the time asks for."""
        if (clients := self._clients) is not None:
            self._guard(lambda: clients.expire(now))

    def ended(self, end: JobEnd) -> None:
        """Tell those that wait for it how the job has ended."""
        if (clients := self._clients) is not None:
            self._guard(lambda: clients.ended(end))

    def close(self) -> None:
        """Take no connections any more, and drop those that there are."""
        clients, self._clients, self._link = self._clients, None, None
        if clients is not None:
            clients.close()
        if self._listens and (listener := self._setup.files.listener) is not None:
            if listener in self._selector.get_map():
                self._selector.unregister(listener)
            listener.close()
        self._listens = False
