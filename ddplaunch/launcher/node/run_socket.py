"""The socket at which commands such as `ddplaunch ps` ask the run: at the coordinator. Those of other agents say where to ask.

Costs nothing until somebody asks.
What fails here never ends a job: its files may have been replaced by those of another version since it started.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ddplaunch.launcher.job.link import Link
from ddplaunch.launcher.job.orders import ClientOrder, JobEnd
from ddplaunch.launcher.node.context import AgentContext
from ddplaunch.launcher.node.events import QuestionAnswered
from ddplaunch.reach.pipes import SOCKET
from ddplaunch.record.file_queue import LISTEN, pack
from ddplaunch.system.errors import call_or_report
from ddplaunch.system.fields import line
from ddplaunch.system.loop.loop import Loop

if TYPE_CHECKING:  # only a job that is looked into needs it
    from ddplaunch.launcher.node.clients import Client, RunClients
    from ddplaunch.launcher.node.generations import Generations
    from ddplaunch.launcher.node.questions import Questions
    from ddplaunch.plan import Plan
    from ddplaunch.reach.channel.streams import Chunk, Streams
    from ddplaunch.record.window.questions import Ask
    from ddplaunch.record.window.requests import Request
    from ddplaunch.spec.outcome import WorkerExit

_LONGEST_NAME = 100  # characters of the run's name in that of its socket


class RunSocket:
    """The socket of the run in this process. The process that writes files gives it a name on the disk; then clients can come."""

    def __init__(self, loop: Loop, context: AgentContext) -> None:
        self._loop = loop
        self._context = context
        self._link: Link | None = None  # to the coordinator; None before `open`, and after `close`
        self._listens = False  # this object does, until the first client comes: then `_clients` does
        self._clients: RunClients | None = None  # once there is one
        # of clients that are connected to the coordinator, which passes on what they send, each under an ascending number
        self._streams: Streams | None = None
        self._newest_number = 0  # of these streams

    def open(self, link: Link) -> None:
        """Have the process that writes files give the socket a name. Simulated nodes, except for the coordinator's, have none."""
        files, context = self._context.files, self._context
        self._link = link
        is_simulated_node = link.coordinator is None and context.inputs.spec.simulate
        if files.listener is None or is_simulated_node:
            return
        files.on_socket_reply = self._on_socket_named
        name = f"{context.draft.run_id[:_LONGEST_NAME]}.{os.urandom(4).hex()}"
        # the socket lies in the folder of the run, unless that is the user's
        is_folder_ours = context.folder is not None and context.inputs.spec.log_dir is None
        files.put(LISTEN, pack({"name": name, "in_folder": is_folder_ours}))

    def _on_socket_named(self, reply: Mapping[str, Any]) -> None:
        """Take the reply of the process that writes files: begin to listen, and tell --live where, or report why that failed."""
        if self._link is None:  # the socket was closed meanwhile
            return
        is_coordinator = self._link.coordinator is not None
        if why := reply.get("why"):
            if is_coordinator:  # which is the one that users ask
                self._warn_that_commands(f"do not reach this run: {why}")
            return
        assert self._context.files.listener is not None
        self._listens = True
        self._loop.watch(self._context.files.listener, lambda: call_or_report(self._on_first_connection, self.fail))
        if is_coordinator and self._context.inputs.spec.live:
            self._context.queue.put(SOCKET, os.fsencode(f"{reply['folder']}\0{reply['name']}"))

    def _on_first_connection(self) -> None:
        """Hand the listening socket to `RunClients`, which takes the connection, and all others. Called by the loop."""
        files = self._context.files
        listener, files.listener = files.listener, None
        assert listener is not None
        self._loop.unwatch(listener)
        self._listens = False
        self._made_clients().listen(listener)

    def _made_clients(self) -> RunClients:
        if self._clients is None:
            from ddplaunch.launcher.node.clients import RunClients

            assert self._link is not None
            self._clients = RunClients(self._loop, self._context, self._link)
        return self._clients

    def client(self, number: int) -> Client | None:
        """Return the client of this number while its connection is there."""
        return self._clients.get(number) if self._clients is not None else None

    def serve(self, number: int, call: Callable[[Client], object]) -> None:
        """Have `call` serve the client of this number, while its connection is there."""
        if (client := self.client(number)) is not None:
            call_or_report(lambda: call(client), self.fail)

    def answer(self, client: int, request: Request) -> None:
        """Answer the request of a client."""
        if (clients := self._clients) is not None:
            call_or_report(lambda: clients.answer(client, request), self.fail)

    def take(self, chunk: Chunk) -> None:
        """Take a chunk of what a client has sent to the coordinator, which needs this node to answer it."""
        call_or_report(lambda: self._take_chunk(chunk), self.fail)

    def _take_chunk(self, chunk: Chunk) -> None:
        """Pass on a chunk of what a client of the coordinator says; its first chunk makes a client here that stands for it.

        A socket pair connects that client with the stream of chunks: it is answered as one that came to our own socket.
        """
        if self._link is None:  # the socket is closed
            return
        if self._streams is None:
            from ddplaunch.reach.channel.streams import Streams

            self._streams = Streams(self._loop, self)
        # a chunk without data belongs to a stream that has ended here
        is_first_chunk = chunk.number > self._newest_number and bool(chunk.data)
        if is_first_chunk:
            import socket

            self._newest_number = chunk.number
            end_of_stream, end_of_client = socket.socketpair()
            end_of_client.setblocking(False)
            self._streams.add(chunk.number, end_of_stream)
            self._made_clients().add_of_coordinator(end_of_client)
        self._streams.take(chunk)

    def send_chunk(self, chunk: Chunk) -> None:
        """Send what a client here says to the coordinator. Called by the streams."""
        if self._link is not None:
            self._link.send(chunk)

    def on_stream_ended(self, number: int) -> None:
        """Do nothing: the client at the other end of the socket pair has ended, or will. Called by the streams."""

    def forget(self, client: int) -> None:
        """Have nothing more found out for a client that has gone."""
        if (clients := self._clients) is not None:
            call_or_report(lambda: clients.forget(client), self.fail)

    def fail(self, why: str) -> None:
        """Do without the socket, because something failed; the job goes on."""
        self.close()
        self._warn_that_commands(f"no longer reach this run: {why}")

    def _warn_that_commands(self, what: str) -> None:
        self._context.reporter.print(f"warning: `ddplaunch ps`, `stop` and `stacks` {what}")

    def ended(self, end: JobEnd) -> None:
        """Tell those that wait for it how the job has ended."""
        if (clients := self._clients) is not None:
            call_or_report(lambda: clients.on_job_ended(end.status), self.fail)

    def close(self) -> None:
        """Take no connections any more, and drop those that there are; called a second time, do nothing."""
        parts = self._clients, self._streams
        self._clients = self._streams = self._link = None  # what follows from their end comes here no more
        for part in parts:
            if part is not None:
                part.close()
        if self._listens and (listener := self._context.files.listener) is not None:
            self._loop.unwatch(listener)
            listener.close()
        self._listens = False


class ClientOrders:
    """In the agent of each node: carries out what the coordinator orders for its clients, as questions about the workers here."""

    def __init__(self, loop: Loop, context: AgentContext, generations: Generations, run_socket: RunSocket) -> None:
        self._loop = loop
        self._context = context
        self._generations = generations
        self._run_socket = run_socket
        self._questions: Questions | None = None  # once a question has come

    def carry_out(self, order: ClientOrder, plan: Plan, exits: Sequence[WorkerExit]) -> None:
        """Answer a question or give it up, or pass on what a client says; `exits`: how some workers of the `plan` have ended."""
        from ddplaunch.record.window.questions import Ask, Forget  # only a job that is looked into needs it

        match order.passed_on:
            case Ask(number) as ask:
                call_or_report(lambda: self._answer(ask, plan, exits), partial(self._on_answer_failed, number))
            case Forget(number):
                if self._questions is not None:
                    self._questions.forget(number)
            case chunk:  # a piece of what a client says to a worker: to a debugger or a profile
                self._run_socket.take(chunk)

    def _answer(self, ask: Ask, plan: Plan, exits: Sequence[WorkerExit]) -> None:
        from ddplaunch.launcher.node.questions import Questions  # few jobs are asked

        if self._questions is None:
            self._questions = Questions(self._loop, self._context, self._generations)
        self._questions.answer(ask, plan, exits)

    def _on_answer_failed(self, number: int, why: str) -> None:
        """Tell the user, and who asked, that a question could not be answered, as after an upgrade of our files."""
        from ddplaunch.record.window.questions import Answered, NoAnswer

        self._context.reporter.print(f"warning: a question could not be answered: {why}")
        self._loop.post(QuestionAnswered(Answered(number, NoAnswer(line(f"could not answer: {why}")))))
