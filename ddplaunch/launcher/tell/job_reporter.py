"""What the coordinator reports of the job: its end or failure in full for node 0, and in short for the other nodes."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from signal import SIGINT, SIGKILL, SIGTERM

from ddplaunch.launcher.decide import job
from ddplaunch.launcher.decide.job import SELF_ID, Member, State
from ddplaunch.launcher.tell import closing
from ddplaunch.launcher.tell.blame import Loss, Suspect, blamed, kind_of, suspect_of
from ddplaunch.launcher.tell.paint import plain
from ddplaunch.launcher.tell.reporter import Reporter
from ddplaunch.record.seen import Whereabouts
from ddplaunch.spec.job import JobSpec, Program, ProgramKind
from ddplaunch.spec.outcome import OUT_OF_WALLTIME, OWN_END, PREEMPTED, ClusterEnding, Traces, Why, WorkerExit
from ddplaunch.system.errors import below
from ddplaunch.system.fields import piece
from ddplaunch.system.redaction import Redactor
from ddplaunch.system.words import count, duration

_WITHOUT_LOST = "to go on without a node that was lost, `--nnodes MIN:MAX` or `--spares`"
_LONGEST_PROGRAM = 60  # characters of a program with its arguments, in a hint
_NO_TRACES = Traces(oom_kills=0, shm=None, log_folder=None)


class JobReporter:
    """Reports what concerns all nodes of a job, be they one or many."""

    def __init__(self, reporter: Reporter, spec: JobSpec) -> None:
        """Report the job through this node's `reporter`."""
        self._reporter = reporter
        self._spec = spec
        self.print = reporter.print
        self.cwd = reporter.cwd
        self.keep_collectives = reporter.keep_collectives if not spec.no_sample else lambda _: 0
        self.found = Whereabouts()  # the workers of the generation that ended
        # the rank that the others waited for until the end
        self.came_last: tuple[str, Mapping[str, object]] | None = None
        self.pace: float | None = None  # steps in a second
        self.steps: int | None = None  # about how many the last generation has made
        self._prepared = False
        self._signalled_at: float | None = None  # when a signal has ended the job, if this has said so
        # of the machines: a kind of record/bad_nodes.py, and why
        self._faults: dict[Suspect, tuple[str, str]] = {}
        self._losses: dict[int, tuple[int, list[Loss]]] = {}  # by generation: how many others it had, which were lost
        self._names: tuple[str, ...] = ()  # of the hosts by node rank, from who has started the agents
        self._predecessor: tuple[Suspect, str] | None = None  # from which this coordinator has taken over, and why

    def on_event(self, event: job.Event, before: State, after: State) -> None:
        """Report to the readers what happened between the nodes."""
        emit = self._reporter.emit
        self._names = before.policy.names
        if isinstance(event, job.BeginFailed):
            failed = event.failure
            emit("worker_start_failed", rank=failed.rank, reason=failed.reason, status=failed.status)
        is_stopped = after.why is Why.SIGNALLED or (after.end.halted and not before.end.halted)
        if is_stopped and after.phase is job.Phase.STOPPING and before.why is not Why.SIGNALLED:
            self._say_stopping(event, before)
        if before.policy.max_nodes == 1:
            return
        match event:
            case job.NodeIdle() if after.why is Why.HUNG is not before.why:
                emit("node_stopping", host=before.members[SELF_ID].host, node_rank=0, why="hung")
            case job.DeadlineReached() if after.why is Why.TIMED_OUT is not before.why:
                emit("node_stopping", host=before.members[SELF_ID].host, node_rank=0, why="timed_out")
            case job.Joined(member, _) if not member.is_known:
                emit("node_joined", host=member.host, workers=member.workers, node_rank=member.requested_rank)
            case job.AgentLost(id, reason, _) if id in before.members:
                member = before.members[id]
                emit("node_left", host=member.host, node_rank=member.node_rank, reason=reason)
                self._note_loss(member, event, before)
            case job.NodeStopping(id, why, _, _) if id in before.members:
                member = before.members[id]
                emit("node_stopping", host=member.host, node_rank=member.node_rank, why=why.name.lower())
        match event:
            case job.NodeEnded(id) if id in before.members and not before.members[id].is_leaving:
                pass  # `left_out` reports it if its workers failed too often
            case job.NodeStopping(id) | job.NodeEnded(id) if id in before.members and id not in after.members:
                member = before.members[id]
                emit("node_left", host=member.host, node_rank=member.node_rank, reason=OWN_END)

    def left_out(self, member: Member, reason: str) -> None:
        """Report that the job goes on without a node whose machine seems to be at fault."""
        self._reporter.emit("node_left", host=member.host, node_rank=member.node_rank, reason=reason)
        self._faults.setdefault(suspect_of(member, self._names), ("unfit", reason))

    def coordinator_lost(self, suspect: Suspect, reason: str) -> None:
        """Note that this node has taken over from one whose machine may be at fault, or this one's: who goes on will tell."""
        self._predecessor = (suspect, reason)

    def _note_loss(self, member: Member, lost: job.AgentLost, before: State) -> None:
        """Note the loss of a node for which a machine may be at fault."""
        is_running = before.phase is job.Phase.RUNNING
        match kind_of(lost.reason):
            case "unfit":
                self._faults.setdefault(suspect_of(member, self._names), ("unfit", lost.reason))
            case "lost" if is_running or before.generation.number in self._losses:
                _, losses = self._losses.setdefault(before.generation.number, (len(before.members) - 1, []))
                suspect = suspect_of(member, self._names)
                losses.append(Loss(suspect, lost.reason, is_running, lost.silent, lost.has_ended))

    def _say_stopping(self, event: job.Event, before: State) -> None:
        """Say that the job stops by a signal which came to another node, or to the command that has started the agents.

        `Reporter` says so of a signal that came to this node while its workers ran.
        """
        match event:
            case job.StopRequested(Why.SIGNALLED, signum):
                pass
            case job.NodeStopping(id, Why.SIGNALLED, signum) if id != SELF_ID:
                # without a command that has started all agents, Ctrl-C here would be the first
                signum = signum if before.policy.dispatched else 0
            case job.NodeStopping(_, Why.SIGNALLED, signum) if before.phase is job.Phase.STOPPING:
                pass
            case _:
                return
        self._signalled_at = self._reporter.clock()
        running = [before.members[id] for id in before.members.running] or [*before.members.values()]
        workers = sum(member.workers for member in running)
        self.print(closing.render_stopping(signum, self._spec.grace_period, workers, len(running)))

    def idle(self, seconds: float, why: str) -> None:
        """Report that no worker has made progress for so long, and why if that is known."""
        reason, look = f"{why}; " if why else "", self._reporter.to_be_typed("stacks")
        self._notify(f"no worker has made progress for {duration(seconds)}: {reason}`{look}` shows where they are")

    def progress_again(self, seconds: float) -> None:
        """Report that workers move again, so long after it was reported that none does."""
        self._notify(f"the workers move again, {duration(seconds)} after that was said")

    def _notify(self, text: str) -> None:
        self._reporter.emit("notice", text=text)
        self.print(text)

    def straggler(self, text: str, facts: Mapping[str, object], pace: float | None) -> None:
        """Report that most steps wait for a rank: in a sentence, and as data."""
        self._reporter.emit("straggler", **facts, steps_per_second=pace)
        self.print(text)

    def question(self, state: State) -> Callable[[], ClusterEnding] | None:
        """What gives the `ending` of `failed` and `ended`: it asks the cluster, from which the signal that ended them may be.

        Of a job that has finished after a restart it asks only for the time in the queue.
        """
        if state.why is Why.FINISHED and not state.end.requeue and self._reporter.time_spent() is not None:
            return self._reporter.cluster.time_in_queue
        failure = state.generation.failure if state.why is Why.FAILED else None
        signum = failure.signal if failure is not None else None
        signum = state.signum if state.why is Why.SIGNALLED else signum
        return self._reporter.cluster.why_ending if signum in (SIGTERM, SIGKILL) else None

    def prepare(self, state: State) -> None:
        """Import what reports a failure while the workers are ending: 5 ms of tables and patterns, which only that needs."""
        if state.why is Why.FAILED and not self._prepared:
            self._prepared = True
            with suppress(Exception):  # what uses it raises that again, and makes do without
                from ddplaunch.launcher.tell import failure  # noqa: F401

    def failed(self, state: State, traces: Mapping[int, Traces], wait: float, ending: ClusterEnding) -> None:
        """Report that a generation failed and another follows after `wait` seconds."""
        if state.why in (Why.FAILED, Why.HUNG):
            number, failure = state.generation.number, state.generation.failure
            rank = failure.rank if failure is not None else None
            self._reporter.emit("generation_failed", generation=number, rank=rank, wait=wait)
            spec, used = self._spec, len(state.restarts.spent)
            # the restart that follows is counted already
            self._reporter.write(self._reporter.paint.labels(self._failure(state, traces, ending, used - 1)))
            self.print(
                closing.starting_again(wait, state.restarts.number, used, spec.max_restarts, spec.restart_window)
            )
            return
        lacking = state.policy.min_nodes - len(state.members)
        nodes = min(len(state.members) + max(0, lacking), state.policy.most_running)
        when = f", once {lacking} more {'has' if lacking == 1 else 'have'} joined" if lacking > 0 else ""
        self.print(f"all workers start again on {count(nodes, 'node')}{when}")

    def ended(
        self, state: State, traces: Mapping[int, Traces], error: str, ending: ClusterEnding
    ) -> tuple[str, tuple[int, str] | None]:
        """Report how the job ended; return the text for the other nodes, and the status and `why` if the cluster decides these.

        `error`, if any, is reported as it is, with its hint: it explains the end better than the state.
        """
        if error:
            self._reporter.report(self._reporter.paint.labels(error))
            return error, None
        text, outcome = self._ended(state, traces, ending)
        self._remember_faults(state)
        return text, outcome

    def _ended(
        self, state: State, traces: Mapping[int, Traces], ending: ClusterEnding
    ) -> tuple[str, tuple[int, str] | None]:
        """Print the closing line of the job, or the report of its failure; return what `ended` does."""
        self._reporter.pace, self._reporter.steps, self._reporter.queued = self.pace, self.steps, ending.queued or 0.0
        if self.came_last is not None:
            text, self._reporter.came_last = self.came_last
            self.print(text)
        if state.end.requeue:  # the status speaks of the notice
            ending = ClusterEnding(ending.text)
        line = self._closing(state, ending)
        if line is not None:
            explained = state.why is Why.TIMED_OUT or (state.why is Why.SIGNALLED and state.signum == SIGINT)
            if explained and not state.end.without_workers:
                for location in self.found.locations:
                    self.print(location)
            self._reporter.print_closing(line)
            return f"ddplaunch: {line}\n", ending.outcome
        report = self._reporter.paint.labels(self._failure(state, traces, ending, len(state.restarts.spent)))
        if state.why is Why.FAILED:
            self._reporter.job_failure = state.generation.start_failure or state.generation.failure
        self._reporter.report(report)
        if state.why is not Why.FRONT_LOST:  # by which nobody sees the report here
            report = report[: report.find("\n") + 1]  # which will do for the other nodes
        return plain(report), ending.outcome  # their stderr may have no colours

    def _closing(self, state: State, ending: ClusterEnding) -> str | None:
        """Return the line that closes a job which did not fail; None if the job failed."""
        now, began, taking_part = self._reporter.clock(), self._reporter.began, state.members.taking_part
        exits, requeue = state.generation.exits, state.end.requeue
        stopped_now = () if state.end.without_workers else exits
        match state.why:
            case Why.FAILED | Why.FINISHED if requeue:
                return closing.render_after_notice(len(exits), requeue, now - began, nodes=len(taking_part))
            case Why.FINISHED:
                workers = sum(member.workers for member in taking_part)
                plan, nodes = self._reporter.plan, len(taking_part)
                if plan is not None and nodes > 1:
                    nodes = plan.nnodes  # where a command was started for each rank, each takes part
                text = closing.render_finished(workers, now - began, restarts=state.restarts.number, nodes=nodes)
                spent = self._reporter.time_spent()
                return text if spent is None else f"{text}, {spent}"
            case Why.SIGNALLED:
                stopped = (end.stopped_at for end in stopped_now if end.stopped_at is not None)
                # the workers may have been asked to end before, as after the loss of a node
                at = min(stopped, default=now) if self._signalled_at is None else self._signalled_at
                after = at - began if state.has_begun else None
                reason = f"{ending.text}: " if ending.text else ""
                return reason + closing.render_stopped(state.signum, after, stopped_now)
            case Why.TIMED_OUT:
                return closing.render_timeout(self._spec.timeout or 0.0, stopped_now)
        return None

    def _failure(self, state: State, traces: Mapping[int, Traces], ending: ClusterEnding, restarts: int) -> str:
        """Return the report that fits how the job failed: a hang, a failed start, a lost node, or the first failure."""
        first, start_failure = state.generation.failure, state.generation.start_failure
        if state.why is Why.HUNG:
            return closing.render_hang(self.found, self._spec.hang_timeout or 0.0, state, traces, self._reporter.home)
        if start_failure is not None:
            on = f" on {start_failure.host}" if len(state.members) > 1 else ""
            return closing.render_start_failure(f"rank {start_failure.rank}{on}", start_failure)
        if state.generation.lost and (state.why is Why.NODE_LOST or first is None):
            return _node_lost(state)
        if first is None:
            alone = state.policy.may_leave  # each node was started by a command of its own
            whose = f"of {state.members[SELF_ID]}" if alone else "that had started the job"
            hint = f"\nhint: {_WITHOUT_LOST}\n" if alone and not state.policy.has_successors else ""
            return f"error: the ddplaunch {whose} was killed\n{hint}"
        try:
            return self._full_report(first, state, traces, ending, restarts)
        except Exception as error:  # noqa: BLE001 - its files may be gone, or of another version: the job ends as ever
            return closing.render_short(first, f"{type(error).__name__}: {error}")

    def _full_report(
        self, first: WorkerExit, state: State, traces: Mapping[int, Traces], ending: ClusterEnding, restarts: int
    ) -> str:
        """Return the full report of a first failure, with its cause as far as the evidence shows it."""
        from ddplaunch.launcher.tell.causes import Evidence, classify  # most jobs do not fail
        from ddplaunch.launcher.tell.failure import FailureReport, render

        plan, spec, of_node = self._reporter.plan, self._spec, traces.get(first.rank, _NO_TRACES)
        shm_size, shm_free = of_node.shm or (None, None)
        facts = Evidence(
            oom_kills=of_node.oom_kills,
            oom_kills_of_machine=of_node.oom_kills_of_machine,
            shm_size=shm_size,
            shm_free=shm_free,
            interpreter=plan.interpreter if plan is not None else None,
            workers=len(state.generation.exits),
            program=_as_typed(spec.program),
            master_port=self._reporter.master_port,
            port_given=plan is not None and plan.master_port is not None,
            debugging=spec.debug_rank is not None or spec.debug_on_error,
            chaos=any(fault.kind == "kill" and fault.target == first.rank for fault in spec.chaos),
            preempted=ending.text == PREEMPTED,
            walltime_over=ending.text == OUT_OF_WALLTIME,
        )
        cause = classify(first, facts)
        if cause is not None and cause.fault:
            by_node = state.generation.node_exits
            ids = [id for id, exits in by_node.items() if first in exits and id in state.members]
            suspects = [suspect_of(state.members[id], self._names) for id in ids]
            self._faults.update(dict.fromkeys(suspects, (cause.fault, cause.line or cause.name)))
        report = FailureReport(
            first=first,
            exits=tuple(state.generation.exits),
            cause=cause,
            ended_by=ending.text,
            cwd=self._reporter.cwd,
            home=self._reporter.home,
            restarts=restarts,
            max_restarts=spec.max_restarts,
            log_folder=of_node.log_folder,
            is_simulated=spec.simulate is not None,
            locations=self.found.locations,
        )
        return render(report, self._reporter.paint)

    def _remember_faults(self, state: State) -> None:
        """Remember the machines that have failed. All workers have ended."""
        for others, losses in self._losses.values():
            for suspect, why in blamed(suspect_of(state.members[SELF_ID], self._names), others, losses).items():
                self._faults.setdefault(suspect, ("lost", why))
        if self._predecessor is not None and not state.succession.took_over and not state.end.is_cut_off:
            suspect, why = self._predecessor
            if kind := kind_of(why):
                self._faults.setdefault(suspect, (kind, why))
        path, run_id = self._reporter.bad_nodes, self._reporter.plan.run_id if self._reporter.plan is not None else ""
        if not self._faults or not path or self._spec.chaos:
            return
        from ddplaunch.record.bad_nodes import Failure, remember_suspects

        now, in_slurm = time.time(), bool(self._reporter.slurm_job)
        failures = [
            (
                Failure(
                    host=suspect.host, kind=kind, at=now, run=run_id, why=piece(Redactor().text(why)), in_slurm=in_slurm
                ),
                suspect.address,
            )
            for suspect, (kind, why) in self._faults.items()
        ]
        remember_suspects(path, failures, now)


def _as_typed(program: Program) -> str:
    """Write a program as it is typed; without its arguments if these are long, and "SCRIPT" for what is not Python's."""
    if program.kind is ProgramKind.COMMAND:
        return "SCRIPT"
    target = ["-m", program.target] if program.kind is ProgramKind.MODULE else [program.target]
    whole = shlex.join([*target, *program.args])
    return whole if len(whole) <= _LONGEST_PROGRAM else f"{shlex.join(target)} ..."


def _node_lost(state: State) -> str:
    """Return the report of a job that ended because a node was lost."""
    first, *others = state.generation.lost
    lines = [f"error: {first.replace(': ', ' was lost: ', 1)}"]
    lines += [f"  then {other}" for other in others]
    if ended := sum(end.stopped_with is not None for end in state.generation.exits):
        lines += ["", f"  {count(ended, 'other worker')} of the job {'was' if ended == 1 else 'were'} stopped"]
    slow = "if it is only slow, `--heartbeat-timeout 60s`; " if "silent" in first else ""
    hint = f"hint: {slow}{_WITHOUT_LOST}"
    if state.policy.has_successors and len(state.members) >= state.policy.min_nodes:
        hint = ""  # the loss alone did not end the job
    elif state.policy.has_successors:
        hint = f"hint: {slow}{count(len(state.members), 'node')} left, and `--nnodes` wants {state.policy.min_nodes}"
    return "\n".join([*map(below, lines), *(["", hint] if hint else [])]) + "\n"
