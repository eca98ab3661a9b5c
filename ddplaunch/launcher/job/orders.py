"""The orders that the coordinator gives an agent, the reports that an agent sends back, and what a link posts to its loop.

Orders and reports travel as they are, as JSON, between nodes. Their fields have types that bound what a peer may send. Those
about questions are in `record/window/questions.py`, which only a job that somebody looks into imports.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from msgspec import Meta, Struct

from ddplaunch.launcher.decide import node
from ddplaunch.plan import Agreed
from ddplaunch.spec.outcome import StartFailure, Traces, WorkerExit
from ddplaunch.system import exitcodes
from ddplaunch.system.fields import (
    Duration,
    Host,
    HostOrNone,
    Keyword,
    Line,
    Number,
    Piece,
    Port,
    Signal,
    SignalOrNone,
    Status,
    Term,
    Text,
    line,
)

if TYPE_CHECKING:
    from ddplaunch.reach.channel.streams import Chunk
    from ddplaunch.record.window.questions import Answered, Ask, Forget, StacksAtEnd

MAX_LEFTOVERS = 100  # processes that are named
MAX_ADDRESSES = 64  # of one node


class Forward(Struct, frozen=True, tag="forward"):
    """Pass this signal on to the workers: from a command that has started the agents, and from there to each agent."""

    signum: Signal


# --- orders: what the coordinator sends an agent


class Generation(Struct, frozen=True, kw_only=True, tag="begin"):
    """One start of all workers, as the coordinator has set it for a node."""

    number: Number
    term: Term  # greater than that of any generation before, in this run and in earlier runs: DDPLAUNCH_TERM
    restarts: Number  # how many of --max-restarts are used
    port: Port  # MASTER_PORT
    # seconds that the node's lease may last at most; 0.0: as the node has it, which is for ever in a job of fixed size
    lease: Duration = 0.0
    agreed: Agreed | None = None  # between several nodes; None: the node's draft is its plan
    ranks_of_draft: tuple[Number, ...] = ()  # the ranks of this node then

    @property
    def ranks(self) -> frozenset[int]:
        """The ranks of the workers of this node."""
        return frozenset(self.ranks_of_draft if self.agreed is None else self.agreed.ranks)

    @property
    def alone(self) -> bool:
        """Whether no other node takes part."""
        return self.agreed is None or self.agreed.nnodes == 1


class JobEnd(Struct, frozen=True, tag="quit"):
    """How the job has ended, at least for this node."""

    status: Status
    why: Keyword  # as in `summary.json`
    text: Text = ""  # for the user; "" if there is none
    requeue: SignalOrNone = 0  # the notice after which the job should go back into the queue


class Lead(Struct, frozen=True, tag="lead"):
    """Be the first node of the generation that begins: reserve MASTER_PORT, and listen for the other nodes."""

    meeting: Number  # counted by the coordinator: each try to bring the nodes of a generation together has another one
    master_port: Annotated[int, Meta(ge=0, le=65535)]  # 0: any
    port_origin: Line  # the option, or the reason, for this very port; "" if it may be any
    again: bool  # whether the coordinator tries again if the port is taken


class MeetAt(Struct, frozen=True, tag="meet_at"):
    """Where the other nodes find the first one: its answer to `Lead`, and an order to the others to reach it there.

    Each of them says which way it has come, and later that it hears the first node no longer.
    """

    meeting: Number
    master_port: Port
    addresses: Annotated[tuple[Host, ...], Meta(max_length=MAX_ADDRESSES)]  # of the first node
    listen_port: Port  # at which the first node listens for the others while the generation runs


_StopOrder = node.StopOrdered | node.AllStacksRead | node.KillOrdered
SentOrder = Generation | JobEnd | Forward | _StopOrder | node.StoreOrdered

# --- reports: what an agent sends the coordinator


class NodeEnd(Struct, frozen=True, tag="ended"):
    """Nothing of a generation is left on this node."""

    generation: Number
    exits: tuple[WorkerExit, ...]
    start_failure: StartFailure | None
    # processes that could not be ended, each as in a sentence
    leftovers: Annotated[tuple[Line, ...], Meta(max_length=MAX_LEFTOVERS)]
    traces: Traces


class Warned(Struct, frozen=True, tag="warned"):
    """Something that holds for this node, for a line of the coordinator about all nodes for which it holds."""

    text: Line
    is_warning: bool = True

    @classmethod
    def of(cls, text: str, is_warning: bool) -> Warned:
        """Return the message of a text that may be longer than a line, or have control characters."""
        return cls(line(text), is_warning)


HINT_WITHOUT_NODE_0 = "no job begins without node 0: make another node the first one"


class Goodbye(Struct, frozen=True, tag="goodbye"):
    """This node follows the coordinator no longer: it was silent for too long, or the node has failed its health check."""

    reason: Piece  # as in a sentence of the coordinator
    has_ended: bool  # nothing of a generation is left here; else its workers are being stopped


class GroupMade(Struct, frozen=True, tag="group_made"):
    """A worker of this node has made a process group, the first one of its generation."""


class CannotLead(Struct, frozen=True, tag="cannot_lead"):
    """This node cannot have MASTER_PORT, or cannot listen for the others."""

    meeting: Number
    is_taken: bool  # the port may soon be free
    reason: Piece = ""
    hint: Piece = ""
    status: Status = exitcodes.USAGE


class Reached(Struct, frozen=True, tag="reached"):
    """This node has reached the first one; or it has not, or hears the first one no longer: then without an address."""

    meeting: Number
    address: HostOrNone  # of those that were given; "": none
    reason: Line = ""  # then, as in a sentence: "silent for 10 s"


MeetingReport = MeetAt | CannotLead | Reached
SentReport = node.Reports | MeetingReport | NodeEnd | Warned | Goodbye | Forward | GroupMade

if TYPE_CHECKING:
    OrderToAll = SentOrder | Ask | Forget | Chunk
    Order = OrderToAll
    Report = SentReport | Answered | StacksAtEnd | Chunk | node.Suspend | node.Resume  # the last two from there only


class ClientOrder(Struct, frozen=True):
    """The coordinator passes on what a client asks about the workers of this node, no longer asks, or says to one of them."""

    passed_on: Ask | Forget | Chunk


class Listening(Struct, frozen=True):
    """The coordinator is here, and listens at this port: who starts the other agents passes that on."""

    port: int


class Leased(Struct, frozen=True):
    """A link says for how many seconds the workers may live from now; inf: as long as they like."""

    left: float


class Waits(Struct, frozen=True):
    """A link waits as a spare, or for node 0 to be started again: in a sentence for the user."""

    text: str


class LookingForCoordinator(Struct, frozen=True):
    """A link has not reached the coordinator yet: where it looks, and what came of it, for the user."""

    text: str
