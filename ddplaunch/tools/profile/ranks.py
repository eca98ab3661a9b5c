"""Speaks with the workers that are to be profiled, all at once, each for a bounded time, and believes nothing that they say.

The other side is worker/profiler.py. A rank that fails, at whatever step, is left out, and `why` says so.
"""

from __future__ import annotations

import json
import selectors
import socket
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, suppress
from typing import IO, Any

from msgspec import Struct

from ddplaunch.reach.channel.handshake import LIMIT, pack
from ddplaunch.record.run_socket import SocketPath
from ddplaunch.record.window import requests
from ddplaunch.system.errors import LaunchError, say
from ddplaunch.system.exitcodes import NODE_LOST
from ddplaunch.system.fields import Line, Malformed, Number, Piece, Size, decoder
from ddplaunch.system.loop.stream import Decoder, FrameError
from ddplaunch.system.process import clock
from ddplaunch.system.words import count, duration, size

LONGEST_TRACE = 1 << 30  # bytes of one rank
_LATE = 5.0  # seconds for the way of a reply
_PINGS = 8
_ASKED_AT_ONCE = 16  # ranks
_BEFORE_OTHERS = 5.0  # seconds for which a rank records at most while another has not begun yet
_MAKES = 120.0  # seconds in which a rank has to leave a call in C, and torch has to make its trace
_MOVES = 30.0  # seconds without a byte after which a rank is given up
_CHUNK = 1 << 18  # bytes


# --- what workers say


class Hello(Struct, frozen=True, tag="hello"):
    """The worker that has come; `memory`: whether the history of its allocator is kept, or why not."""

    torch: Line
    boot: Line  # of its machine: who shares it shares a clock
    pid: Number
    memory: bool | Line = False


class _Pong(Struct, frozen=True, tag="pong"):
    at: Size  # nanoseconds of the time of day there
    number: Number


class _Began(Struct, frozen=True, tag="began"):
    pass


class _Finished(Struct, frozen=True, tag="finished"):
    size: Size  # of the trace
    note: Piece = ""


class _Sent(Struct, frozen=True, tag="sent"):
    pass


class _Failed(Struct, frozen=True, tag="failed"):
    reason: Piece


_said: Callable[[bytes], Any] = decoder(Hello | _Pong | _Began | _Finished | _Sent | _Failed)


# --- clocks


class Ping(Struct, frozen=True):
    """When a question about the time was sent and answered by our clock, and what time it was there; nanoseconds."""

    sent: int
    there: int
    received: int

    @property
    def round_trip(self) -> int:
        """How long it was under way."""
        return self.received - self.sent

    @property
    def ahead(self) -> int:
        """By how much the clock there is ahead of ours, if both ways took the same time."""
        return self.there - (self.sent + self.received) // 2


class Alignment(Struct, frozen=True):
    """How the clock of a rank is to be read."""

    ahead: int = 0  # nanoseconds, to be subtracted
    error: int = 0  # nanoseconds, by which that may be wrong
    steady: bool = True  # it was the same before and after the profile


def align(before: Sequence[Ping], after: Sequence[Ping], *, same: bool) -> Alignment:
    """Compare the clock of a rank with ours; `same`: it is ours."""
    if same or not before:
        return Alignment()
    first = min(before, key=lambda ping: ping.round_trip)
    best = min([*before, *after], key=lambda ping: ping.round_trip)
    last = min(after, key=lambda ping: ping.round_trip) if after else first
    moved = abs(last.ahead - first.ahead)
    return Alignment(best.ahead, best.round_trip // 2, moved <= (first.round_trip + last.round_trip) // 2 + 1_000_000)


# --- one rank


class Wish(Struct, frozen=True):
    """What is asked of each rank."""

    seconds: float
    steps: int  # 0: for so many seconds
    memory: bool


class Rank:
    """The conversation with one worker. `phase` only goes forward: asked, hello, recording, made, sent; or failed."""

    def __init__(self, rank: int, sock: socket.socket, wish: Wish, folder: str) -> None:
        """`folder` is where its trace is kept, in files without a name."""
        self.rank = rank
        self.phase = "asked"
        self.why = ""  # it has failed
        self.note = ""
        self.hello = Hello("", "", 0)
        self.size = 0  # bytes of the trace
        self.sock = sock
        self.before: list[Ping] = []
        self.after: list[Ping] = []
        self.trace: IO[bytes] = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - it lives as long as the rank does
        self.memory: IO[bytes] = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        self.received = 0  # bytes of both
        self._wish = wish
        self._decoder = Decoder(LIMIT)
        self._attached = False
        self._pinged = 0  # when
        with suppress(OSError):
            sock.send(pack(requests.encode(requests.Request(requests.Profile(rank)))))

    @property
    def is_over(self) -> bool:
        """Whether nothing more is to come."""
        return self.phase in ("failed", "sent")

    def fail(self, why: str) -> None:
        """Leave this rank out, and say why, as a predicate."""
        if not self.is_over:
            self.phase, self.why = "failed", why
            self.sock.close()

    def tell(self, **message: Any) -> None:
        """Send a message to the worker; what is lost is noticed when nothing comes back."""
        with suppress(OSError):
            self.sock.send(json.dumps(message).encode() + b"\n")

    def read(self) -> None:
        """Take what has come."""
        try:
            data = self.sock.recv(_CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.fail("has ended, or was lost")
            return
        self._decoder.feed(data)
        try:
            while not self.is_over and (frame := self._decoder.take()) is not None:
                self._take(frame)
        except (FrameError, Malformed) as error:
            self.fail(f"says what this version does not understand: {error}")
        except OSError as error:
            raise LaunchError(
                f"cannot keep the trace of rank {self.rank}: {error.strerror}",
                hint="--out FILE in a folder with more room",
            ) from None

    def _take(self, frame: bytes) -> None:
        """Take a frame: first the reply of the agent, then messages of the worker, or parts of its two files."""
        if not self._attached:
            self._take_reply(requests.for_client(frame))
        elif frame[:1] in (b"\0", b"\1"):
            self.received += len(frame)
            if self.phase != "made" or self.received > LONGEST_TRACE:
                self.fail(f"sends more than {size(LONGEST_TRACE)}")
            else:
                (self.memory if frame[0] else self.trace).write(frame[1:])
        else:
            self._take_message(_said(frame))

    def _take_reply(self, reply: requests.Reply) -> None:
        """Take the reply of the agent: the connection to the worker, or why there is none."""
        match reply:
            case requests.RequestRefused(reason):
                self.fail(reason.removeprefix(f"rank {self.rank} "))
            case requests.Unreached():
                self.fail("runs no Python in its main thread just now")
            case requests.RunsElsewhere():
                self.fail("cannot be reached from here")
            case requests.Attached():
                self._attached = True
                self.tell(type="profile", steps=self._wish.steps, memory=self._wish.memory)

    def _take_message(self, said: Any) -> None:
        """Go from phase to phase as the worker reports; before and after the recording, compare the clocks by pings."""
        match self.phase, said:
            case "asked", Hello():
                self.phase, self.hello = "hello", said
                self._ping()
            case "hello" | "made", _Pong(at, number) if number == len(self._pings):
                self._pings.append(Ping(self._pinged, at, time.time_ns()))
                if len(self._pings) < _PINGS:
                    self._ping()
                elif self.phase == "hello":
                    self.tell(type="begin")
            case "hello", _Began():
                self.phase = "recording"
            case "recording", _Finished(length, note):
                self.phase, self.size, self.note = "made", length, note
                self._ping()
                if length > LONGEST_TRACE:
                    self.fail(f"has a trace of {size(length)}, and {size(LONGEST_TRACE)} is the most that is fetched")
            case "made", _Sent():
                self.phase = "sent"
            case _, _Failed(reason):
                self.fail(reason)

    @property
    def _pings(self) -> list[Ping]:
        return self.before if self.phase == "hello" else self.after

    def _ping(self) -> None:
        self._pinged = time.time_ns()
        self.tell(type="ping", number=len(self._pings))

    @property
    def has_after(self) -> bool:
        """Whether its trace is made, and its clock compared again."""
        return self.phase != "made" or len(self.after) == _PINGS


# --- all ranks


def record(path: SocketPath, wanted: Collection[int], wish: Wish, folder: str, stack: ExitStack) -> list[Rank]:
    """Profile these ranks of the run whose socket is at `path`, and return all of them, those that have failed too.

    `folder` is where traces are kept meanwhile, and `stack` closes what is opened.
    """
    selector = stack.enter_context(selectors.DefaultSelector())
    ranks: list[Rank] = []
    waiting = sorted(wanted)

    def ask_more() -> None:
        """Ask further ranks: an agent serves a bounded number of clients for whom no worker has come yet."""
        while waiting and sum(rank.phase == "asked" for rank in ranks) < _ASKED_AT_ONCE:
            try:
                sock = stack.enter_context(path.connect())
            except (OSError, LaunchError):
                raise LaunchError("the run has just ended, or does not answer", status=NODE_LOST) from None
            sock.setblocking(False)
            rank = Rank(waiting.pop(0), sock, wish, folder)
            stack.callback(rank.trace.close)
            stack.callback(rank.memory.close)
            ranks.append(rank)
            selector.register(sock, selectors.EVENT_READ, rank)

    def wait(within: float, has_come: Callable[[Rank], bool]) -> list[Rank]:
        """Read until it `has_come` from all ranks that have not failed; return the missing ranks once the time is up."""
        until = clock.now() + within
        while missing := [rank for rank in ranks if not rank.is_over and not has_come(rank)]:
            if not (ready := clock.wait(selector, until)):
                return missing
            for key, _ in ready:
                key.data.read()
                if key.data.is_over:
                    selector.unregister(key.fileobj)
        return []

    until = clock.now() + requests.reached_within(requests.Profile(0)) + _LATE
    while True:
        ask_more()
        if not waiting and not wait(0.0, _records):
            break
        if any(map(_records, ranks)):
            until = min(until, clock.now() + _BEFORE_OTHERS)
        if clock.now() >= until:
            break
        wait(0.1, lambda rank: rank.phase != "asked" if waiting else _records(rank))
    recording = [rank for rank in ranks if rank.phase == "recording"]
    if not recording:
        return ranks
    what = f"until {wish.steps} steps are done" if wish.steps else f"for {duration(wish.seconds)}"
    say(f"profiling {count(len(recording), 'rank')} {what}")
    wait(wish.seconds, lambda rank: rank.phase == "made")
    for rank in ranks:
        if rank.phase == "asked":
            rank.fail("runs no Python in its main thread just now")
        elif rank.phase in ("hello", "recording"):
            if rank.phase == "recording" and wish.steps:
                rank.note = f"recorded for {duration(wish.seconds)}: it did not do {wish.steps} steps in that time"
            rank.tell(type="end")
    for rank in wait(_MAKES, lambda rank: rank.phase == "made" and rank.has_after):
        rank.fail(
            f"has not given its trace within {duration(_MAKES)}: its main thread is in a call of C, or torch is busy"
        )
    made = [rank for rank in ranks if rank.phase == "made"]
    if made:
        say(f"fetching {size(sum(rank.size for rank in made))} of {count(len(made), 'rank')}")
    for rank in made:  # one after the other: all at once would take as many times the memory of the agents
        rank.tell(type="send")
        while rank.phase == "made":
            received = rank.received
            if wait(_MOVES, lambda each, rank=rank, received=received: each is not rank or each.received > received):  # type: ignore[misc]
                rank.fail(f"has sent nothing for {duration(_MOVES)}")
    return ranks


def _records(rank: Rank) -> bool:
    return rank.phase == "recording"
