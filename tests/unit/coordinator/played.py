"""A coordinator that a test plays, for a link that dials nobody."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from ddplaunch.launcher.decide.electorate import Electorate, History, Vote
from ddplaunch.launcher.job import messages

HISTORY = History(
    generation=0,
    term=1,
    restarts=0,
    spent=(),
    time_left=None,
    best_step=-1,
    in_vain=0,
    short_lives=0,
    import_failure="",
    failed_machine="",
    same_exception="",
)


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

    def admit(self) -> None:
        """Nothing is sent that is too long."""

    def close(self) -> None:
        """There is nothing to close."""

    def says(self, message: Any) -> None:
        self.received(messages.encode(message))


def succession(*names: str) -> messages.Succession:
    candidates = tuple(
        messages.Candidate(votes=(Vote(1, rank),), host=name, address="10.0.0.2", port=4000 + rank)
        for rank, name in enumerate(names, 1)
    )
    electorates = (Electorate(1, 1 + len(names)),)
    return messages.Succession(
        run_id="run-1",
        host="a",
        coordinator=(Vote(1, 0),),
        candidates=candidates,
        electorates=electorates,
        history=HISTORY,
    )
