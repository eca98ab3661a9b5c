"""The pipes of the workers of one generation: read when there is something, left alone while output is paused. Shows nothing."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from ddplaunch.loop.loop import Loop
from ddplaunch.output.sinks import Output
from ddplaunch.output.streams import Stream
from ddplaunch.process.pump import Pump, room


class WorkerPipes:
    """Stdout and stderr of each worker, on their way to `output`."""

    def __init__(self, loop: Loop, output: Output, *, workers: int) -> None:
        self._loop = loop
        self._output = output
        self._room = room(2 * workers)
        self._pumps: dict[int, dict[Stream, Pump]] = {}
        self._paused = False
        self._paused_until = 0.0

    def make(self, rank: int) -> dict[Stream, Pump]:
        """Make those of a worker that is about to start; the caller passes them to `watch`, or closes them.

        Raises:
            OSError: there are too many open files.
        """
        made: dict[Stream, Pump] = {}
        try:
            for stream in Stream:
                made[stream] = Pump(partial(self._received, rank, stream), self._room)
        except OSError:
            close(made)
            raise
        return made

    def watch(self, rank: int, pumps: dict[Stream, Pump]) -> None:
        """Read those of a worker that has started."""
        self._pumps[rank] = pumps
        for stream, pump in pumps.items():
            pump.started()
            if not self._paused:
                self._register(rank, stream, pump)

    def _received(self, rank: int, stream: Stream, data: bytes) -> None:
        self._output.received(rank, stream, data, self._loop.now())

    def _register(self, rank: int, stream: Stream, pump: Pump) -> None:
        def readable() -> None:
            if not pump.read() and not pump.open:
                self._loop.unwatch(pump.fd)
                self._output.ended(rank, stream, self._loop.now())

        self._loop.watch(pump.fd, readable)

    def pause(self, paused: bool) -> None:
        """Stop reading, or go on."""
        if paused is self._paused:
            return
        self._paused = paused
        self._paused_until = self._loop.now()
        for rank, pumps in self._pumps.items():
            for stream, pump in pumps.items():
                if not pump.open:
                    continue
                if paused:
                    self._loop.unwatch(pump.fd)
                else:
                    self._register(rank, stream, pump)

    def were_paused(self, since: float) -> bool:
        """Whether they were left alone at any time since then: who writes to them may have had to wait."""
        return self._paused or self._paused_until >= since

    def drain(self, rank: int) -> None:
        """Take in all that a worker has written so far."""
        for pump in self._pumps[rank].values():
            pump.drain()

    def close(self, at: float) -> None:
        """Take in the rest, and close all."""
        for rank, pumps in self._pumps.items():
            for stream, pump in pumps.items():
                self._loop.unwatch(pump.fd)
                pump.drain()
                self._output.ended(rank, stream, at)
            close(pumps)
        self._pumps.clear()


def close(pumps: Mapping[Stream, Pump]) -> None:
    """Close both ends of each."""
    for pump in pumps.values():
        pump.close()
