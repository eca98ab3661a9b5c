"""What the coordinator tells of a job of several nodes: the words for node 0, and in short for the others."""

from __future__ import annotations

from collections.abc import Mapping

from ddplaunch.report.closing import (
    render_finished,
    render_left,
    render_start_failure,
    render_stopped,
    render_timeout,
    starting_again,
    with_reason,
)
from ddplaunch.report.failure import verdict
from ddplaunch.report.reporter import Reporter
from ddplaunch.report.words import count
from ddplaunch.supervise import job
from ddplaunch.supervise.job import State, Why
from ddplaunch.supervise.outcome import ClusterEnding, Traces

_NO_TRACES = Traces(oom_kills=0, shm=None, log_folder=None)


class JobReporter:
    """The voice of the coordinator."""

    def __init__(self, reporter: Reporter, *, timeout: float | None, max_restarts: int) -> None:
        self._reporter = reporter
        self._timeout = timeout
        self._max_restarts = max_restarts
        self.say = reporter.say

    def heard(self, event: job.Event, before: State) -> None:
        """Tell the readers of what happened between the nodes."""
        match event:
            case job.Joined(member, _):
                self._reporter.tell("node_joined", host=member.host, workers=member.workers, node_rank=member.wanted)
            case job.Left(id, reason, _) if id in before.members:
                member = before.members[id]
                self._reporter.tell("node_left", host=member.host, node_rank=member.place, reason=reason)
            case job.NodeStopping(id, why, _, _) if id in before.members:
                member = before.members[id]
                self._reporter.tell("node_stopping", host=member.host, node_rank=member.place, why=why.name.lower())

    def failed(self, state: State, traces: Mapping[int, Traces], wait: float) -> None:
        """Tell that a generation failed and another follows."""
        first = state.failure
        self._reporter.tell(
            "generation_failed", generation=state.generation, rank=first.rank if first else None, wait=wait
        )
        if state.why is Why.FAILED:
            self._reporter.write(self._failure(state, traces, self._reporter.what_ended(state)))
            self._reporter.say(starting_again(wait, state.restarts, self._max_restarts))
            return
        lacking = state.policy.least - len(state.members)
        when = f", once {lacking} more {'has' if lacking == 1 else 'have'} come" if lacking > 0 else ""
        self._reporter.say(f"all workers start again on {count(len(state.members) + max(0, lacking), 'node')}{when}")

    def ended(self, state: State, traces: Mapping[int, Traces], error: str) -> tuple[str, tuple[int, str] | None]:
        """Tell how the job ended; give the words for the other nodes, and the status and `why` if the cluster decides these.

        `error` is of its own kind, with its hint.
        """
        if error:
            self._reporter.report(error)
            return error, None
        ending = self._reporter.what_ended(state)
        closing = self._closing(state, ending)
        if closing is not None:
            self._reporter.close(closing)
            return f"ddplaunch: {closing}\n", ending.outcome
        report = self._failure(state, traces, ending)
        self._reporter.job_failure = state.failure if state.why is Why.FAILED else None
        self._reporter.report(report)
        return _in_short(report), ending.outcome

    def _closing(self, state: State, ending: ClusterEnding) -> str | None:
        """The line that closes a job which did not fail; None if it failed."""
        now = self._reporter.clock()
        match state.why:
            case Why.FAILED | Why.FINISHED if state.requeue:
                seconds = now - self._reporter.began
                return render_left(len(state.exits), state.requeue, seconds, nodes=len(state.taking_part))
            case Why.FINISHED:
                workers = sum(member.workers for member in state.taking_part)
                plan = self._reporter.plan
                nodes = plan.nnodes if plan is not None else len(state.taking_part)
                return render_finished(workers, now - self._reporter.began, restarts=state.restarts, nodes=nodes)
            case Why.SIGNALLED:
                stopped = (end.stopped_at for end in state.exits if end.stopped_at is not None)
                words = render_stopped(state.signum, min(stopped, default=now) - self._reporter.began, state.exits)
                return with_reason(ending.words, words)
            case Why.TIMED_OUT:
                return render_timeout(self._timeout or 0.0, state.exits)
        return None

    def _failure(self, state: State, traces: Mapping[int, Traces], ending: ClusterEnding) -> str:
        first, start_failure = state.failure, state.start_failure
        if start_failure is not None:
            who = f"rank {start_failure.rank} on {start_failure.host}"
            return render_start_failure(who, start_failure.reason, start_failure.status)
        if state.lost and (state.why is Why.NODE_LOST or first is None):
            return _node_lost(state)
        if first is None:
            return "error: the ddplaunch that had started the job was killed\n"
        plan = self._reporter.plan
        return verdict(
            first,
            state.exits,
            traces.get(first.rank, _NO_TRACES),
            interpreter=plan.interpreter if plan is not None else None,
            debugging=False,
            cwd=self._reporter.cwd,
            restarts=state.restarts,
            max_restarts=self._max_restarts,
            colour=self._reporter.colour,
            ended_by=ending.words,
        )


def _node_lost(state: State) -> str:
    first, *others = state.lost
    lines = [f"error: {first.replace(': ', ' was lost: ', 1)}"]
    lines += [f"  then {other}" for other in others]
    ended = [end for end in state.exits if end.stopped_with is not None]
    if ended:
        lines += [
            "",
            f"  {count(len(ended), 'other worker')} of the job {'was' if len(ended) == 1 else 'were'} stopped",
        ]
    slow = "if it is only slow, `--heartbeat-timeout 60s`; " if "silent" in first else ""
    return "\n".join([*lines, "", f"hint: {slow}to go on without a node that was lost, `--nnodes MIN:MAX`"]) + "\n"


def _in_short(report: str) -> str:
    """The first line of a report, for a node that is not the first."""
    return f"{report.partition(chr(10))[0]}\n"
