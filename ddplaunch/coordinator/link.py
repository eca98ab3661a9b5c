"""An agent's link to the coordinator: reports go there, orders come from there. Knows no network.

Reports and orders are values that travel as they are, as JSON, wherever the other side is elsewhere. Their fields have types that
bound what a peer may send. Those about questions are in `control/questions.py`, which only a job that is looked into imports.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta, Struct

from ddplaunch.fields import Keyword, Line, Number, Port, Signal, SignalOrNone, Status, Text
from ddplaunch.loop.loop import Loop
from ddplaunch.plan import Agreed
from ddplaunch.supervise import node
from ddplaunch.supervise.outcome import StartFailure, Traces, WorkerExit

if TYPE_CHECKING:
    from ddplaunch.control.questions import Answered, Ask, Forget, Question, StacksAtEnd
    from ddplaunch.control.streams import Chunk
    from ddplaunch.coordinator.coordinator import Coordinator

MAX_LEFT = 100  # processes that are named


class Forward(Struct, frozen=True, tag="forward"):
    """Pass this signal on to the workers: from a command that has started the agents, and from there to each agent."""

    signum: Signal


# --- orders: what the coordinator sends an agent


class Generation(Struct, frozen=True, kw_only=True, tag="begin"):
    """One start of all workers, as the coordinator has set it for a node."""

    number: Number
    restarts: Number  # how many of --max-restarts are used
    port: Port  # MASTER_PORT
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
    is_watched: bool = False  # a command that has started the agents is connected and does that, not node 0


SentOrder = Generation | JobEnd | Forward | node.StopOrdered | node.KillOrdered

# --- reports: what an agent sends the coordinator


class NodeEnd(Struct, frozen=True, tag="ended"):
    """Nothing of a generation is left on this node."""

    generation: Number
    exits: tuple[WorkerExit, ...]
    start_failure: StartFailure | None
    left: Annotated[
        tuple[Line, ...], Meta(max_length=MAX_LEFT)
    ]  # processes that could not be ended, each as in a sentence
    traces: Traces


class Warned(Struct, frozen=True, tag="warned"):
    """Something that holds for this node, for a line of node 0 about all nodes for which it holds."""

    text: Line
    is_warning: bool = True


SentReport = (
    node.ReportStopping
    | node.ReportNotice
    | node.Escalate
    | node.ReportIdle
    | node.HoldTimeout
    | node.RequestStore
    | NodeEnd
    | Warned
    | Forward
)

if TYPE_CHECKING:
    OrderToAll = SentOrder | Ask | Forget | Chunk
    Order = OrderToAll | node.StoreOrdered  # the last one to the coordinator's own agent only
    Report = SentReport | Answered | StacksAtEnd | Chunk | node.Suspend | node.Resume  # the last two from there only


class QuestionAsked(Struct, frozen=True):
    """The coordinator asks about the workers of this node, to be answered under this number."""

    number: int
    question: Question


class QuestionForgotten(Struct, frozen=True):
    """The question of this number need not be answered any more: who has asked is gone."""

    number: int


class StreamSent(Struct, frozen=True):
    """The coordinator has sent a piece of what a client says to a worker of this node."""

    chunk: Chunk


class Listening(Struct, frozen=True):
    """The coordinator is here, and listens at this port: who starts the other agents passes that on."""

    port: int


class LookingForCoordinator(Struct, frozen=True):
    """A link has not reached the coordinator yet: where it looks, and what came of it, for the user."""

    text: str


class Link(ABC):
    """What both kinds of links have in common."""

    coordinator: Coordinator | None = None  # if it is here

    def __init__(self, loop: Loop) -> None:
        """Post each order to this loop, whose owner is an agent, or a command that has started agents."""
        self._loop = loop
        self.end: JobEnd | None = None  # how the job has ended, once that is known
        self._has_ended = False

    @abstractmethod
    def send(self, report: Report) -> None:
        """Report to the coordinator, as far as it is reached."""

    @property
    @abstractmethod
    def address(self) -> str | None:
        """The address of this node that the others reach, as far as it is known."""

    @property
    def is_over(self) -> bool:
        """Whether nothing more is expected of this node."""
        return self._has_ended

    @abstractmethod
    def expect_one_fewer(self) -> None:
        """Have the coordinator wait for one node less."""

    def leave(self) -> None:
        """Wait for the coordinator no longer."""
        self._has_ended = True

    @abstractmethod
    def close(self) -> None:
        """Let go of all that is open."""

    def take(self, order: Order) -> None:
        """Post an order of the coordinator; after the end of the job there is none."""
        match order:
            case JobEnd() if self._has_ended:
                pass
            case JobEnd():
                self._has_ended, self.end = True, order
                self._loop.post(order)
            case Generation() | Forward() | node.StopOrdered() | node.KillOrdered() | node.StoreOrdered():
                self._loop.post(order)
            case _:
                self._take_question(order)

    def _take_question(self, order: Ask | Forget | Chunk) -> None:
        from ddplaunch.control.questions import Ask, Forget  # only a job that is looked into needs it

        match order:
            case Ask(number, question):
                self._loop.post(QuestionAsked(number, question))
            case Forget(number):
                self._loop.post(QuestionForgotten(number))
            case chunk:
                self._loop.post(StreamSent(chunk))
