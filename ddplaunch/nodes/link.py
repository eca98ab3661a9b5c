"""An agent's way to the coordinator: what comes from there becomes events, what is to go there becomes messages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol

from ddplaunch import supervise
from ddplaunch.control import messages


class Ears(Protocol):
    """Whom a link tells what the coordinator says: the agent."""

    def feed(self, event: supervise.Event) -> None:
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

    def __init__(self, ears: Ears, clock: Callable[[], float]) -> None:
        self._ears = ears
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
                self._ears.begun(message, self.address)
            case messages.Stop(signum):
                self._ears.feed(supervise.ToldToStop(signum, now))
            case messages.Kill():
                self._ears.feed(supervise.ToldToKill(now))
            case messages.Forward(signum):
                self._ears.feed(supervise.SignalReceived(signum, now, escalates=False))
            case messages.Quit():
                self._dismiss(message)

    def _dismiss(self, message: messages.Quit) -> None:
        if not self._dismissed:
            self._dismissed = True
            self._ears.dismissed(message)
