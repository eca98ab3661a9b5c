"""What an observer may ask of a running job over its socket, and what comes back. Pure: bytes to values and back.

An observer connects (`record/run_socket.py`), sends one `Request`, and reads replies until the job closes the connection:

- `AskStatus`, `AskStacks` or `AskArrivals`: `Run`, then a `NodeReply` for each node as it comes, then `Done`;
- `StopRun`: `Run`, then `Done` once the job has ended;
- `Attach`: `Run`, then `Done` once a worker has come, which is itself at the other end from then on.

In place of any of these, `RequestRefused` says why there is no answer, and a node without the coordinator says `RunsElsewhere`.
Nothing is told unasked: `top` and --live ask again, `logs` reads the run folder. Each message is a frame of
`system/loop/stream.py`, without a signature, because the kernel decides who may connect. `tools/runs/client.py` asks, and
`launcher/node/clients.py` answers.

The viewer of --live is such an observer, in a process beside the front, which alone writes to the terminal. The front asks the
viewer for rows once a second, for a snapshot at a key, by a `Draw` in one packet. The reply is a message to the front as the
agent's are: `ROWS`, or a part of a snapshot for `STDERR`, see `reach/pipes.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from ddplaunch.record.run_socket import SocketPath
from ddplaunch.record.window.questions import Answer, NoAnswer, Question
from ddplaunch.system.fields import (
    Duration,
    Host,
    Keyword,
    Line,
    Malformed,
    Number,
    Pace,
    Piece,
    Size,
    Status,
    Text,
    decoder,
    line,
)

PROTOCOL = 2  # a change that one side cannot do without makes a new one; what only adds a question does not


class StopRun(Struct, frozen=True, tag="stop"):
    """End the job as Ctrl-C does; asked once more, as a second Ctrl-C does."""


class Attach(Struct, frozen=True, tag="attach"):
    """Have a worker come to the other end of the connection: one that opens a debugger there, or one that is profiled."""

    rank: Number
    profiles: bool = False  # see worker/profiler.py for what it says; a debugger replies with `Said`

    @property
    def within(self) -> float:
        """Seconds in which the main thread of the worker has to come by: a profile waits for the end of a long call in C."""
        return 20.0 if self.profiles else 3.0


Asked = Question | StopRun | Attach


class Request(Struct, frozen=True):
    """What an observer sends, once."""

    asked: Asked
    within: Annotated[float, Meta(ge=0, le=60)] = 2.0  # seconds in which all nodes are to answer
    protocol: Number = PROTOCOL


class Run(Struct, frozen=True, tag="run"):
    """The job, as its coordinator knows it."""

    run_id: Piece
    host: Host  # of the coordinator
    pid: Number  # of its agent
    folder: Piece  # "": nothing is kept
    command: Piece  # the program and its arguments
    phase: Keyword  # rendezvous, running, stopping, pausing, ended, suspended; waiting: a node alone, for a lost node 0
    seconds: Duration  # since it began
    world_size: Number  # 0: not known before all nodes have met
    nnodes: Number
    generation: Number
    restarts: Number
    max_restarts: Number
    ddplaunch: Line  # the version
    idle_for: Duration | None = None  # seconds without progress of any worker; None: not so long that it was said
    idle_why: Piece = ""  # as was said, if that is known
    steps_per_second: Pace | None = None
    steps: Size | None = None  # about how many it has made, as its collectives show
    straggler: Piece = ""  # in a sentence
    spares: Piece = ""  # the hosts that wait until a node is lost or leaves, between commas
    over_ssh: tuple[Piece, ...] = ()  # the hosts on which it started agents, by node rank, as ssh is told
    python: Piece = ""  # on these


class _ReplyingNode(Struct, frozen=True, tag="node"):
    node_rank: Number | None  # None: it takes no part in this generation
    host: Host


class NodeReply(_ReplyingNode, frozen=True, tag="node"):
    """What one node has answered."""

    answer: Answer


class Done(Struct, frozen=True, tag="done"):
    """The last reply of an agent: all nodes have answered or have had the time to, the job has ended, or the worker has come."""

    status: Status | None = None  # of the job that has ended


class RunsElsewhere(Struct, frozen=True, tag="elsewhere"):
    """This host has a node of the job, and another the coordinator, which answers for all of them."""

    run_id: Piece  # "": not known before all nodes have met
    host: Host
    srun_job: Line = ""  # by which srun reaches that host, as `other_host.job_of_srun` has it; "" for none


class Said(Struct, frozen=True):
    """What the debugger in a worker writes, after the agent's `Done`; it takes lines of text."""

    text: Text
    asks: bool = False  # it is a prompt, and a line is waited for
    ends: bool = False  # the debugger has been left, and the worker goes on


class RequestRefused(Struct, frozen=True, tag="refused"):
    """There will be no answer."""

    reason: Line
    runs_no_python: bool = False  # the worker to attach to: its main thread has not come by in time


class _Protocol(Struct):
    protocol: Number


Reply = Run | NodeReply | Done | RunsElsewhere | RequestRefused

encode = msgspec.json.Encoder().encode
protocol_of: Callable[[bytes], _Protocol] = decoder(_Protocol)
decode_request: Callable[[bytes], Request] = decoder(Request)
decode_said: Callable[[bytes], Said] = decoder(Said)
_decode_reply: Callable[[bytes], Reply] = decoder(Reply)
_decode_without_answer: Callable[[bytes], _ReplyingNode] = decoder(_ReplyingNode)


def decode_reply(payload: bytes) -> Reply:
    """Return the reply; a malformed answer of a node becomes NoAnswer. Raises Malformed: the payload is no reply."""
    try:
        return _decode_reply(payload)
    except Malformed as error:
        try:
            node = _decode_without_answer(payload)
        except Malformed:
            raise error from None
        return NodeReply(node.node_rank, node.host, NoAnswer(line(f"has sent a malformed answer ({error})")))


LONGEST_DRAW = 1 << 14  # bytes of a request


class Draw(Struct, frozen=True):
    """Draw the rows for a terminal of this size, or a snapshot of this width, which says where all workers are."""

    # of the run's socket, as the agent tells it: FOLDER, a null byte, NAME
    place: Annotated[bytes, Meta(max_length=1 << 13)]
    columns: Number
    lines: Number
    snapshot: bool = False

    @property
    def socket_path(self) -> SocketPath:
        """The place as a path."""
        folder, _, name = os.fsdecode(self.place).partition("\0")
        return SocketPath(folder, name)


decode_draw: Callable[[bytes], Draw] = decoder(Draw)
