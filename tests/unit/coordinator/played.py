"""A coordinator that a test plays, for a link that dials nobody."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from ddplaunch.launcher.decide.job import Member
from ddplaunch.launcher.job import messages
from ddplaunch.record.window.questions import Answer


class PlayedAsker:
    """Who has asked all members a question, and what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[int, Answer] | str] = []

    def on_answer(self, member: Member, answer: Answer) -> None:
        self.told.append((member.id, answer))

    def on_all_answered(self) -> None:
        self.told.append("done")


class PlayedCoordinator:
    """The other side of a connection."""

    address = "10.0.0.1"
    received: Callable[[bytes], None]
    closed: Callable[[str], None]

    def __init__(self) -> None:
        self.got: list[str] = []  # tags of messages

    def send(self, payload: bytes) -> None:
        self.got.append(msgspec.json.decode(payload)["type"])

    def host_silence(self) -> float:
        return 10.0

    def sends_in_vain(self) -> bool:
        return False

    def admit(self) -> None:
        """Nothing is sent that is too long."""

    def close(self) -> None:
        """There is nothing to close."""

    def says(self, message: Any) -> None:
        self.received(messages.encode(message))
