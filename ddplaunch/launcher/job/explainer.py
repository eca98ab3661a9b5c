"""What is found out about an end, or a hang, before it is reported: where the workers were, and why the cluster ends the job."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Protocol

from msgspec.structs import replace

from ddplaunch.launcher.decide import job
from ddplaunch.launcher.decide.first_failure import failed_itself
from ddplaunch.launcher.tell.job_reporter import Findings, JobReporter
from ddplaunch.record.seen import Sample, Whereabouts
from ddplaunch.spec.outcome import ClusterEnding, Traces, Why, WorkerExit
from ddplaunch.system.errors import call_or_report
from ddplaunch.system.loop.loop import Loop

if TYPE_CHECKING:
    from ddplaunch.launcher.job.questions import Questions
    from ddplaunch.record.window.questions import Answer
    from ddplaunch.system.loop.loop import Pending

_EXPLAINED_WITHIN = 5.0  # seconds that a child gets


class _Coordinator(Protocol):
    """The coordinator, as far as a report on idle workers needs it."""

    state: job.State

    @property
    def questions(self) -> Questions: ...
    def members_at_work(self) -> Mapping[int, job.Member] | None: ...


class Explainer:
    """Explains ends and hangs, in children while the loop goes on: to compare what thousands of workers did takes long."""

    def __init__(self, loop: Loop, reporter: JobReporter) -> None:
        """Explain nothing yet; `reporter` knows what to ask the cluster."""
        self._loop = loop
        self._reporter = reporter
        self._traces: dict[int, Traces] = {}  # of this generation, by rank
        self._samples: dict[int, Sequence[Sample]] = {}  # of this generation, by member
        self._whereabouts: Pending[Whereabouts] | None = None  # as asked the last time
        self._cluster_ending: Pending[ClusterEnding] | None = None  # likewise

    def begin_generation(self) -> None:
        """Forget what was left of the last generation."""
        self._traces, self._samples = {}, {}

    def add_traces(self, exits: Iterable[WorkerExit], traces: Traces) -> None:
        """Note what the workers that have ended on a node have left there."""
        self._traces.update(dict.fromkeys((end.rank for end in exits), traces))

    def add_samples(self, id: int, samples: Sequence[Sample]) -> None:
        """Note where the workers of a member were when they had to end."""
        self._samples[id] = samples

    def explain_end(self, state: job.State, report: Callable[[Findings], None]) -> None:
        """Call `report` with all that can be found out about the end of a generation; what is not found in time stays empty.

        First, where the workers were, if they have said so as they had to end; then, if the cluster may be ending the job, why.
        """
        self.report_now()  # of an end before this one, with what is found by now
        cluster_question = self._reporter.cluster_question(state)
        findings = Findings(state=state, traces=self._traces)

        def ask_cluster_and_report(found: Whereabouts) -> None:
            with_whereabouts = replace(findings, found=found)
            if cluster_question is None:
                report(with_whereabouts)
                return
            self._cluster_ending = self._loop.ask(
                cluster_question, ClusterEnding(), lambda ending: report(replace(with_whereabouts, ending=ending))
            )

        if not self._samples:
            ask_cluster_and_report(Whereabouts())
            return
        samples = tuple(chain.from_iterable(self._samples.values()))
        # ranks that were not at work any more: they ended by themselves, or failed before they were stopped
        ended = frozenset(end.rank for end in state.generation.exits if end.stopped_with is None or failed_itself(end))
        explain = partial(_explain, samples, self._reporter.cwd, of_hang=state.why is Why.HUNG, ended=ended)
        self._whereabouts = self._loop.ask(explain, Whereabouts(), ask_cluster_and_report, within=_EXPLAINED_WITHIN)

    def explain_hang(self, samples: Sequence[Sample], then: Callable[[Whereabouts], None]) -> None:
        """Call `then` with what is wrong in workers that make no progress."""
        explain = partial(_explain, tuple(samples), self._reporter.cwd, of_hang=True)
        self._loop.ask(explain, Whereabouts(), then, within=_EXPLAINED_WITHIN)

    def report_now(self) -> None:
        """Have what waits to be reported reported without what is not known yet."""
        for pending in (self._whereabouts, self._cluster_ending):
            if pending is not None:
                pending.give_up()


class IdleReport:
    """The report that no worker makes progress, and which rank the others wait for: all nodes are asked where their workers are.

    What fails in that is no reason to end a job: the report says less then.
    """

    def __init__(self, coordinator: _Coordinator, explainer: Explainer, reporter: JobReporter, seconds: float) -> None:
        """Prepare to report that the workers have been idle for so many seconds; `ask_nodes` follows."""
        self._coordinator = coordinator
        self._explainer = explainer
        self._reporter = reporter
        self._seconds = seconds
        self._decided_at = coordinator.state.idleness.printed_at
        self._samples: list[Sample] = []

    def ask_nodes(self) -> None:
        """Ask all nodes for the stacks of their workers; the report follows once they have answered."""
        from ddplaunch.launcher.job.straggler_check import TRAVEL_TIME, WORKERS_WITHIN
        from ddplaunch.record.window.questions import AskStacks

        question, within = AskStacks(WORKERS_WITHIN, threads=False, native=False), WORKERS_WITHIN + TRAVEL_TIME
        self._call_or_report_at_once(lambda: self._coordinator.questions.ask(question, within, self))

    def on_answer(self, member: job.Member, answer: Answer) -> None:
        """Keep where the workers of a node are. Called by the questions."""
        from ddplaunch.record.window.questions import NodeStacks

        if isinstance(answer, NodeStacks):
            self._call_or_report_at_once(lambda: self._samples.extend(answer.samples(member.host)))

    def on_all_answered(self) -> None:
        """Have a child compare the stacks. Called by the questions."""
        self._call_or_report_at_once(lambda: self._explainer.explain_hang(self._samples, self._on_explained))

    def _on_explained(self, found: Whereabouts) -> None:
        """Report, unless a worker has made progress since. Called by the loop."""
        has_progressed = self._coordinator.state.idleness.progress_at > self._decided_at
        if self._coordinator.members_at_work() and not has_progressed:
            self._reporter.report_idle(self._seconds, found.explanation)

    def _call_or_report_at_once(self, call: Callable[[], object]) -> None:
        """Call this; if it fails, report without what it would find out."""
        call_or_report(call, lambda _why: self._reporter.report_idle(self._seconds, ""))


def _explain(samples: Sequence[Sample], cwd: str, *, of_hang: bool, ended: frozenset[int] = frozenset()) -> Whereabouts:
    """Return where workers were when they had to end and, if they hang, what is wrong. Runs in a child."""
    try:
        from ddplaunch.record.seen.collectives import describe_end  # most jobs do not fail

        return describe_end(samples, cwd, of_hang=of_hang, ended=ended)
    except Exception:  # noqa: BLE001 - its files may be gone, or of another version: the rest is reported without
        return Whereabouts()
