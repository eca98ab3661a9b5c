"""An agent's way to the coordinator: what comes from there becomes events, what is to go there becomes messages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

from ddplaunch.control import messages
from ddplaunch.control.messages import Ended, Killing, Noticed, StartFailure, Stopping
from ddplaunch.coordinator import wire
from ddplaunch.record import replace
from ddplaunch.supervise import node
from ddplaunch.supervise.outcome import Traces, WorkerExit


class LinkHandler(Protocol):
    """Whom a link tells what the coordinator says: the agent."""

    def feed(self, event: node.Event) -> None:
        """Take an event."""

    def say(self, text: str) -> None:
        """Tell the user."""

    def listening(self, port: int) -> None:
        """Take note that the coordinator of the job is here, and listens."""

    def begun(self, begin: messages.Begin, address: str | None) -> None:
        """Take the coordinator's word to start, and the address of this node that the others reach."""

    def dismissed(self, message: messages.Quit) -> None:
        """Take the coordinator's word to end."""


class Link(ABC):
    """What both kinds of links have in common."""

    def __init__(self, handler: LinkHandler, clock: Callable[[], float]) -> None:
        self._handler = handler
        self._clock = clock
        self._dismissed = False

    @abstractmethod
    def send(self, message: messages.ToCoordinator) -> None:
        """Tell the coordinator, as far as it can be told."""

    @property
    @abstractmethod
    def address(self) -> str | None:
        """The address of this node that the others reach, as far as it is known."""

    @property
    @abstractmethod
    def deadline(self) -> float | None:
        """When `expire` is to be called at the latest."""

    @abstractmethod
    def expire(self, now: float) -> None:
        """Do what the time asks for."""

    @property
    def is_over(self) -> bool:
        """Whether nobody expects anything of this node any more."""
        return self._dismissed

    @abstractmethod
    def expect_one_fewer(self) -> None:
        """Have the coordinator wait for one node less."""

    def leave(self) -> None:
        """Wait for the coordinator no longer."""
        self._dismissed = True

    @property
    def pids(self) -> frozenset[int]:
        """Our own children that are no workers."""
        return frozenset()

    @abstractmethod
    def close(self) -> None:
        """Let go of all that is open."""

    def take(self, message: messages.ToAgent) -> None:
        """Do what the coordinator says."""
        now = self._clock()
        match message:
            case messages.Ping(sent):
                self.send(messages.Pong(sent, now))
            case messages.Begin():
                self._handler.begun(message, self.address)
            case messages.Stop(signum):
                self._handler.feed(node.ToldToStop(signum, now))
            case messages.Kill():
                self._handler.feed(node.ToldToKill(now))
            case messages.Forward(signum):
                self._handler.feed(node.SignalReceived(signum, now, escalates=False))
            case messages.Quit():
                self._dismiss(message)

    def _dismiss(self, message: messages.Quit) -> None:
        if not self._dismissed:
            self._dismissed = True
            self._handler.dismissed(message)


_REASON = 1000  # characters, as control/messages.py allows


class Nodes:
    """The agent's view of the other nodes."""

    def __init__(self, link: Link) -> None:
        self._link = link

    # --- what is told

    def announce(self, why: node.Why, signum: int) -> None:
        """Say that this node's workers are being stopped."""
        self._link.send(Stopping(why.name, signum))

    def notice(self, signum: int) -> None:
        """Say that the end was announced here."""
        self._link.send(Noticed(signum))

    def hurry(self) -> None:
        """Say that nobody wants to wait for the stop."""
        self._link.send(Killing())

    def report(self, state: node.State, exits: Sequence[WorkerExit], traces: Traces) -> None:
        """Say how the workers of this node ended, after the last of them has."""
        raised = dict(state.raised)
        complete = [replace(end, error=end.error or raised.get(end.rank)) for end in exits]
        failed = state.start_failure
        self._link.send(
            Ended(
                generation=state.generation,
                exits=wire.sent(complete),
                start_failure=StartFailure(failed.rank, failed.reason[:_REASON], failed.status) if failed else None,
                oom_kills=traces.oom_kills,
                shm=traces.shm,
                log_folder=traces.log_folder,
            )
        )

    def leave(self) -> None:
        """Wait for the coordinator no longer."""
        self._link.leave()

    def expect_one_fewer(self) -> None:
        """Wait for one node less: whoever started the agents has given it up."""
        self._link.expect_one_fewer()

    # --- the loop

    @property
    def deadline(self) -> float | None:
        """When `expire` is to be called at the latest."""
        return self._link.deadline

    def expire(self, now: float) -> None:
        """Do what the time asks for."""
        self._link.expire(now)

    @property
    def is_over(self) -> bool:
        """Whether nobody expects anything of this node any more."""
        return self._link.is_over

    @property
    def pids(self) -> frozenset[int]:
        """Our own children that are no workers."""
        return self._link.pids

    def close(self) -> None:
        """Let go of all that is open."""
        self._link.close()
