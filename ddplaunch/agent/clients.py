"""Those that have connected to the socket of the run: bounded in number, size and time. Never waits for any of them."""

from __future__ import annotations

import os
import selectors
import shlex
import socket
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from ddplaunch import __version__
from ddplaunch.agent.client import READ_TIMEOUT, Client
from ddplaunch.agent.setup import AgentSetup
from ddplaunch.control import requests
from ddplaunch.control.questions import Answer
from ddplaunch.coordinator.coordinator import Coordinator
from ddplaunch.coordinator.link import JobEnd
from ddplaunch.coordinator.questions import Asker
from ddplaunch.fields import host as host_name
from ddplaunch.fields import line, piece, text
from ddplaunch.net.acceptor import Acceptor
from ddplaunch.process import clock
from ddplaunch.report.run_socket import uid_of
from ddplaunch.supervise.deadline import soonest
from ddplaunch.supervise.job import SELF_ID, Member

if TYPE_CHECKING:
    from ddplaunch.agent.debuggers import Debuggers

MAX_CLIENTS = 32  # at once
MAX_QUEUED = 64 << 20  # bytes waiting for all of them, above which the slowest is dropped


class Clients:
    """They are this user or root, and served one request each. `guard` makes each call from the loop."""

    def __init__(
        self,
        listener: socket.socket,
        selector: selectors.BaseSelector,
        coordinator: Coordinator,
        setup: AgentSetup,
        *,
        stop: Callable[[], None],
        debuggers: Callable[[], Debuggers],
        guard: Callable[[Callable[[], None]], None],
    ) -> None:
        self._debuggers = debuggers
        self._selector = selector
        self._coordinator = coordinator
        self._setup = setup
        self._stop = stop
        self._guard = guard
        self._clients: set[Client] = set()
        self._acceptor = Acceptor(listener, selector, self._accepted, clock=clock.now, guard=guard)
        self._acceptor.start()

    def _accepted(self, sock: socket.socket, _address: object) -> None:
        client = Client(sock, self._selector, self._guard, asked=self._asked, gone=self._gone)
        self._clients.add(client)
        if (uid := uid_of(sock)) not in (os.getuid(), 0):
            client.refuse(f"this run belongs to another user than {uid}")
        elif len(self._clients) > MAX_CLIENTS:
            client.refuse("too many commands ask this run at once")

    def _asked(self, client: Client, request: requests.Request) -> None:
        client.send(self._run())
        if isinstance(request.asked, requests.StopRun):
            client.awaits_end = True
            self._stop()
            return
        if isinstance(request.asked, requests.Attach):
            self._attach(client, request.asked.rank)
            return
        client.asker = Asker(
            answered=lambda member, answer: self._guard(lambda: self._reply(client, _node_reply(member, answer))),
            done=lambda: self._guard(lambda: client.finish(requests.Done())),
        )
        client.until = clock.now() + request.within + READ_TIMEOUT
        self._coordinator.questions.ask(request.asked, request.within, client.asker)

    def _attach(self, client: Client, rank: int) -> None:
        from ddplaunch.agent.debuggers import CannotAttach, Visitor

        member = _member_of(rank, self._coordinator.state.taking_part)
        if member is None:
            client.refuse(f"it has no rank {rank}")
        elif member.id != SELF_ID:
            where = f"node {member.place} ({host_name(member.host)})"
            client.refuse(f"rank {rank} runs on {where}, and a debugger gets only to the ranks of node 0")
        else:
            client.visitor = Visitor(client.hand_over, lambda: self._guard(lambda: client.finish(requests.Unreached())))
            try:
                self._debuggers().attach(rank, client.visitor)
            except CannotAttach as error:
                client.refuse(str(error))

    def _reply(self, client: Client, reply: requests.Reply) -> None:
        client.send(reply)
        if sum(each.queued for each in self._clients) > MAX_QUEUED:
            max(self._clients, key=lambda each: each.queued).close()

    def _gone(self, client: Client) -> None:
        self._clients.discard(client)
        if client.asker is not None:
            self._coordinator.questions.forget(client.asker)
        if client.visitor is not None:
            self._debuggers().forget(client.visitor)

    @property
    def _host(self) -> str:
        return host_name(self._setup.inputs.node.host)

    def _run(self) -> requests.Run:
        state, inputs = self._coordinator.state, self._setup.inputs
        stragglers = self._coordinator.stragglers
        program, members = inputs.spec.program, state.taking_part
        folder = self._setup.folder
        return requests.Run(
            run_id=piece(self._setup.draft.run_id),
            host=self._host,
            pid=os.getpid(),
            folder=piece((folder.path or "") if folder is not None else ""),
            command=piece(shlex.join((program.target, *program.args))),
            phase="suspended" if state.suspended_at is not None else state.phase.name.lower(),
            seconds=max(0.0, time.monotonic() - self._setup.began),
            world_size=sum(member.workers for member in members),
            nnodes=len(members),
            generation=max(0, state.generation),
            restarts=state.restarts,
            max_restarts=state.policy.max_restarts,
            ddplaunch=line(__version__),
            steps_per_second=stragglers.pace if stragglers is not None else None,
            straggler=piece(str((stragglers and stragglers.straggler) or "")),
        )

    def ended(self, end: JobEnd) -> None:
        """Tell those that wait for it how the job has ended."""
        for client in [client for client in self._clients if client.awaits_end]:
            client.finish(requests.RunEnded(end.status, end.why, text(end.text)))

    @property
    def deadline(self) -> float | None:
        """When `expire` is to be called at the latest."""
        return soonest(self._acceptor.deadline, *(client.until for client in self._clients))

    def expire(self, now: float) -> None:
        """Drop those whose time is up; accept again after a pause."""
        for client in list(self._clients):
            if client.until is not None and now >= client.until:
                client.close()
        self._acceptor.expire(now)

    def close(self) -> None:
        """Drop all, and take none any more; what the kernel has taken still arrives."""
        self._acceptor.close()
        for client in list(self._clients):
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
