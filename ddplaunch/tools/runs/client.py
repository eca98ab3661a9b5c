"""The asking side of the sockets of running jobs, in `ps`, `stop` and the like: all are asked at once, each for a bounded time.

Believes nothing that is no typed reply.
"""

from __future__ import annotations

import selectors
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress

from msgspec import Struct

from ddplaunch.reach.channel.handshake import LIMIT, Decoder, pack
from ddplaunch.record import run_socket
from ddplaunch.record.run_socket import SocketPath
from ddplaunch.record.seen import Sample
from ddplaunch.record.window import requests
from ddplaunch.record.window.questions import NodeStacks, NodeStatus, Question, WorkerStatus
from ddplaunch.system.errors import LaunchError
from ddplaunch.system.fields import Malformed
from ddplaunch.system.loop.stream import FrameError
from ddplaunch.system.process import clock, tree
from ddplaunch.system.process.apart import disk_watch_paused

_CHUNK = 1 << 16  # bytes
_MOST_REPLIES = 100_000  # of one run
_SILENT = "does not answer"
_STOPPED = "does not answer: its agent is stopped, which SIGCONT ends"
_SUSPENDED = "is suspended"  # as a whole, so that nothing answers
_MARGIN = 1.0  # seconds that replies may take beyond those that the nodes have


class RunReplies(Struct):
    """The replies of a run, and the problem that kept the run from replying to all; "" for none."""

    socket_path: SocketPath
    run: requests.Run | None = None
    nodes: Sequence[requests.NodeReply] = ()
    problem: str = ""
    # set by an agent that does not coordinate its job: where that is asked about, which is all that this agent says
    elsewhere: requests.RunsElsewhere | None = None

    @property
    def workers(self) -> list[tuple[requests.NodeReply, WorkerStatus]]:
        """The workers that nodes have named, by node rank, each with its node; a spare has none until it takes part."""
        has_ranks = self.run is not None and self.run.world_size > 0  # else nodes get theirs as they meet
        taking_part = [node for node in self.nodes if node.node_rank is not None or not has_ranks]
        nodes = sorted(taking_part, key=lambda node: (node.node_rank is None, node.node_rank))
        return [(node, each) for node in nodes if isinstance(node.answer, NodeStatus) for each in node.answer.workers]

    @property
    def samples(self) -> list[Sample]:
        """What nodes have seen of their workers' stacks."""
        return [
            sample
            for node in self.nodes
            if isinstance(node.answer, NodeStacks)
            for sample in node.answer.samples(node.host)
        ]


def ask(path: SocketPath, asked: Question, within: float) -> RunReplies | None:
    """Ask one run, and return its replies; None if the run has ended."""
    return next(iter(ask_all([path], asked, within)), None)


def ask_all(paths: Sequence[SocketPath], question: Question, within: float) -> list[RunReplies]:
    """Ask all these runs the same question, and return their replies; a run that has ended is left out.

    The nodes of each run have `within` seconds to answer; what is missing then stands in the `problem` of the replies.
    """
    with ExitStack() as stack, selectors.DefaultSelector() as selector:
        conversations: list[_Conversation] = []
        silent: list[RunReplies] = []
        for path in paths:
            try:
                sock = stack.enter_context(path.connect())
            except ConnectionRefusedError:  # nobody listens: a killed run has left its socket
                run_socket.remove_refusing(path.folder, path.name)
                continue
            except BlockingIOError:
                silent.append(RunReplies(path, problem=_SILENT))  # the kernel's queue of those who wait for it is full
                continue
            except (OSError, LaunchError):
                continue  # it has ended meanwhile, or is not ours
            conversation = _Conversation(path, sock)
            conversations.append(conversation)
            sock.setblocking(False)
            with suppress(OSError):  # it has ended meanwhile, which reading from it shows
                sock.send(pack(requests.encode(requests.Request(question, within))))
            selector.register(sock, selectors.EVENT_READ, conversation)
        until = clock.now() + within + _MARGIN
        while selector.get_map() and (ready := clock.wait(selector, until)):
            for key, _ in ready:
                may_say_more = key.data.read()
                if not may_say_more:
                    selector.unregister(key.fileobj)
        return [*silent, *(conversation.replies() for conversation in conversations if not conversation.has_gone)]


def replies_of(sock: socket.socket, request: requests.Asked, within: float) -> Iterator[requests.Reply | requests.Said]:
    """Ask a run, and yield each reply as it comes, until the connection is closed; behind the agent's, those of a debugger.

    Raises:
        TimeoutError: the first reply took more than `within` seconds; the others may take any time.
        OSError: the connection was lost.
        Malformed: a reply is none that this version knows.
    """
    until = clock.now() + within
    sock.sendall(pack(requests.encode(requests.Request(request))))
    with selectors.DefaultSelector() as selector:
        selector.register(sock, selectors.EVENT_READ)
        if not clock.wait(selector, until):
            raise TimeoutError
    decoder = Decoder(LIMIT)
    has_agent_done = False  # it has sent its last reply: whoever speaks now is the debugger that was asked for
    while data := _received(sock):
        for frame in _frames(decoder, data):
            reply = requests.decode_said(frame) if has_agent_done else requests.decode_reply(frame)
            has_agent_done = has_agent_done or isinstance(reply, requests.Done)
            yield reply


def _received(sock: socket.socket) -> bytes:
    with disk_watch_paused():
        return sock.recv(_CHUNK)


def _frames(decoder: Decoder, data: bytes) -> Iterator[bytes]:
    """Yield the frames that are complete with these bytes; raise Malformed if a run sends anything else."""
    decoder.feed(data)
    try:
        while (frame := decoder.take()) is not None:
            yield frame
    except FrameError as error:
        raise Malformed(str(error)) from None


class _Conversation:
    """The replies of one run to a question, as they come."""

    def __init__(self, path: SocketPath, sock: socket.socket) -> None:
        """Expect replies at `sock`, which is connected to `path`."""
        self._sock = sock
        self._decoder = Decoder(LIMIT)
        self._nodes: list[requests.NodeReply] = []
        self._replies = RunReplies(path, nodes=self._nodes)
        self._is_complete = False
        self.has_gone = False  # it ended before it had answered anything

    def read(self) -> bool:
        """Take what has come; return whether the run may say more."""
        try:
            data = self._sock.recv(_CHUNK)
        except BlockingIOError:
            return True
        except OSError:
            data = b""
        if not data:
            self.has_gone = self._replies.run is None and self._replies.elsewhere is None
            return False
        try:
            for frame in _frames(self._decoder, data):
                is_last = self._on_reply(requests.decode_reply(frame))
                if is_last:
                    return False
        except Malformed as error:
            self._replies.problem = f"gives an answer that this version does not understand: {error}"
            return False
        return len(self._nodes) <= _MOST_REPLIES  # a run that sends more is not listened to any longer

    def _on_reply(self, reply: requests.Reply) -> bool:
        """Keep a reply of a run; return whether it is the last one."""
        replies = self._replies
        match reply:
            case requests.Run():
                replies.run = reply
            case requests.RunsElsewhere():
                replies.elsewhere = reply
                return True
            case requests.NodeReply():
                self._nodes.append(reply)
            case requests.RequestRefused(reason):
                replies.problem = f"refuses to answer: {reason}"
                return True
            case requests.Done():
                self._is_complete = True
                return True
        return False

    def replies(self) -> RunReplies:
        """Return what has come, with the problem that kept the run from saying all."""
        if not self._replies.problem and not self._is_complete:
            self._replies.problem = _why_silent(self._sock)
        return self._replies


def _why_silent(sock: socket.socket) -> str:
    """Say why a run does not answer, by the state of its processes: "T" in proc(5) is a stopped one.

    The process that listens at the socket is the writer of files, a child of the agent. If scontrol suspends a job, both are
    stopped; a signal stops the agent alone.
    """
    with suppress(OSError):
        writer = tree.look(run_socket.pid_of(sock))
        if writer is not None and writer.state == "T":
            return _SUSPENDED
        agent = tree.look(writer.parent) if writer is not None else None
        if agent is not None and agent.state == "T":
            return _STOPPED
    return _SILENT
