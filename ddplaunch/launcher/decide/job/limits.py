"""The limits of time that a coordinator keeps: for the job, and for workers without progress (idle); when they wait. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, isfinite

from msgspec import Struct
from msgspec.structs import replace

from ddplaunch.launcher.decide.job.members import FrozenMap, Member, Members, Policy

# seconds without progress on any node after which that is printed, if --hang-timeout does not end the job
IDLE_LINE_AFTER = 60.0
# seconds, twice as long as a node takes from one report of no progress to the next, without --hang-timeout
_RECENT = 20.0
NO_SPANS: FrozenMap[tuple[float, float]] = FrozenMap.of({})


class Limits(Struct, frozen=True, kw_only=True):
    """When the time of the job is up, and what makes its limits of time wait: Ctrl-Z, and debuggers."""

    job_deadline: float | None = None  # when the time of the whole job is up, on the coordinator's clock
    suspended_at: float | None = None  # when the job was suspended, on the same clock; None: it goes on
    debugging: frozenset[int] = frozenset()  # ids of nodes with a worker in a debugger
    named_as_debugging: frozenset[int] = frozenset()  # ids of nodes for which the user has read that limits wait

    def next_generation(self) -> Limits:
        """Return the limits of a generation that begins: its workers run, and none is in a debugger."""
        return Limits(job_deadline=self.job_deadline)

    def suspended(self, at: float) -> Limits:
        """Return the limits after Ctrl-Z; a further one changes nothing."""
        return self if self.suspended_at is not None else replace(self, suspended_at=at)

    def resumed(self, at: float) -> Limits:
        """Return the limits after the job was resumed: the time in which it was suspended does not count."""
        deadline = self.job_deadline
        if deadline is not None and self.suspended_at is not None:
            deadline += at - self.suspended_at
        return replace(self, suspended_at=None, job_deadline=deadline)

    def with_debugger(self, id: int) -> Limits:
        """Return the limits while a debugger holds a worker of this node; the user has read that line, or needs none."""
        return replace(self, debugging=self.debugging | {id}, named_as_debugging=self.named_as_debugging | {id})


def line_on_debugger(policy: Policy, member: Member) -> str:
    """Return a line on which limits wait while a worker of this node is in a debugger; "" if the job has no limit."""
    limits = [name for name, limit in (("--timeout", policy.timeout), ("--hang-timeout", policy.hang_timeout)) if limit]
    verb = "wait" if len(limits) > 1 else "waits"
    return f"{member} holds a worker in a debugger: {' and '.join(limits)} {verb} until it is left" if limits else ""


class Idleness(Struct, frozen=True, kw_only=True):
    """For how long no worker of any node has made progress. Times are of the coordinator's clock."""

    # from when to when no worker of a node made progress, by node id
    idle_spans: FrozenMap[tuple[float, float]] = NO_SPANS
    progress_at: float = -inf  # when any worker last made progress, as far as is known
    awaited_node: int | None = None  # id of a node that must report again before all nodes can be known to be idle
    printed_at: float = -inf  # when it was last printed that no worker makes progress

    def next_generation(self) -> Idleness:
        """Return the idleness when a generation begins; what was printed stays printed until workers make progress."""
        return replace(self, idle_spans=NO_SPANS)

    def after_report(
        self, id: int, since: float, at: float, members: Members, limit: float
    ) -> tuple[Idleness, float | None]:
        """Return the idleness once a node has said, at `at`, since when it made no progress; and for how long no node made any.

        None in place of these seconds: they are fewer than `limit`, the user has read them, or a node must report again first
        (`awaited_node`). A span: since when a node is idle, and when it said so.
        """
        spans, progress_at = self.idle_spans.with_item(id, (since, at)), max(self.progress_at, since)
        idleness = replace(self, idle_spans=spans, progress_at=progress_at)
        # a report before that of the awaited node changes nothing: with thousands of nodes, most reports end here
        awaits_another = self.awaited_node is not None and self.awaited_node != id and members.runs(self.awaited_node)
        if at - since < limit or idleness.is_printed_since_progress or awaits_another:
            return idleness, None
        running = members.running
        awaited = idleness.node_with_old_report(running, limit)
        if awaited is not None:
            return replace(idleness, awaited_node=awaited), None
        all_idle_since, until = idleness.span_of_all(running)  # some worker made progress until it began
        idleness = replace(idleness, progress_at=all_idle_since)
        return idleness, None if idleness.is_printed_since_progress else until - all_idle_since

    def span_of_all(self, running: Sequence[int]) -> tuple[float, float]:
        """Return from when to when all these nodes were idle: from the last begin of their spans to the first end."""
        spans = [self.idle_spans[id] for id in running]
        return max(since for since, _ in spans), min(until for _, until in spans)

    def stands_still(self, running: Sequence[int], at: float) -> bool:
        """Whether no worker of these nodes has made progress for as long as the line about that needs, and until now.

        With a long --hang-timeout nodes report seldom: what they said long ago says nothing of now.
        """
        if not running or any(id not in self.idle_spans for id in running):
            return False
        since, until = self.span_of_all(running)
        return until - since >= IDLE_LINE_AFTER and at - until <= _RECENT

    @property
    def is_printed_since_progress(self) -> bool:
        """Whether it was printed that no worker makes progress, and none has made any since."""
        return isfinite(self.printed_at) and self.progress_at <= self.printed_at

    def node_with_old_report(self, running: Sequence[int], limit: float) -> int | None:
        """Return a node that must report again before all can be known to have been idle together for `limit` seconds.

        None: all were.
        """
        missing = next((id for id in running if id not in self.idle_spans), None)
        if missing is not None:
            return missing
        since = max(self.idle_spans[id][0] for id in running)
        too_old = [id for id in running if self.idle_spans[id][1] - since < limit]
        # the node that reported last is likely to be the last again
        return max(too_old, key=lambda id: self.idle_spans[id][1], default=None)
