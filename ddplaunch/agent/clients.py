"""Those that have connected to the socket of the run: bounded in number, size and time. Never waits for any of them."""

from __future__ import annotations

import os
import shlex
import socket
import time
from collections.abc import Callable, Iterable
from functools import partial

from ddplaunch import __version__
from ddplaunch.agent.client import Client
from ddplaunch.agent.context import AgentContext
from ddplaunch.agent.events import AttachAsked, ClientsFailed, StopAsked
from ddplaunch.control import requests
from ddplaunch.control.questions import Answer
from ddplaunch.coordinator.coordinator import Coordinator
from ddplaunch.coordinator.link import JobEnd
from ddplaunch.coordinator.questions import Asker
from ddplaunch.errors import expendable
from ddplaunch.fields import host as host_name
from ddplaunch.fields import line, pace, piece, text
from ddplaunch.loop.loop import Loop
from ddplaunch.net.acceptor import Acceptor
from ddplaunch.report.run_socket import uid_of
from ddplaunch.supervise.job import SELF_ID, Member

MAX_CLIENTS = 32  # at once
MAX_QUEUED = 64 << 20  # bytes waiting for all of them, above which the slowest is dropped


class Clients:
    """They are this user or root, and served one request each."""

    def __init__(self, loop: Loop, context: AgentContext, coordinator: Coordinator, listener: socket.socket) -> None:
        self._loop = loop
        self._context = context
        self._coordinator = coordinator
        self._clients: dict[int, Client] = {}  # by number
        self._last = 0  # number given
        self._acceptor = Acceptor(loop, listener, lambda sock, _: self._guard(partial(self._accepted, sock)))
        self._acceptor.start()

    def _guard(self, call: Callable[[], None]) -> None:
        expendable(call, lambda why: self._loop.post(ClientsFailed(why)))

    def _accepted(self, sock: socket.socket) -> None:
        self._last += 1
        client = self._clients[self._last] = Client(self._loop, sock, self._last)
        if (uid := uid_of(sock)) not in (os.getuid(), 0):
            client.refuse(f"this run belongs to another user than {uid}")
        elif len(self._clients) > MAX_CLIENTS:
            client.refuse("too many commands ask this run at once")

    def get(self, number: int) -> Client | None:
        """Return the client of this number while its connection is there."""
        return self._clients.get(number)

    def answer(self, number: int, request: requests.Request) -> None:
        """Answer the request of a client, or post what it asks of the agent."""
        if (client := self._clients.get(number)) is None:
            return
        client.send(self._run())
        match request.asked:
            case requests.StopRun():
                client.awaits_end = True
                self._loop.post(StopAsked())
            case requests.Attach(rank):
                self._attach(client, rank)
            case question:
                client.asker = Asker(
                    answered=lambda member, answer: self._guard(
                        lambda: self._reply(client, _node_reply(member, answer))
                    ),
                    done=lambda: self._guard(lambda: client.finish(requests.Done())),
                )
                client.limit(request.within)
                self._coordinator.questions.ask(question, request.within, client.asker)

    def _attach(self, client: Client, rank: int) -> None:
        member = _member_of(rank, self._coordinator.state.taking_part)
        if member is None:
            client.refuse(f"it has no rank {rank}")
        elif member.id != SELF_ID:
            where = f"node {member.place} ({host_name(member.host)})"
            client.refuse(f"rank {rank} runs on {where}, and a debugger gets only to the ranks of node 0")
        else:
            self._loop.post(AttachAsked(client.number, rank))

    def _reply(self, client: Client, reply: requests.Reply) -> None:
        client.send(reply)
        if sum(each.queued for each in self._clients.values()) > MAX_QUEUED:
            max(self._clients.values(), key=lambda each: each.queued).close()

    def forget(self, number: int) -> None:
        """Have nothing more found out for a client that has gone."""
        client = self._clients.pop(number, None)
        if client is not None and client.asker is not None:
            self._coordinator.questions.forget(client.asker)

    @property
    def _host(self) -> str:
        return host_name(self._context.inputs.node.host)

    def _run(self) -> requests.Run:
        state, inputs = self._coordinator.state, self._context.inputs
        stragglers = self._coordinator.stragglers
        program, members = inputs.spec.program, state.taking_part
        folder = self._context.folder
        return requests.Run(
            run_id=piece(self._context.draft.run_id),
            host=self._host,
            pid=os.getpid(),
            folder=piece((folder.path or "") if folder is not None else ""),
            command=piece(shlex.join((program.target, *program.args))),
            phase="suspended" if state.suspended_at is not None else state.phase.name.lower(),
            seconds=max(0.0, time.monotonic() - self._context.began),
            world_size=sum(member.workers for member in members),
            nnodes=len(members),
            generation=max(0, state.generation),
            restarts=state.restarts,
            max_restarts=state.policy.max_restarts,
            ddplaunch=line(__version__),
            steps_per_second=pace(stragglers.pace) if stragglers is not None else None,
            straggler=piece(str((stragglers and stragglers.straggler) or "")),
        )

    def ended(self, end: JobEnd) -> None:
        """Tell those that wait for it how the job has ended."""
        for client in [client for client in self._clients.values() if client.awaits_end]:
            client.finish(requests.RunEnded(end.status, end.why, text(end.text)))

    def close(self) -> None:
        """Drop all, and take none any more; what the kernel has taken still arrives."""
        self._acceptor.close()
        for client in list(self._clients.values()):
            client.close()


def _member_of(rank: int, members: Iterable[Member]) -> Member | None:
    """The node that a rank runs on: ranks are counted node by node."""
    for member in sorted(members, key=lambda member: member.place or 0):
        if rank < member.workers:
            return member
        rank -= member.workers
    return None


def _node_reply(member: Member, answer: Answer) -> requests.NodeReply:
    return requests.NodeReply(node_rank=member.place, host=host_name(member.host), answer=answer)
