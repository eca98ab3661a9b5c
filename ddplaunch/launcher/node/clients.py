"""The clients of the run's socket, commands such as `ddplaunch ps`: bounded in number, size and time, each served one request.

The agent, in which they are served, waits for none.
"""

from __future__ import annotations

import os
import shlex
import socket
import time
from collections.abc import Callable, Iterable

from msgspec.structs import replace

from ddplaunch import __version__
from ddplaunch.launcher.decide.job import SELF_ID, Member
from ddplaunch.launcher.job.coordinator import Coordinator
from ddplaunch.launcher.job.link import Link
from ddplaunch.launcher.node.context import AgentContext
from ddplaunch.launcher.node.events import AttachAsked, ClientAsked, ClientGone, ClientsFailed, StopAsked
from ddplaunch.reach.channel.handshake import Decoder, pack
from ddplaunch.reach.other_host import job_of_srun
from ddplaunch.record.run_socket import uid_of
from ddplaunch.record.window import requests
from ddplaunch.record.window.questions import Answer
from ddplaunch.system.errors import call_or_report
from ddplaunch.system.fields import Malformed, bounded_pace, bounded_size, line, piece
from ddplaunch.system.fields import host as host_name
from ddplaunch.system.loop.loop import READ, WRITE, Acceptor, Loop
from ddplaunch.system.loop.stream import FrameError, SendBuffer
from ddplaunch.system.redaction import Redactor

REQUEST_TIMEOUT = 5.0  # seconds in which a client has to send its request
READ_TIMEOUT = 10.0  # seconds, beyond those that the nodes have, in which it has to read the replies
_MOST_READ_AT_ONCE = 1 << 16  # bytes
MAX_CLIENTS = 32  # at once
MAX_STREAMS = 256  # to workers of other nodes, of which none keeps more than its window
MAX_QUEUED = 64 << 20  # bytes waiting for all of them, above which the slowest is dropped
TOO_MANY = "too many commands ask this run at once"
_TRAVEL_TIME = 3.0  # seconds for the agent of another node, beyond those that its worker has
_UNAUTHENTICATED = (
    "a debugger could run anything, and the nodes of this job have no token by which this one knows node 0: "
    "see --token-file, or attach on node 0 to the ranks there"
)


class Client:
    """The connection of one client: a request comes, replies go as far as they are read."""

    def __init__(self, loop: Loop, sock: socket.socket, number: int) -> None:
        """Read one request from `sock`, within REQUEST_TIMEOUT; `number` names this client in events."""
        self.number = number
        self.awaits_end = False  # of the job, of which it is told then
        self.question: ClientQuestion | None = None  # to all nodes; None: it has asked none
        self._loop = loop
        self._sock = sock  # closed or detached once the connection is lost or given away: its fileno() is negative then
        self._decoder = Decoder()
        self._buffer = SendBuffer(sock)  # replies that are yet to be sent
        self._has_asked = False
        self._has_last_reply = False  # it has been given that: the connection is closed once all is sent
        self._request_timer = loop.timer(loop.now() + REQUEST_TIMEOUT, self.close)
        loop.watch(sock, self._on_ready)

    def _on_ready(self) -> None:
        call_or_report(self._serve, lambda why: self._loop.post(ClientsFailed(why)))

    def _serve(self) -> None:
        """Send what waits, and read the request. Called by `_on_ready`, when the socket can be read or written."""
        self._flush()
        if self._sock.fileno() < 0:
            return
        try:
            data = self._sock.recv(_MOST_READ_AT_ONCE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.close()
        elif not self._has_asked:  # more than one request is dropped
            self._decoder.feed(data)
            self._post_request()

    def _post_request(self) -> None:
        """Post the request once it has arrived whole; refuse a request of another version."""
        try:
            if (payload := self._decoder.take()) is None:  # more is to come
                return
            protocol = requests.protocol_of(payload).protocol
            if protocol != requests.PROTOCOL:
                self.refuse(f"it has protocol {requests.PROTOCOL} (ddplaunch {__version__}), this command {protocol}")
                return
            request = requests.decode_request(payload)
        except (FrameError, Malformed) as error:
            self.refuse(f"ddplaunch {__version__}, which runs it, does not know this request: {error}")
            return
        self._has_asked = True
        self._request_timer.cancel()
        self._loop.post(ClientAsked(self.number, request))

    def drop_after(self, seconds: float) -> None:
        """Drop the connection in so many seconds, and in those that the client has to read the replies."""
        self._request_timer.set(self._loop.now() + seconds + READ_TIMEOUT)

    def refuse(self, reason: str, *, runs_no_python: bool = False) -> None:
        """Refuse to answer, and say why."""
        self._has_asked = True
        self.finish(requests.RequestRefused(line(reason), runs_no_python))

    def finish(self, reply: requests.Reply) -> None:
        """Send the last reply."""
        self._has_last_reply = True
        if not self._request_timer.is_set:
            self.drop_after(0.0)
        self.send(reply)

    def send(self, reply: requests.Reply) -> None:
        """Send a reply, or keep the reply until the socket has room; do nothing once the connection is closed."""
        if self._sock.fileno() < 0:
            return
        try:
            self._buffer.put(pack(requests.encode(reply)))
        except OSError:
            self.close()
            return
        self._watch()  # for what comes, and for room while there is more to send

    def hand_over(self, *last: requests.Reply) -> socket.socket | None:
        """Send these replies and return the socket, which others serve from now on; None if the connection is lost."""
        for reply in last:
            self.send(reply)
        if self._sock.fileno() < 0:
            return None
        self._loop.unwatch(self._sock)
        self._request_timer.cancel()
        given = socket.socket(fileno=self._sock.detach())  # takes no further descriptor: there may be none
        self._loop.post(ClientGone(self.number))
        return given

    @property
    def queued(self) -> int:
        """How many bytes it has not read."""
        return self._buffer.size

    def _flush(self) -> None:
        try:
            self._buffer.flush()
        except OSError:
            self.close()
            return
        self._watch()

    def _watch(self) -> None:
        if self._has_last_reply and not self._buffer.size:
            self.close()
        elif self._sock.fileno() >= 0:
            self._loop.watch(self._sock, self._on_ready, READ | WRITE if self._buffer.size else READ)

    def close(self) -> None:
        """Drop the connection."""
        if self._sock.fileno() >= 0:
            self._request_timer.cancel()
            self._loop.unwatch(self._sock)
            self._sock.close()
            self._buffer.take()
            self._loop.post(ClientGone(self.number))


class Clients:
    """All clients of a socket: they are this user or root, and what each asks is posted as `ClientAsked`."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._clients: dict[int, Client] = {}  # by number
        self._newest = 0  # number
        self._acceptor: Acceptor | None = None

    def listen(self, listener: socket.socket) -> None:
        """Take connections."""
        self._acceptor = Acceptor(self._loop, listener, self)
        self._acceptor.start()

    def on_connection(self, sock: socket.socket, _address: object) -> None:
        """Take a client that has connected. Called by the acceptor."""
        self.guard(lambda: self.add(sock))

    def on_pause(self, error: OSError) -> None:
        """Let clients wait. Called by the acceptor."""

    def guard(self, call: Callable[[], object]) -> None:
        """Call this; what fails in it ends the socket, not the job."""
        call_or_report(call, lambda why: self._loop.post(ClientsFailed(why)))

    def add(self, sock: socket.socket) -> Client:
        """Take a client at the other end of this connection."""
        self._newest += 1
        client = self._clients[self._newest] = Client(self._loop, sock, self._newest)
        if (uid := uid_of(sock)) not in (os.getuid(), 0):
            client.refuse(f"this run belongs to another user than {uid}")
        elif len(self._clients) > MAX_CLIENTS:
            client.refuse(TOO_MANY)
        return client

    def get(self, number: int) -> Client | None:
        """Return the client of this number while its connection is there."""
        return self._clients.get(number)

    def forget(self, number: int) -> Client | None:
        """Forget a client that has gone, and return it."""
        return self._clients.pop(number, None)

    def reply(self, client: Client, reply: requests.Reply) -> None:
        """Send a reply; of clients that read too little the slowest is dropped."""
        client.send(reply)
        if sum(each.queued for each in self._clients.values()) > MAX_QUEUED:
            max(self._clients.values(), key=lambda each: each.queued).close()

    def on_job_ended(self, status: int) -> None:
        """Tell those that wait for the end of the job with which exit status it has ended."""
        for client in [client for client in self._clients.values() if client.awaits_end]:
            client.finish(requests.Done(status))

    def close(self) -> None:
        """Drop all, and take none any more; what the kernel has taken still arrives."""
        if self._acceptor is not None:
            self._acceptor.close()
        for client in list(self._clients.values()):
            client.close()


class RunClients(Clients):
    """The clients of one agent. The coordinator's agent answers for the job; others attach debuggers for it, or name its host."""

    def __init__(self, loop: Loop, context: AgentContext, link: Link) -> None:
        super().__init__(loop)
        self._context = context
        self._link = link
        # those for which the coordinator asks, which has their connections
        self._clients_of_coordinator: set[Client] = set()

    def add_of_coordinator(self, sock: socket.socket) -> None:
        """Take a client that has connected to the coordinator, which asks for it over this socket."""
        self._clients_of_coordinator.add(self.add(sock))

    def answer(self, number: int, request: requests.Request) -> None:
        """Answer the request of a client; for some requests, post an event that the agent answers."""
        asked = request.asked
        if (client := self._clients.get(number)) is None:  # its connection was lost meanwhile
            return
        if self._link.coordinator is not None:
            self._answer_for_job(client, request, self._link.coordinator)
        elif self._link.is_waiting:  # for node 0, and with it the coordinator, to be started again
            self._answer_alone(client, request)
        elif client not in self._clients_of_coordinator:  # it has come here, and the coordinator is on another host
            client.finish(self._where_coordinator_is())
        elif not isinstance(asked, requests.Attach):
            client.refuse("the coordinator answers that itself")
        elif not asked.profiles and not self._context.draft.authenticated:  # a debugger runs any code
            client.refuse(_UNAUTHENTICATED)
        else:
            self._loop.post(AttachAsked(number, asked))

    def _answer_for_job(self, client: Client, request: requests.Request, coordinator: Coordinator) -> None:
        """Answer a client where the coordinator is: describe the whole run first, then stop it, attach, or ask all nodes."""
        client.send(self._describe_run(coordinator))
        match request.asked:
            case requests.StopRun():
                client.awaits_end = True
                self._loop.post(StopAsked())
            case requests.Attach() as asked:
                self._attach(client, request, asked, coordinator)
            case question:
                client.question = ClientQuestion(self, client)
                client.drop_after(request.within)  # seconds of the nodes, after which it has some to read
                coordinator.questions.ask(question, request.within, client.question)

    def _answer_alone(self, client: Client, request: requests.Request) -> None:
        """Answer a client of a node that waits for a lost node 0: it has no workers, and can be stopped."""
        client.send(replace(self._describe_node(), phase="waiting"))
        if isinstance(request.asked, requests.StopRun):
            client.awaits_end = True
            self._loop.post(StopAsked())
        elif isinstance(request.asked, requests.Attach):
            client.refuse("it waits for node 0, and has no workers")
        else:
            client.finish(requests.Done())  # to a question about workers, of which there are none

    def _attach(
        self,
        client: Client,
        request: requests.Request,
        asked: requests.Attach,
        coordinator: Coordinator,
    ) -> None:
        """Connect a client that wants to debug or profile a rank to the agent of the rank's node, and pass the request on."""
        member = _member_of(asked.rank, coordinator.state.members.taking_part)
        if member is None:
            client.refuse(f"it has no rank {asked.rank}")
        elif member.id == SELF_ID:  # this node
            self._loop.post(AttachAsked(client.number, asked))
        elif len(coordinator.streams) >= MAX_STREAMS:
            client.refuse(TOO_MANY)
        elif (sock := client.hand_over()) is not None:
            node = f"node {member.node_rank} ({host_name(member.host)})"
            if_late = pack(requests.encode(requests.RequestRefused(line(f"{node} does not answer"))))
            within = asked.within + _TRAVEL_TIME  # seconds of the worker, and of the agent there
            # the client gets `if_late` if nothing has come from there by then
            coordinator.streams.open(member.id, sock, pack(requests.encode(request)), within, if_late)

    def forget(self, number: int) -> Client | None:
        """Have nothing more found out for a client that has gone."""
        client = super().forget(number)
        if client is not None:
            self._clients_of_coordinator.discard(client)
            if client.question is not None and self._link.coordinator is not None:
                self._link.coordinator.questions.forget(client.question)
        return client

    def _where_coordinator_is(self) -> requests.RunsElsewhere:
        """Return the reply of another node than the coordinator's: the host of that, by the allocation or the rendezvous."""
        allocation = self._context.inputs.allocation
        of_rendezvous = allocation.rendezvous.addresses if allocation.rendezvous is not None else ()
        # a command that has started the agents coordinates them, and its host is that of the rendezvous
        of_allocation = () if allocation.has_front else allocation.hosts[:1]
        hosts = (*of_allocation, *of_rendezvous, "")  # "": not known
        return requests.RunsElsewhere(
            run_id=piece(self._context.run_id),
            host=host_name(hosts[0]),
            srun_job=line(job_of_srun(self._context.inputs.env, hosts[0]) if allocation.cluster == "slurm" else ""),
        )

    def _describe_run(self, coordinator: Coordinator) -> requests.Run:
        """Return what `ddplaunch ps` shows of this run: what the coordinator knows of all nodes."""
        state, allocation = coordinator.state, self._context.inputs.allocation
        members, idleness = state.members.taking_part, state.idleness
        is_suspended = state.limits.suspended_at is not None
        is_idle = idleness.is_printed_since_progress  # for so long that the user was told
        described = replace(
            self._describe_node(),
            phase="suspended" if is_suspended else state.phase.name.lower(),
            world_size=sum(member.workers for member in members),
            nnodes=len(members),
            generation=max(0, state.generation.number),  # -1 before the first one
            restarts=state.restarts.number,
            idle_for=max(0.0, self._loop.now() - idleness.progress_at) if is_idle else None,
            idle_why=piece(self._context.reporter.story.idle_why) if is_idle else "",
            spares=piece(", ".join(member.host for member in state.spares)),  # hosts not needed yet
            over_ssh=tuple(piece(host.name) for host in allocation.hosts_to_start_on)
            if allocation.starter == "ssh"
            else (),
        )
        if (stragglers := coordinator.stragglers) is None:  # they are not looked for
            return described
        return replace(
            described,
            steps_per_second=bounded_pace(stragglers.pace),
            steps=bounded_size(stragglers.steps) if stragglers.steps is not None else None,
            straggler=piece(str(stragglers.straggler or "")),
        )

    def _describe_node(self) -> requests.Run:
        """Return what this node knows of the run before any worker is started, each text cut to what a reply may hold."""
        inputs, folder = self._context.inputs, self._context.folder
        program = inputs.spec.program
        argv = Redactor(self._context.known_secrets).argv(program.shown)
        return requests.Run(
            run_id=piece(self._context.run_id or self._context.draft.run_id),
            host=host_name(inputs.node.host),
            pid=os.getpid(),
            folder=piece((folder.path or "") if folder is not None else ""),
            command=piece(shlex.join(argv)),
            phase="rendezvous",
            seconds=max(0.0, time.monotonic() - self._context.reporter.story.began),
            world_size=0,
            nnodes=0,
            generation=0,
            restarts=0,
            max_restarts=inputs.spec.max_restarts,
            ddplaunch=line(__version__),
            python=piece(inputs.node.python),
        )


class ClientQuestion:
    """The question of a client to all nodes: each answer is a reply; the last reply says that none is missing any more."""

    def __init__(self, clients: RunClients, client: Client) -> None:
        self._clients = clients
        self._client = client

    def on_answer(self, member: Member, answer: Answer) -> None:
        """Pass on the answer of a node. Called by the questions of the coordinator."""
        self._clients.guard(lambda: self._clients.reply(self._client, _node_reply(member, answer)))

    def on_all_answered(self) -> None:
        """Send the last reply. Called by the questions of the coordinator."""
        self._clients.guard(lambda: self._client.finish(requests.Done()))


def _member_of(rank: int, members: Iterable[Member]) -> Member | None:
    """The node that a rank runs on: ranks are counted node by node."""
    for member in sorted(members, key=lambda member: member.node_rank or 0):
        if rank < member.workers:
            return member
        rank -= member.workers
    return None


def _node_reply(member: Member, answer: Answer) -> requests.NodeReply:
    return requests.NodeReply(node_rank=member.node_rank, host=host_name(member.host), answer=answer)
