"""An agent's link to the coordinator: reports go there, orders come from there. Pure values; knows no network."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct

from ddplaunch.plan import Agreed
from ddplaunch.supervise import node
from ddplaunch.supervise.outcome import StartFailure, Traces, WorkerExit

if TYPE_CHECKING:  # msgspec's, which only a job that is looked into needs
    from ddplaunch.control.questions import Answer, Question
    from ddplaunch.coordinator.coordinator import Coordinator
    from ddplaunch.process.apart import AskApart
    from ddplaunch.stacks import Sample

# --- orders: what the coordinator sends an agent


class Generation(Struct, frozen=True, kw_only=True):
    """One start of all workers, as the coordinator has set it for a node."""

    number: int
    restarts: int  # how many of --max-restarts are used
    port: int  # MASTER_PORT
    ranks: frozenset[int]  # of the workers of this node
    alone: bool  # no other node takes part
    agreed: Agreed | None = None  # between several nodes; None: the node's draft is its plan


class JobEnd(Struct, frozen=True):
    """How the job has ended, at least for this node."""

    status: int
    why: str  # as in `summary.json`
    text: str = ""  # for the user; "" if there is none
    requeue: int = 0  # the notice after which the job should go back into the queue
    is_watched: bool = False  # a command that has started the agents is connected and does that, not node 0


class Ask(Struct, frozen=True):
    """A question about the workers of a node, to be answered under this number."""

    number: int
    question: Question


class Forget(Struct, frozen=True):
    """The question of this number need not be answered any more: who has asked is gone."""

    number: int


Order = (
    Generation | JobEnd | Ask | Forget | node.StopOrdered | node.KillOrdered | node.StoreOrdered | node.SignalReceived
)

# --- reports: what an agent sends the coordinator


class NodeEnd(Struct, frozen=True):
    """Nothing of a generation is left on this node."""

    generation: int
    exits: tuple[WorkerExit, ...]
    start_failure: StartFailure | None
    left: tuple[str, ...]  # processes that could not be ended, each as in a sentence
    traces: Traces
    samples: tuple[Sample, ...] = ()  # where the workers were when they had to end


class ForwardToAll(Struct, frozen=True):
    """From a command that has started the agents: pass this signal on to the workers of all nodes."""

    signum: int


class Answered(Struct, frozen=True):
    """The answer to the question of this number."""

    number: int
    answer: Answer


Report = (
    node.ReportStopping
    | node.ReportNotice
    | node.Escalate
    | node.ReportStill
    | node.HoldTimeout
    | node.RequestStore
    | node.Suspend
    | node.Resume
    | NodeEnd
    | ForwardToAll
    | Answered
)


if TYPE_CHECKING:  # to make a Protocol takes longer than to import most modules

    class LinkHandler(Protocol):
        """What a link hands to its owner, an agent or a command that has started agents."""

        def feed(self, event: node.Event) -> None:
            """Take an event."""

        def print(self, text: str) -> None:
            """Print a line for the user."""

        def listening(self, port: int) -> None:
            """Take note that the coordinator of the job is here, and listens."""

        def ask(self, ask: Ask) -> None:
            """Answer a question, now or later, by a report."""

        def forget(self, number: int) -> None:
            """Answer a question no more."""

        def begin(self, generation: Generation, address: str | None) -> None:
            """Start the workers; `address` is that of this node as the others reach it."""

        def end(self, end: JobEnd) -> None:
            """Stop the workers, if there are any, and end."""

        @property
        def ask_apart(self) -> AskApart:
            """What has a child asked what may take long, while the loop goes on."""


class Link(ABC):
    """What both kinds of links have in common."""

    coordinator: Coordinator | None = None  # if it is here

    def __init__(self, handler: LinkHandler) -> None:
        self._handler = handler
        self._has_ended = False

    @abstractmethod
    def send(self, report: Report) -> None:
        """Report to the coordinator, as far as it is reached."""

    @property
    @abstractmethod
    def address(self) -> str | None:
        """The address of this node that the others reach, as far as it is known."""

    @property
    @abstractmethod
    def deadline(self) -> float | None:
        """When `expire` is to be called at the latest."""

    @property
    def rest_until(self) -> float | None:
        """When `expire` should be called, give or take: no reason to look for pauses until then."""
        return None

    @abstractmethod
    def expire(self, now: float) -> None:
        """Do what the time asks for."""

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

    @property
    def pids(self) -> frozenset[int]:
        """Our own children that are no workers."""
        return frozenset()

    @abstractmethod
    def close(self) -> None:
        """Let go of all that is open."""

    def take(self, order: Order) -> None:
        """Hand an order of the coordinator to the owner of this link."""
        match order:
            case Generation():
                self._handler.begin(order, self.address)
            case Ask():
                self._handler.ask(order)
            case Forget(number):
                self._handler.forget(number)
            case JobEnd():
                if not self._has_ended:
                    self._has_ended = True
                    self._handler.end(order)
            case _:
                self._handler.feed(order)
