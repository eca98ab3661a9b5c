"""What has happened in a run so far (its story), and what the public record says of it: rows of events, `summary.json`. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from signal import SIGWINCH
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.structs import replace

from ddplaunch.launcher.decide import node
from ddplaunch.launcher.decide.first_failure import follows_another
from ddplaunch.plan import Plan
from ddplaunch.record.events import progress_data
from ddplaunch.record.seen import stack
from ddplaunch.spec.outcome import Progress, StartFailure, WorkerError, WorkerExit
from ddplaunch.system.words import compress, signal_name

if TYPE_CHECKING:  # few jobs need it
    from ddplaunch.record.time_spent import Spent
    from ddplaunch.spec.outcome import Intent


class Attempted(Struct, frozen=True, kw_only=True):
    """A generation (one start of all workers), and how far the workers of this node came. Times are of CLOCK_MONOTONIC."""

    began: float
    farthest_progress: Progress | None = None  # of the worker that came farthest; None: none has said its steps
    farthest_ended_at: float = 0.0  # when that worker ended


class Ended(Struct, frozen=True, kw_only=True):
    """How a job has ended, as this process knows it."""

    status: int  # exit status of the command
    why: str  # as in summary.json
    text: str  # of the coordinator, for the user
    restarts: int  # the number of the last generation
    exits: Sequence[WorkerExit]  # of that generation, of all workers that are known here
    failure: WorkerExit | StartFailure | None = None  # the first one here, if a failure has ended the job


class Story(Struct, kw_only=True):
    """What has happened in a run, as this node knows it: each part writes here what it learns, and the reporters report it."""

    began: float  # CLOCK_MONOTONIC seconds of this node, as all times here
    plan: Plan | None = None  # of the generation that runs, or of the last one
    term: int | None = None  # of that generation
    master_port: int | None = None  # of that generation
    generations: list[Attempted] = []
    signalled_at: float | None = None  # when a signal ended the job, if the job's reporter has said so
    first_failure: WorkerExit | StartFailure | None = None  # of several nodes, as the coordinator knows it
    # the notice (a signal of the cluster) after which all workers left, as the public record has it
    left_after_notice: Mapping[str, Any] | None = None
    idle_why: str = ""  # why no worker makes progress, as was said last; "" where that is not known
    steps: int | None = None  # about how many the last generation has made, as the collectives show
    pace: float | None = None  # and how many in a second
    straggler: tuple[str, Mapping[str, Any]] | None = None  # for whom the others waited: in a sentence, and as data
    queued: float = 0.0  # seconds in the queue of the cluster, as far as known
    closing: str = ""  # what this node has printed of the end
    locations: Sequence[str] = ()  # where the workers were then, in sentences, as it has printed

    def begin_generation(self, at: float, term: int | None, port: int) -> None:
        """Note that all workers are being started, in this term and at this MASTER_PORT."""
        self.term, self.master_port = term, port
        self.generations.append(Attempted(began=at))

    def note_exit(self, exit: WorkerExit) -> None:
        """Note how far a worker of this node came, if no other one of its generation came farther."""
        if exit.progress is None or not self.generations:
            return
        last = self.generations[-1]
        if last.farthest_progress is None or exit.progress.step > last.farthest_progress.step:
            self.generations[-1] = replace(last, farthest_progress=exit.progress, farthest_ended_at=exit.at)

    def note_left_after(self, notice: int, intent: Intent | None = None, failed: str | None = None) -> None:
        """Note that all workers left after a notice, and whether the job was requeued; None: another process does that."""
        self.left_after_notice = {
            "signal": signal_name(notice),
            "job": intent.job if intent else None,
            "sent": intent.requeues and failed is None if intent else None,
            "text": (failed or intent.text) if intent else None,
        }

    def time_spent(self, now: float) -> Spent | None:
        """Return where the time of a job with restarts went; None without a restart, or if no worker said its steps."""
        if len(self.generations) < 2:
            return None
        try:
            from ddplaunch.record.time_spent import Attempt, attempt, time_spent  # most jobs have no restart
        except Exception:  # noqa: BLE001 - its files may be gone, or of another version: the job ends as ever
            return None
        ends = [*(following.began for following in self.generations[1:]), now]
        attempts = [
            attempt(one.began, end, one.farthest_ended_at, one.farthest_progress)
            if one.farthest_progress is not None
            else Attempt(one.began, end)  # no worker of this generation said its steps
            for one, end in zip(self.generations, ends, strict=True)
        ]
        return time_spent(attempts, self.began, now, self.queued)

    def outcome(self, ended: Ended, at: float) -> dict[str, Any]:
        """Return how the job ended, as plain data: what a caller of `launch()` gets, and the first part of summary.json.

        `at` is when this process knew.
        """
        first = self.first_failure
        left = self.left_after_notice is not None  # all workers left as a notice asked: no end of one is a failure
        if first is None and ended.why == "failed" and not left:
            first = ended.failure  # no coordinator has said which was the first of all nodes
        return {
            "v": 1,
            "status": ended.status,
            "why": ended.why,
            "seconds": round(at - self.began, 3),
            "restarts": ended.restarts,
            "term": self.term,
            "first_failure": _first_failure(first),
            "left_after": self.left_after_notice,
            "locations": list(self.locations),
            "workers": [
                {
                    "rank": exit.rank,
                    "pid": exit.pid,
                    "status": exit.status,
                    "how": exit.how,
                    "seconds": round(exit.seconds, 3),
                    "peak_rss": exit.peak_rss,
                    "cpu_seconds": round(exit.cpu_seconds, 3),
                    "progress": progress_data(exit.progress),
                }
                for exit in sorted(ended.exits, key=lambda exit: exit.rank)
            ],
        }

    def training(self, now: float) -> dict[str, Any]:
        """Return what summary.json says of the training: its steps, whom they waited for, and where the time went."""
        spent = self.time_spent(now)
        return {
            "steps": self.steps,
            "steps_per_second": self.pace,
            "straggler": self.straggler[1] if self.straggler is not None else None,
            "time_spent": spent.data() if spent is not None else None,
        }


Named = tuple[str, Mapping[str, "Any"]]  # the name of an event and its fields


def row_of(happening: node.Event | node.Action) -> Named | None:
    """Return the public event for an event or an action of the decision; None if other parts report it, or nobody does."""
    match happening:
        case node.WorkerRaised(rank, error, _):
            return "worker_raised", {"rank": rank, "type": error.type, "message": error.message, **_about_error(error)}
        case node.StartFailed(failure, _):
            return "worker_start_failed", {"rank": failure.rank, "reason": failure.reason, "status": failure.status}
        case node.WorkerExited(exit, _):
            return "worker_exited", {
                "rank": exit.rank,
                "pid": exit.pid,
                "status": exit.status,
                "how": exit.how,
                "seconds": round(exit.seconds, 3),
                "stopped_with": exit.stopped_with,
                "error": _error_text(exit.error),
                **_about_error(exit.error),
                "progress": progress_data(exit.progress),
            }
        case node.SignalReceived(signum, _, _) if signum != SIGWINCH:
            return "signal_received", {"signal": int(signum), "name": signal_name(signum)}
        case node.FrontLost():
            return "front_lost", {}
        case node.ForwardSignal(signum, ranks) if signum != SIGWINCH:
            return "signal_forwarded", {"signal": int(signum), "name": signal_name(signum), "ranks": compress(ranks)}
        case node.StopWorkers(signum, ranks):
            return "stop_sent", {"signal": int(signum), "name": signal_name(signum), "ranks": compress(ranks)}
        case node.KillWorkers(ranks):
            return "kill_sent", {"ranks": compress(ranks)}
        case node.Suspend():
            return "job_suspended", {}
        case node.Resume():
            return "job_resumed", {}
        case node.Print(text):
            return "notice", {"text": text}
    return None


def _error_text(error: WorkerError | None) -> str | None:
    """Return an exception as TYPE: MESSAGE; None for none."""
    return f"{error.type}: {error.message}" if error is not None else None


def _about_error(error: WorkerError | None) -> dict[str, Any]:
    """Return where and when an exception was raised, and whether it only follows from the end of another worker."""
    if error is None:
        return {"where": None, "follows": False, "raised_at": None}
    return {"where": _where(error), "follows": follows_another(error), "raised_at": error.at}


def _where(error: WorkerError | None) -> str | None:
    """Return where an exception was raised: in the program, else in a library; None if that is not known."""
    if error is None:
        return None
    with suppress(Exception):  # its files may be gone, or of another version: the job ends as ever
        own, inner = stack.relevant_frames(stack.frames_of(error))
        frame = own or inner
        return (
            stack.location(frame, "")
            if frame is not None
            else next(iter(stack.syntax_error_lines(error.traceback)), None)
        )
    return None


def _first_failure(first: WorkerExit | StartFailure | None) -> dict[str, Any] | None:
    """Return the first failure as summary.json holds it; None if no worker failed."""
    if first is None:
        return None
    names = ("rank", "host", "local_rank", "pid", "status", "signal", "how", "error", "where")
    if isinstance(first, StartFailure):
        how = f"could not be started: {first.reason}"
        return {**dict.fromkeys(names), "rank": first.rank, "status": first.status, "how": how}
    *of_exit, _, _ = names  # the last two are made of the exit's error
    of_error = {"error": _error_text(first.error), "where": _where(first.error)}
    return {**{name: getattr(first, name) for name in of_exit}, **of_error}
