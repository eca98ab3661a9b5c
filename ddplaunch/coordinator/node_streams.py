"""Clients of node 0 that are connected to the agents of other nodes. Takes of an agent only what belongs to its own streams."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from socket import socket
from typing import TYPE_CHECKING

from ddplaunch.control.streams import CHUNK, Chunk, Streams
from ddplaunch.loop.loop import Loop

if TYPE_CHECKING:
    from ddplaunch.coordinator.link import OrderToAll


class NodeStreams:
    """As many as there are clients at most."""

    def __init__(
        self,
        loop: Loop,
        send: Callable[[Sequence[int], OrderToAll], None],
        ended: Callable[[int], object],
    ) -> None:
        """`send` takes orders for agents; `ended` is told once an agent has no stream any more."""
        self._send = send
        self._ended = ended
        self._agents: dict[int, int] = {}  # by the number of the stream
        self._last = 0  # number given
        self._streams = Streams(loop, self._sent, self._over)

    def __contains__(self, id: int) -> bool:
        return id in self._agents.values()

    def __len__(self) -> int:
        return len(self._agents)

    def open(self, id: int, sock: socket, first: bytes, within: float, late: bytes) -> None:
        """Connect a socket to an agent, which gets `first` from it; without a reply `within` seconds, `late` is the reply."""
        assert len(first) <= CHUNK
        self._last += 1
        self._agents[self._last] = id
        self._sent(Chunk(self._last, first))
        self._streams.add(self._last, sock, within, late)

    def take(self, id: int, chunk: Chunk) -> None:
        """Take what an agent has sent."""
        if self._agents.get(chunk.number) == id:
            self._streams.take(chunk)

    def left(self, members: Collection[int]) -> None:
        """End the streams of agents that are gone."""
        for number in [number for number, id in self._agents.items() if id not in members]:
            self._streams.finish(number)

    def _sent(self, chunk: Chunk) -> None:
        if (id := self._agents.get(chunk.number)) is not None:
            self._send((id,), chunk)

    def _over(self, number: int) -> None:
        id = self._agents.pop(number)
        if id not in self:
            self._ended(id)

    def close(self) -> None:
        """End all."""
        self._streams.close()
