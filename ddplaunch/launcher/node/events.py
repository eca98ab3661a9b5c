"""What happens in an agent besides the events that its decision takes: posted by its parts, handled by `Agent.handle`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    from ddplaunch.record.window.questions import Answered
    from ddplaunch.record.window.requests import Attach, Request

# --- processes


class WorkerEnded(Struct, frozen=True):
    """The process of a worker has ended, or that of what tells of its end."""

    rank: int


class ChildEnded(Struct, frozen=True):
    """SIGCHLD: some process below this one has ended or stopped; or what a guard has left is gone."""


class ReapDue(Struct, frozen=True):
    """It is time to reap processes that have ended."""


class WorkersLinger(Struct, frozen=True):
    """The scripts of these ranks have ended long ago, and their processes have not."""

    ranks: tuple[int, ...]


class GroupJoined(Struct, frozen=True):
    """A worker has made a process group, the first one of its generation."""


# --- the front


class FrontWaits(Struct, frozen=True):
    """The front is to stop, as after Ctrl-Z, and waits until all else has."""


# --- what the user has this node look for


class NoticeSeen(Struct, frozen=True):
    """A file or a command has given a notice, which is this signal to the workers; or `problem` says why none can come now."""

    option: str  # as typed, "--notice-file /run/notice"
    signum: int
    problem: str
    stops_job: bool = False  # the whole of it, even where the signal has its node leave


class HealthChecked(Struct, frozen=True):
    """The health check before this generation has ended; `why` the node is not fit, "" if it is."""

    generation: int
    why: str


# --- commands that ask the run


class QuestionAnswered(Struct, frozen=True):
    """What the coordinator has asked about the workers of this node is answered."""

    report: Answered


class StopAsked(Struct, frozen=True):
    """A client wants the job to be ended, as by Ctrl-C."""


class ClientAsked(Struct, frozen=True):
    """The client of this number has sent its request."""

    client: int
    request: Request


class AttachAsked(Struct, frozen=True):
    """A client wants to debug, or to profile, a worker of this node."""

    client: int
    asked: Attach


class ClientGone(Struct, frozen=True):
    """The connection of a client is closed, or belongs to a worker now."""

    client: int


class ClientsFailed(Struct, frozen=True):
    """What serves clients has failed, and is to be done without."""

    why: str
