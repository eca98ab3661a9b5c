"""What clients of the coordinator have open with nodes: questions that are not answered by all, and streams to agents.

Opens nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from socket import socket
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct

from ddplaunch.launcher.decide.job import Member
from ddplaunch.reach.channel.streams import CHUNK, Chunk, Streams
from ddplaunch.record.window.questions import Answer, Answered, Ask, Forget, NoAnswer, Question
from ddplaunch.system.loop.loop import Loop, Timer

if TYPE_CHECKING:
    from ddplaunch.launcher.job.orders import OrderToAll


class _Coordinator(Protocol):
    """The coordinator, as far as questions and streams need it."""

    @property
    def members(self) -> Mapping[int, Member]: ...
    def order(self, ids: Sequence[int], order: OrderToAll) -> None: ...
    def on_last_stream_ended(self, id: int) -> None: ...


class Asker(Protocol):
    """Who has asked all members a question, until `Questions.forget`."""

    def on_answer(self, member: Member, answer: Answer) -> None:
        """Take the answer of a member, or a `NoAnswer` in its place. Called once for each member that was asked."""

    def on_all_answered(self) -> None:
        """Take note that no answer is missing any more."""


class _PendingQuestion(Struct):
    asker: Asker
    missing: dict[int, Member]  # that have not answered
    give_up: Timer


class Questions:
    """The questions that not all members have answered yet: at most as many as there are clients at once."""

    def __init__(self, loop: Loop, coordinator: _Coordinator) -> None:
        """Ask nothing yet."""
        self._loop = loop
        self._coordinator = coordinator
        self._pending: dict[int, _PendingQuestion] = {}
        self._last = 0  # number given

    def ask(self, question: Question, within: float, asker: Asker) -> None:
        """Ask all members; for one that has not answered in `within` seconds, the asker gets a NoAnswer."""
        members = self._coordinator.members
        self._last = number = self._last + 1
        late = NoAnswer(f"has not answered within {within:g} s")
        give_up = self._loop.timer(self._loop.now() + within, lambda: self._answer_for_all(number, late))
        self._pending[number] = _PendingQuestion(asker, dict(members), give_up)
        self._coordinator.order(tuple(members), Ask(number, question))
        self._close_complete()

    def on_answer(self, id: int, report: Answered) -> None:
        """Take an answer; one that was not asked for, or comes too late, changes nothing."""
        asked = self._pending.get(report.number)
        if asked is not None and (member := asked.missing.pop(id, None)) is not None:
            asked.asker.on_answer(member, report.answer)
            self._close_complete()

    def drop_departed(self, members: Mapping[int, Member]) -> None:
        """Answer NoAnswer in place of each member that is gone. `members` are the remaining ones."""
        for asked in list(self._pending.values()):
            for id in asked.missing.keys() - members.keys():
                asked.asker.on_answer(asked.missing.pop(id), NoAnswer("was lost before it had answered"))
        self._close_complete()

    def forget(self, asker: Asker) -> None:
        """Call this asker no more, since it has gone, and have the agents stop looking for an answer."""
        for number, asked in list(self._pending.items()):
            if asked.asker is asker:
                del self._pending[number]
                asked.give_up.cancel()
                self._coordinator.order(tuple(asked.missing), Forget(number))

    def _answer_for_all(self, number: int, answer: NoAnswer) -> None:
        """Answer a question in place of all members that have not."""
        asked = self._pending[number]
        for id in list(asked.missing):
            asked.asker.on_answer(asked.missing.pop(id), answer)
        self._close_complete()

    def _close_complete(self) -> None:
        for number, asked in list(self._pending.items()):
            if not asked.missing and self._pending.pop(number, None) is not None:
                asked.give_up.cancel()
                asked.asker.on_all_answered()


class NodeStreams:
    """The streams between clients here and agents of other nodes. An agent may send only into its own streams."""

    def __init__(self, loop: Loop, coordinator: _Coordinator) -> None:
        """Have no stream yet."""
        self._coordinator = coordinator
        self._agents: dict[int, int] = {}  # the ids of the agents, by the number of the stream
        self._last = 0  # number given
        self._streams = Streams(loop, self)

    def __contains__(self, id: int) -> bool:
        return id in self._agents.values()

    def __len__(self) -> int:
        return len(self._agents)

    def open(self, id: int, sock: socket, first: bytes, within: float, late: bytes) -> None:
        """Connect a socket to an agent, which gets `first` from it; without a reply `within` seconds, `late` is the reply."""
        assert len(first) <= CHUNK
        self._last += 1
        self._agents[self._last] = id
        self.send_chunk(Chunk(self._last, first))
        self._streams.add(self._last, sock, within, late)

    def on_chunk(self, id: int, chunk: Chunk) -> None:
        """Take what an agent has sent."""
        if self._agents.get(chunk.number) == id:
            self._streams.take(chunk)

    def drop_departed(self, members: Collection[int]) -> None:
        """End the streams of agents that are gone."""
        for number in [number for number, id in self._agents.items() if id not in members]:
            self._streams.finish(number)

    def send_chunk(self, chunk: Chunk) -> None:
        """Send a chunk of a client to the agent of its stream. Called by the streams, too."""
        if (id := self._agents.get(chunk.number)) is not None:
            self._coordinator.order((id,), chunk)

    def on_stream_ended(self, number: int) -> None:
        """Forget a stream that has ended, and report an agent that has no other stream. Called by the streams."""
        id = self._agents.pop(number)
        if id not in self:
            self._coordinator.on_last_stream_ended(id)

    def close(self) -> None:
        """End all streams."""
        self._streams.close()
