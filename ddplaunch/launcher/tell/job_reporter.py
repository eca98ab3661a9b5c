"""What the coordinator reports of the job: its end or failure in full for node 0, and in short for the other nodes."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from signal import SIGINT, SIGKILL, SIGTERM

from msgspec import Struct

from ddplaunch.launcher.decide import job
from ddplaunch.launcher.decide.job import SELF_ID, Member, State
from ddplaunch.launcher.tell import closing
from ddplaunch.launcher.tell.blame import OUT_OF_CONTACT, Fault, Faults, suspect_of
from ddplaunch.launcher.tell.reporter import Reporter
from ddplaunch.record.seen import Whereabouts
from ddplaunch.spec.job import Program, ProgramKind
from ddplaunch.spec.outcome import ENDED_ITSELF, ClusterEnding, Traces, Why, WorkerExit
from ddplaunch.system.console.paint import plain
from ddplaunch.system.errors import indented
from ddplaunch.system.fields import piece
from ddplaunch.system.redaction import Redactor
from ddplaunch.system.words import count, duration

_TO_GO_ON_WITHOUT = "to go on without a node that was lost, `--nnodes MIN:MAX` or `--spares`"
_LONGEST_PROGRAM = 60  # characters of a program with its arguments, in a hint


class Findings(Struct, frozen=True, kw_only=True):
    """What the coordinator knows of the end of a job, or of a generation."""

    state: State
    traces: Mapping[int, Traces] = {}  # of the nodes, by rank
    found: Whereabouts = Whereabouts()  # where the workers were
    ending: ClusterEnding = ClusterEnding()
    error: str = ""  # why the job could not go on, with its hint: it explains the end better than the state


class JobReporter:
    """Reports, in the process of the coordinator, what concerns all nodes of a job, even if there is only one."""

    def __init__(self, reporter: Reporter) -> None:
        """Report the job through this node's `reporter`."""
        self._reporter = reporter
        self.story = reporter.story
        self._spec = reporter.spec
        self.print = reporter.print
        self.cwd = reporter.around.cwd
        self.keep_collectives = reporter.keep_collectives if not reporter.spec.no_sample else lambda _: 0
        self._faults = Faults()

    def on_event(self, event: job.Event, before: State, after: State) -> None:
        """Report to the readers what happened between the nodes; `before` and `after` are the states around the event."""
        emit = self._reporter.emit
        if isinstance(event, job.BeginFailed):
            failed = event.failure
            emit("worker_start_failed", rank=failed.rank, reason=failed.reason, status=failed.status)
        is_on_no_node = SELF_ID not in before.members  # the coordinator is in the command that started all agents
        if isinstance(event, job.NodeEnded) and is_on_no_node:
            for end in event.exits:
                self.story.note_exit(end)  # on a node, `Reporter` notes those of its own workers
        # said once: when the stop begins, or when a signal comes during a stop that a restart was to follow
        was_to_restart = not before.end.no_restart
        is_stopped_for_good = after.why is Why.SIGNALLED or (was_to_restart and after.end.no_restart)
        if is_stopped_for_good and after.phase is job.Phase.STOPPING and before.why is not Why.SIGNALLED:
            self._say_stopping(event, before)
        if before.policy.max_nodes > 1:
            self._emit_for_nodes(event, before, after)
            self._emit_departures(event, before, after)

    def _emit_for_nodes(self, event: job.Event, before: State, after: State) -> None:
        """Emit what happened to a node, and note the machines that may be at fault."""
        emit = self._reporter.emit
        match event:
            case job.NodeIdle() | job.DeadlineReached() if after.why is not before.why and after.why in (
                Why.HUNG,
                Why.TIMED_OUT,
            ):
                # the coordinator itself stops the job, in the name of node 0, which may have only its fixed rank yet
                node_0 = next((one for one in before.members.values() if 0 in (one.node_rank, one.fixed_rank)), None)
                if node_0 is not None:
                    emit("node_stopping", host=node_0.host, node_rank=0, why=after.why.value)
            case job.Joined(member, _):
                emit("node_joined", host=member.host, workers=member.workers, node_rank=member.requested_rank)
            case job.AgentLost(id, reason, _) if id in before.members:
                member = before.members[id]
                emit("node_left", host=member.host, node_rank=member.node_rank, reason=reason)
                self._faults.note_loss(member, event, before)
            case job.OwnUnfit(reason) if after.phase is job.Phase.ENDED:
                # node 0 ends here while the others wait for another one: no other node reports that it is unfit
                own = suspect_of(before.members[SELF_ID], before.policy.host_names)
                self._faults.found.setdefault(own, Fault("unfit", f"its health check failed: {reason}"))
                self._remember_faults(after)
            case job.NodeStopping(id, why, _, _) if id in before.members:
                member = before.members[id]
                emit("node_stopping", host=member.host, node_rank=member.node_rank, why=why.value)

    def _emit_departures(self, event: job.Event, before: State, after: State) -> None:
        """Emit that nodes have left which were not lost, while the job goes on: `_emit_for_nodes` has the lost ones."""
        match event:
            # nodes do not hear each other: those without workers leave at once
            case job.FirstNodeUnreached() | job.DeadlineReached():
                for id in before.members.keys() - after.members.keys():
                    self._emit_left_behind(before.members[id])
            case job.NodeEnded(id) if id in before.members and id not in after.members:
                member = before.members[id]
                if member.why_left_behind:
                    self._emit_left_behind(member)
                elif member.is_leaving:  # a signal to its agent alone has stopped its workers
                    self._emit_left(member)
                # else its workers failed too often, which `report_left_out` reports
            case job.NodeStopping(id) if id in before.members and id not in after.members:
                self._emit_left(before.members[id])  # it has no workers, or its command is gone: its end is not awaited

    def _emit_left(self, member: Member) -> None:
        """Emit that a node has left by itself."""
        self._reporter.emit("node_left", host=member.host, node_rank=member.node_rank, reason=ENDED_ITSELF)

    def _emit_left_behind(self, member: Member) -> None:
        """Report that the job goes on without a node which others do not hear."""
        reason = "it and other nodes do not hear each other"
        self._reporter.emit("node_left", host=member.host, node_rank=member.node_rank, reason=reason)

    def report_left_out(self, member: Member, reason: str, names: Sequence[str]) -> None:
        """Report that the job goes on without a node whose machine seems to be at fault; `names` are those of `suspect_of`."""
        self._reporter.emit("node_left", host=member.host, node_rank=member.node_rank, reason=reason)
        self._faults.found.setdefault(suspect_of(member, names), Fault("unfit", reason))

    def _say_stopping(self, event: job.Event, before: State) -> None:
        """Print that the job stops by a signal which came to another node, or to the command that has started the agents.

        `Reporter` prints so for a signal that came to this node while its workers ran.
        """
        match event:
            case job.StopRequested(Why.SIGNALLED, signum):
                next_ctrl_c_kills = signum == SIGINT
            case job.NodeStopping(id, Why.SIGNALLED, signum) if id != SELF_ID:
                # without a command that has started all agents, a next Ctrl-C here would be the first, and kill nothing
                next_ctrl_c_kills = signum == SIGINT and before.policy.has_one_command
            case job.NodeStopping(_, Why.SIGNALLED, signum) if before.phase is job.Phase.STOPPING:
                # it came to this node, whose workers the coordinator was stopping already: then `Reporter` is silent
                next_ctrl_c_kills = signum == SIGINT
            case _:
                return
        self.story.signalled_at = self._reporter.clock()
        # where no worker runs, all nodes that are here
        running = [before.members[id] for id in before.members.running] or [*before.members.values()]
        workers = sum(member.workers for member in running)
        self.print(
            closing.render_stopping(self._spec.grace_period, workers, len(running), next_ctrl_c_kills=next_ctrl_c_kills)
        )

    def report_idle(self, seconds: float, why: str) -> None:
        """Report that no worker has made progress for so long, and why if that is known."""
        self.story.idle_why = why
        reason, look = f"{why}; " if why else "", self._reporter.to_be_typed("stacks")
        self._notify(f"no worker has made progress for {duration(seconds)}: {reason}`{look}` shows where they are")

    def report_progress(self, seconds: float) -> None:
        """Report that workers move again, so long after it was reported that none does."""
        self._notify(f"the workers move again, {duration(seconds)} after that was said")

    def _notify(self, text: str) -> None:
        self._reporter.emit("notice", text=text)
        self.print(text)

    def report_straggler(self, text: str, facts: Mapping[str, object], pace: float | None) -> None:
        """Report that most steps wait for a rank: in a sentence, and as data."""
        self._reporter.emit("straggler", **facts, steps_per_second=pace)
        self.print(text)

    def cluster_question(self, state: State) -> Callable[[], ClusterEnding] | None:
        """Return the call that asks the cluster why it ended the job (`Findings.ending`), if the signal may be its own.

        After a job that has finished with a restart, it asks for the time in the queue alone; None: the cluster can tell nothing.
        """
        cluster = self._reporter.around.cluster
        if cluster is None:
            return None
        has_finished = state.why is Why.FINISHED and not state.end.requeue  # after a notice the job is queued again
        if has_finished and self.story.time_spent(self._reporter.clock()) is not None:
            return cluster.time_in_queue
        failure = state.generation.failure if state.why is Why.FAILED else None
        signum = failure.signal if failure is not None else None
        signum = state.signum if state.why is Why.SIGNALLED else signum
        return cluster.why_ending if signum in (SIGTERM, SIGKILL) else None

    def prepare(self) -> None:
        """Import the failure summary while the workers are ending: it takes 5 ms, and most jobs do not need it."""
        with suppress(Exception):  # the report raises it again, and is short then
            from ddplaunch.launcher.tell import failure  # noqa: F401

    def report_failure(self, findings: Findings, wait: float) -> None:
        """Report that another generation follows after `wait` seconds: one has failed, or nodes have come or gone."""
        state = findings.state
        if state.why in (Why.FAILED, Why.HUNG):
            number, failure = state.generation.number, state.generation.failure
            rank = failure.rank if failure is not None else None
            spec, used = self._spec, len(state.restarts.spent)
            # `restarts.number` counts all, `used` those that count for --max-restarts; both with the one that follows
            used_before = used - 1
            report = self._failure_report(findings, used_before)
            text = closing.headline(report)
            self._reporter.emit("generation_failed", generation=number, rank=rank, wait=wait, text=text)
            self._reporter.stderr.write(report)
            self.print(
                closing.starting_again(wait, state.restarts.number, used, spec.max_restarts, spec.restart_window)
            )
            return
        missing = max(0, state.policy.min_nodes - len(state.members))
        nodes = min(len(state.members) + missing, state.policy.most_running)  # any others are spares
        when = f", once {missing} more {'has' if missing == 1 else 'have'} joined" if missing else ""
        self.print(f"all workers start again on {count(nodes, 'node')}{when}")

    def report_end(self, findings: Findings) -> tuple[str, tuple[int, str] | None]:
        """Report how the job ended; return the text for the other nodes, and the status and `why` if the cluster decides them.

        The cluster decides them where it has ended the job, as when its time was up; else they are None.
        """
        state, ending = findings.state, findings.ending
        if findings.error:  # why the job could not go on, which explains its end better than the state
            self._say_end(findings.error, is_report=True)
            return findings.error, None
        self.story.queued = ending.queued or 0.0  # seconds in the cluster's queue
        if self.story.straggler is not None:
            sentence, _ = self.story.straggler
            self.print(sentence)
        text = self._print_closing(findings)
        self._remember_faults(state)
        is_queued_again = bool(state.end.requeue)  # then it keeps the status of its notice
        return text, None if is_queued_again else ending.outcome

    def _print_closing(self, findings: Findings) -> str:
        """Print the closing line of the job, or the report of its failure; return the text for the other nodes."""
        state = findings.state
        # between generations `found` is of the generation before
        found = Whereabouts() if state.end.between_generations else findings.found
        line = self._closing_line(state, findings.ending)
        if line is not None:  # the job has not failed
            stopped_by_user = state.why is Why.SIGNALLED and state.signum == SIGINT
            if stopped_by_user or state.why is Why.TIMED_OUT:  # the job may have hung: say where its workers were
                self.story.locations = found.locations
            if state.why in (Why.SIGNALLED, Why.TIMED_OUT):
                # what the stacks show counts after Ctrl-C only: a job at its time limit may just have been at work
                line = self._with_why_idle(line, state, found.explanation if stopped_by_user else "")
            for location in self.story.locations:
                self.print(location)
            self._say_end(line, is_report=False)
            return f"ddplaunch: {line}\n"
        self.story.locations = found.locations
        report = self._failure_report(findings, len(state.restarts.spent))
        if state.why is Why.FAILED:
            self.story.first_failure = state.generation.start_failure or state.generation.failure
        self._say_end(report, is_report=True)
        has_lost_terminal = state.why is Why.FRONT_LOST  # then only the other nodes can show the report
        if not has_lost_terminal:
            report = report[: report.find("\n") + 1]  # the first line is enough for the other nodes
        return plain(report)  # their stderr may have no colours

    def _with_why_idle(self, line: str, state: State, explanation: str) -> str:
        """Add to the closing line why the job stood still, if it did.

        `explanation` is who waited for whom at the end, "" if that is not known: then the notice counts that was printed before.
        """
        was_idle = state.idleness.is_printed_since_progress
        why = explanation or (self.story.idle_why if was_idle else "")
        parts = filter(None, ("no worker made progress any more" if was_idle else "", why))
        return "; ".join(filter(None, (line, ": ".join(parts))))

    def _say_end(self, text: str, *, is_report: bool) -> None:
        """Tell how the job ended, in a report or in one line; a caller of `launch()` gets either, the user then no report."""
        self.story.closing = text
        caller, stderr = self._reporter.caller, self._reporter.stderr
        if caller is not None:
            caller.closed(text)
        if is_report and caller is None:
            stderr.write_last(text)
        elif not is_report and self._spec.verbosity >= 0:
            stderr.write_last(f"ddplaunch: {text}\n")

    def _closing_line(self, state: State, ending: ClusterEnding) -> str | None:
        """Return the line that closes a job which did not fail; None if the job failed."""
        now, began, taking_part = self._reporter.clock(), self.story.began, state.members.taking_part
        exits = state.generation.exits
        requeue = state.end.requeue  # the notice after which the job is queued again; 0: it is not
        # between generations `exits` are of the generation before
        stopped_now = () if state.end.between_generations else exits
        match state.why:
            case Why.FAILED | Why.FINISHED if requeue:
                return closing.render_after_notice(len(exits), requeue, now - began, nodes=len(taking_part))
            case Why.FINISHED:
                workers = sum(member.workers for member in taking_part)
                plan, nodes = self.story.plan, len(taking_part)
                if plan is not None and nodes > 1:
                    nodes = plan.nnodes  # members may be commands for one rank each, several on a node
                text = closing.render_finished(workers, now - began, restarts=state.restarts.number, nodes=nodes)
                spent = self.story.time_spent(now)
                return text if spent is None else f"{text}, {spent}"
            case Why.SIGNALLED:
                stopped = (end.stopped_at for end in stopped_now if end.stopped_at is not None)
                # the workers may have been asked to end before, as after the loss of a node
                at = min(stopped, default=now) if self.story.signalled_at is None else self.story.signalled_at
                after = at - began if state.workers_may_have_begun else None
                reason = f"{ending.text}: " if ending.text else ""
                return reason + closing.render_stopped(state.signum, after, stopped_now)
            case Why.TIMED_OUT:
                return closing.render_timeout(self._spec.timeout or 0.0, stopped_now)
        return None

    def _failure_report(self, findings: Findings, restarts: int) -> str:
        """Return the report that fits how the job failed: a hang, a failed start, a lost node, or the first failure.

        `restarts` is how many of --max-restarts were used before it.
        """
        state = findings.state
        first, start_failure = state.generation.failure, state.generation.start_failure
        if state.why is Why.HUNG:
            timeout, home = self._spec.hang_timeout or 0.0, self._reporter.around.home
            return closing.render_hang(findings.found, timeout, state, findings.traces, home)
        if start_failure is not None:
            on = f" on {start_failure.host}" if len(state.members) > 1 else ""
            return closing.render_start_failure(f"rank {start_failure.rank}{on}", start_failure)
        if state.generation.lost and (state.why is Why.NODE_LOST or first is None):
            return _node_lost(state, self._reporter.around.host)
        if first is None:  # the front of a node was killed, without a failure
            each_has_a_command = state.policy.nodes_may_leave  # a user typed one on each node
            whose = f"of {state.members[SELF_ID]}" if each_has_a_command else "that had started the job"
            hint = f"\nhint: {_TO_GO_ON_WITHOUT}\n" if each_has_a_command and not state.policy.is_elastic else ""
            return f"error: the ddplaunch {whose} was killed\n{hint}"
        try:
            return self._full_report(first, findings, restarts)
        except Exception as error:  # noqa: BLE001 - its files may be gone, or of another version: the job ends as ever
            return closing.render_short(first, f"{type(error).__name__}: {error}")

    def _full_report(self, first: WorkerExit, findings: Findings, restarts: int) -> str:
        """Return the full report of a first failure, with its cause as far as the evidence shows it."""
        from ddplaunch.launcher.tell.causes import NO_TRACES, Evidence, classify  # most jobs do not fail
        from ddplaunch.launcher.tell.failure import FailureReport, render

        plan, spec, state = self.story.plan, self._spec, findings.state
        facts = Evidence(
            traces=findings.traces.get(first.rank, NO_TRACES),
            ended_by=findings.ending.text,
            interpreter=plan.interpreter if plan is not None else None,
            workers=len(state.generation.exits),
            program=_as_typed(spec.program),
            master_port=self.story.master_port,
            port_given=plan is not None and plan.master_port is not None,
            debugging=spec.debug_rank is not None or spec.debug_on_error,
            chaos=any(fault.kind == "kill" and fault.target == first.rank for fault in spec.chaos),
        )
        cause = classify(first, facts)
        if cause is not None and cause.fault:  # the machine may be the cause
            node_exits = state.generation.node_exits
            its_nodes = [id for id, exits in node_exits.items() if first in exits and id in state.members]
            suspects = [suspect_of(state.members[id], state.policy.host_names) for id in its_nodes]
            self._faults.found.update(dict.fromkeys(suspects, Fault(cause.fault, cause.line or cause.name)))
        report = FailureReport(
            first=first,
            exits=tuple(state.generation.exits),
            cause=cause,
            ended_by=facts.ended_by,
            cwd=self.cwd,
            home=self._reporter.around.home,
            restarts=restarts,
            max_restarts=spec.max_restarts,
            log_folder=facts.traces.log_folder,
            is_simulated=spec.simulate is not None,
            locations=findings.found.locations,
        )
        return render(report, self._reporter.stderr.paint)

    def _remember_faults(self, state: State) -> None:
        """Write the machines that have failed to the file of bad nodes, now that all workers have ended."""
        faults, around, plan = self._faults.at_end(state), self._reporter.around, self.story.plan
        if not faults or not around.bad_nodes or self._spec.chaos:  # faults that --chaos made are no machine's
            return
        from ddplaunch.record.bad_nodes import Failure, remember_suspects

        now, run_id, in_slurm = time.time(), plan.run_id if plan is not None else "", bool(around.slurm_job)
        failures = []
        for suspect, fault in faults.items():
            why = piece(Redactor().text(fault.why))  # without secrets, and of a length that fits the file
            failure = Failure(host=suspect.host, kind=fault.kind, at=now, run=run_id, why=why, in_slurm=in_slurm)
            failures.append((failure, suspect.address))
        remember_suspects(around.bad_nodes, failures, now)


def _as_typed(program: Program) -> str:
    """Return a program as it is typed; without its arguments if these are long, and "SCRIPT" for a command that is no Python."""
    if program.kind is ProgramKind.COMMAND:
        return "SCRIPT"
    target = ["-m", program.target] if program.kind is ProgramKind.MODULE else [program.target]
    whole = shlex.join([*target, *program.args])
    return whole if len(whole) <= _LONGEST_PROGRAM else f"{shlex.join(target)} ..."


def _node_lost(state: State, here: str) -> str:
    """Return the report of a job that ended because a node was lost; `here` is the host that says so."""
    first, *others = state.generation.lost  # "node 2 (c): silent for 10 s"
    lines = [f"error: {first.replace(': ', ' was lost: ', 1)}"]
    lines += [f"  then {other}" for other in others]
    stopped = sum(end.stopped_with is not None for end in state.generation.exits)
    if stopped:
        lines += ["", f"  {count(stopped, 'other worker')} of the job {'was' if stopped == 1 else 'were'} stopped"]
    is_out_of_contact = any(words in first for words in OUT_OF_CONTACT)
    own = state.members.get(SELF_ID)  # None: the command that has started all agents says so
    has_lost_all = all(id == SELF_ID for id in state.members)
    if is_out_of_contact and others and has_lost_all:  # each of the others says the same of this host
        lines += ["", f"  {own or here}, which says so, has lost all others: its own network may have been cut"]
    slow = "if it is only slow, `--heartbeat-timeout 60s`; " if is_out_of_contact else ""
    hint = f"hint: {slow}{_TO_GO_ON_WITHOUT}"
    if state.policy.is_elastic and len(state.members) >= state.policy.min_nodes:
        hint = ""  # the loss alone did not end the job
    elif state.policy.is_elastic:
        hint = f"hint: {slow}{count(len(state.members), 'node')} left, and `--nnodes` wants {state.policy.min_nodes}"
        users_start_nodes = bool(state.policy.command_elsewhere)
        if users_start_nodes:
            hint += ". Nodes that live wait for node 0: type its command again here"
    return "\n".join([*map(indented, lines), *(["", hint] if hint else [])]) + "\n"
