"""Speaks with the workers that `ddplaunch profile` profiles, all at once, for a bounded time, and believes nothing that they say.

The other side is worker/profiler.py: the agent of a worker hands the connection over to it. A rank that fails, at whatever step,
is left out, and `why` says so.
"""

from __future__ import annotations

import json
import selectors
import socket
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, suppress
from typing import IO, Any, Literal, NamedTuple

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
_TRAVEL_TIME = 5.0  # seconds for a reply to arrive
_PINGS = 8  # before, and after the profile: the quickest tells most about a clock
_MOST_ASKED = 16  # ranks whose workers have not come: an agent serves no more such clients
_ALONE_LIMIT = 5.0  # seconds for which a rank records at most while another has not begun yet
_TRACE_WITHIN = 120.0  # seconds in which a rank has to leave a call in C, and torch has to make its trace
_SILENCE_LIMIT = 30.0  # seconds without a byte after which a rank is given up
_OF_TRACE, _OF_MEMORY = b"\0", b"\1"  # the first byte of a frame that is a part of a file; messages begin otherwise
_NOT_REACHED = "runs no Python in its main thread just now"
_CHUNK = 1 << 18  # bytes
_MOST_DRIFT = 1_000_000  # nanoseconds by which a clock may move in a profile without having been set


# --- what workers say


class _Report(Struct, frozen=True):
    """The worker has come to the next phase of its profile, or has failed."""

    phase: Literal["hello", "recording", "made", "sent", "failed"]
    boot_id: Line = ""  # with "hello": of its machine, whose processes share a clock
    why_no_memory: Line = ""  # with "hello": why there is no history of its allocator, which was wished
    size: Size = 0  # with "made": of the trace
    why_less: Piece = ""  # with "made": why it has recorded less than was wished
    why: Piece = ""  # with "failed", as a predicate


class _Pong(NamedTuple):
    """The answer to a ping: a list, by which it is told from a report."""

    number: Number
    at: Size  # nanoseconds of the time of day there


_message: Callable[[bytes], _Report | _Pong] = decoder(_Report | _Pong)
_NEXT_PHASE = {"asked": "hello", "hello": "recording", "recording": "made", "made": "sent"}


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


def align(before: Sequence[Ping], after: Sequence[Ping], *, ranks_share_clock: bool) -> Alignment:
    """Compare the clock of a rank with ours, by pings before and after the profile.

    If all `ranks_share_clock`, their times compare as they are, and ours is not needed.
    """
    if ranks_share_clock or not before:
        return Alignment()
    # of several pings the quickest tells most
    first = min(before, key=lambda ping: ping.round_trip)
    best = min([*before, *after], key=lambda ping: ping.round_trip)
    last = min(after, key=lambda ping: ping.round_trip) if after else first
    moved = abs(last.ahead - first.ahead)
    uncertain = (first.round_trip + last.round_trip) // 2
    is_steady = moved <= uncertain + _MOST_DRIFT
    return Alignment(ahead=best.ahead, error=best.round_trip // 2, steady=is_steady)


# --- one rank


class Wish(Struct, frozen=True):
    """What is asked of each rank."""

    seconds: float
    steps: int  # 0: for so many seconds
    memory: bool
    typed: tuple[str, ...] = ()  # the options that say so


class Rank:
    """The conversation with one worker. Its `phase` goes from asked to hello, recording, made, sent, or ends at failed."""

    def __init__(self, rank: int, sock: socket.socket, wish: Wish, folder: str) -> None:
        """Ask the agent, over a new connection, for the worker; `folder` is where its trace is kept, in files without a name."""
        self.rank = rank
        self.phase = "asked"
        self.why = ""  # why it has failed, as a predicate: "has ended"
        self.why_less = ""  # why it has recorded less than was wished, as a sentence
        self.boot_id = ""  # of its machine, whose processes share a clock; "": not known
        self.why_no_memory = ""  # why there is no history of its allocator, which was wished; as a predicate
        self.size = 0  # bytes of the trace, once it is made
        self.sock = sock
        self.pings_before: list[Ping] = []  # the profile
        self.pings_after: list[Ping] = []
        self.trace: IO[bytes] = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - it lives as long as the rank does
        self.memory: IO[bytes] = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        self.received = 0  # bytes of both files
        self._wish = wish
        self._decoder = Decoder(LIMIT)
        self._is_attached = False  # to the worker: what came before is of its agent
        self._ping_sent = 0  # nanoseconds since 1970
        with suppress(OSError):  # its end will be read
            sock.send(pack(requests.encode(requests.Request(requests.Attach(rank, profiles=True)))))

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
        """Read what has come, and handle the whole frames.

        Raises:
            LaunchError: there is no room for the trace.
        """
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
                self._on_frame(frame)
        except (FrameError, Malformed) as error:
            self.fail(f"says what this version does not understand: {error}")
        except OSError as error:
            raise LaunchError(
                f"cannot keep the trace of rank {self.rank}: {error.strerror}",
                hint="--out FILE in a folder with more room",
            ) from None

    def _on_frame(self, frame: bytes) -> None:
        """Handle the reply of the agent, which comes first, then messages of the worker, and parts of its two files."""
        if not self._is_attached:
            self._on_reply(requests.decode_reply(frame))
        elif frame[:1] in (_OF_TRACE, _OF_MEMORY):
            self.received += len(frame)
            if self.phase != "made" or self.received > LONGEST_TRACE:
                self.fail(f"sends more than {size(LONGEST_TRACE)}")
            else:
                file = self.trace if frame[:1] == _OF_TRACE else self.memory
                file.write(frame[1:])
        elif isinstance(message := _message(frame), _Pong):
            self._on_pong(message)
        else:
            self._on_report(message)

    def _on_reply(self, reply: requests.Reply) -> None:
        """Handle the reply of the agent: from now on this is a connection to the worker, or why there is none."""
        match reply:
            case requests.RequestRefused(reason):
                self.fail(reason.removeprefix(f"rank {self.rank} "))  # it is printed after the ranks that it is of
            case requests.RunsElsewhere():
                self.fail("cannot be reached from here")
            case requests.Done():
                self._is_attached = True
                self.tell(type="profile", steps=self._wish.steps, memory=self._wish.memory)

    def _on_report(self, report: _Report) -> None:
        """Go to the next phase; before and after the recording, compare the clocks by pings.

        A report of another phase is dropped: the rank then fails for want of the one that fits.
        """
        if report.phase == "failed":
            self.fail(report.why)
        elif report.phase == _NEXT_PHASE[self.phase]:
            self.phase = report.phase
            if report.phase == "hello":
                self.boot_id, self.why_no_memory = report.boot_id, report.why_no_memory
                self._ping()
            elif report.phase == "made":
                self.size, self.why_less = report.size, report.why_less
                self._ping()
                if self.size > LONGEST_TRACE:
                    most = size(LONGEST_TRACE)
                    self.fail(f"has a trace of {size(self.size)}, and {most} is the most that is fetched")

    def _on_pong(self, pong: _Pong) -> None:
        """Note what time it is there, and ask again; after the last ping before the recording, begin that."""
        if self.phase not in ("hello", "made") or pong.number != len(self._pings):  # not the answer to the last ping
            return
        self._pings.append(Ping(self._ping_sent, pong.at, time.time_ns()))
        if len(self._pings) < _PINGS:
            self._ping()
        elif self.phase == "hello":
            self.tell(type="begin")

    @property
    def _pings(self) -> list[Ping]:
        return self.pings_before if self.phase == "hello" else self.pings_after

    def _ping(self) -> None:
        self._ping_sent = time.time_ns()
        self.tell(type="ping", number=len(self._pings))

    @property
    def is_made(self) -> bool:
        """Whether its trace is made, and its clock compared again."""
        return self.phase == "made" and len(self.pings_after) == _PINGS


# --- all ranks


def record(path: SocketPath, wanted: Collection[int], wish: Wish, folder: str, stack: ExitStack) -> list[Rank]:
    """Profile these ranks of the run whose socket is at `path`, and return all of them, those that have failed too.

    `folder` is where traces are kept meanwhile, and `stack` closes what is opened.

    Raises:
        LaunchError: the run has ended, or there is no room for the traces.
    """
    profile = _Profile(path, wanted, wish, folder, stack)
    profile.begin()
    recording = [rank for rank in profile.ranks if rank.phase == "recording"]
    if recording:
        what = f"for {count(wish.steps, 'step')}" if wish.steps else f"for {duration(wish.seconds)}"
        say(f"profiling {count(len(recording), 'rank')} {what}")
        profile.end()
        profile.fetch()
    return profile.ranks


class _Profile:
    """The conversations with all ranks of one profile: `begin`, `end` and `fetch` are called in this order."""

    def __init__(self, path: SocketPath, wanted: Collection[int], wish: Wish, folder: str, stack: ExitStack) -> None:
        self.ranks: list[Rank] = []  # that were asked
        self._not_asked = sorted(wanted)
        self._path = path
        self._wish = wish
        self._folder = folder
        self._stack = stack
        self._selector = stack.enter_context(selectors.DefaultSelector())

    def begin(self) -> None:
        """Have all ranks record, as far as they begin soon enough after the first one: a rank that does not is left out."""
        until = clock.now() + requests.Attach(0, profiles=True).within + _TRAVEL_TIME  # for rank 0 as for any other
        while True:
            self._ask_more()
            all_were_asked = not self._not_asked
            all_record = all_were_asked and not self._wait(0.0, _is_recording)
            if all_record:
                return
            if any(map(_is_recording, self.ranks)):
                until = min(until, clock.now() + _ALONE_LIMIT)
            if clock.now() >= until:
                return
            self._wait(0.1, _is_recording if all_were_asked else _has_worker_come)

    def _ask_more(self) -> None:
        """Ask for further ranks, until as many workers are asked for, and have not come yet, as an agent serves."""
        while self._not_asked and sum(rank.phase == "asked" for rank in self.ranks) < _MOST_ASKED:
            try:
                sock = self._stack.enter_context(self._path.connect())
            except (OSError, LaunchError):
                raise LaunchError("the run has just ended, or does not answer", status=NODE_LOST) from None
            sock.setblocking(False)
            rank = Rank(self._not_asked.pop(0), sock, self._wish, self._folder)
            self._stack.callback(rank.trace.close)
            self._stack.callback(rank.memory.close)
            self.ranks.append(rank)
            self._selector.register(sock, selectors.EVENT_READ, rank)

    def _wait(self, within: float, is_done: Callable[[Rank], bool]) -> list[Rank]:
        """Read until all ranks are over or done, or the time is up; return those that are neither then."""
        until = clock.now() + within
        while missing := [rank for rank in self.ranks if not rank.is_over and not is_done(rank)]:
            if not (ready := clock.wait(self._selector, until)):
                return missing
            for key, _ in ready:
                rank: Rank = key.data
                rank.read()
                if rank.is_over:
                    self._selector.unregister(key.fileobj)
        return []

    def end(self) -> None:
        """Have the ranks, which all record now, do so as long as wished, end those that go on, and have all make their traces."""
        for rank in filter(_is_recording, self.ranks):
            rank.tell(type="count")
        self._wait(self._wish.seconds, lambda rank: rank.phase == "made")
        for rank in self.ranks:
            if rank.phase == "asked":
                rank.fail(_NOT_REACHED)
            elif rank.phase in ("hello", "recording"):
                if rank.phase == "recording" and self._wish.steps:
                    recorded = f"recorded for {duration(self._wish.seconds)}"
                    rank.why_less = f"{recorded}: it did not do {self._wish.steps} steps in that time"
                rank.tell(type="end")
        without_trace = self._wait(_TRACE_WITHIN, lambda rank: rank.is_made)
        for rank in without_trace:
            why = "its main thread is in a call of C, or torch is busy"
            rank.fail(f"has not given its trace within {duration(_TRACE_WITHIN)}: {why}")

    def fetch(self) -> None:
        """Fetch the traces, one after the other: all at once would take as many times the memory of the agents."""
        made = [rank for rank in self.ranks if rank.phase == "made"]
        if made:
            say(f"fetching {size(sum(rank.size for rank in made))} of {count(len(made), 'rank')}")
        for rank in made:
            rank.tell(type="send")
            while rank.phase == "made":
                self._wait_for_bytes(rank)

    def _wait_for_bytes(self, fetched: Rank) -> None:
        """Wait until something more has come of this rank's trace; the rank fails if nothing does."""
        before = fetched.received
        if self._wait(_SILENCE_LIMIT, lambda rank: rank is not fetched or rank.received > before):
            fetched.fail(f"has sent nothing for {duration(_SILENCE_LIMIT)}")


def _is_recording(rank: Rank) -> bool:
    return rank.phase == "recording"


def _has_worker_come(rank: Rank) -> bool:
    return rank.phase != "asked"
