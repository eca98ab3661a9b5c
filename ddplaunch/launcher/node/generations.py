"""The workers of this node, one generation (a start of all workers) after another: prepared, started, looked into, reaped.

In the agent. Does what was decided, and posts what came of it; decides nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import inf
from signal import SIGKILL, SIGWINCH
from typing import TYPE_CHECKING, Any

from ddplaunch.launcher.decide import node
from ddplaunch.launcher.job.orders import Generation
from ddplaunch.launcher.node.context import AgentContext, WorkerSetup
from ddplaunch.launcher.node.events import GroupJoined
from ddplaunch.launcher.node.start_notice import StartNotice
from ddplaunch.launcher.node.starter import CannotStart, Starter
from ddplaunch.launcher.node.workers import Workers
from ddplaunch.launcher.tell.closing import render_still_running, render_stuck
from ddplaunch.reach.pipes import Backpressure
from ddplaunch.record.run_folder import COLLECTIVES
from ddplaunch.spec.error_file import FINAL, IMPORTED, IMPORTING, JOINED, RAISED, SCRIPT_ENDED, STORE_WANTED
from ddplaunch.spec.job import RUNNER, ProgramKind
from ddplaunch.spec.outcome import StartFailure, WorkerExit
from ddplaunch.system.console.streams import Stream
from ddplaunch.system.errors import LaunchError, call_or_report
from ddplaunch.system.exitcodes import USAGE
from ddplaunch.system.loop.loop import Loop

if TYPE_CHECKING:
    from ddplaunch.launcher.look.debuggers import Debuggers
    from ddplaunch.launcher.look.inspection import Inspection
    from ddplaunch.launcher.look.sampler import Sampler
    from ddplaunch.launcher.node.ended_scripts import EndedScripts
    from ddplaunch.record.seen import Sample
    from ddplaunch.record.window.questions import StacksAtEnd
    from ddplaunch.system.process.child import RunningWorker

# workers that are started between two waits for events: some 15 ms of fresh ones, 0.1 s of forks with torch
STARTS_PER_ROUND = 8
SAMPLE_AFTER = 1.0  # seconds: shorter jobs pay for no sample
DESCRIBE_AFTER = 2.0  # seconds: when the workers have their imports behind them, and shorter jobs pay nothing
_WARNING_NOT_SAMPLED = "what the workers use is no longer recorded"
_WARNING_NOT_NAMED = "workers that do not end after their script are not named"


class Generations:
    """All generations of workers on this node, of which at most one lives: its workers are the current ones."""

    def __init__(self, loop: Loop, context: AgentContext) -> None:
        """Prepare for the first generation. `take_order` and then `begin` make one ready; it starts when the loop comes by."""
        self._loop = loop
        self._context = context
        self.plan = context.draft  # of the last generation, once there is one
        self.workers: Workers | None = None  # of the generation that lives; None between two
        self.running: dict[int, RunningWorker] = {}  # of these, by rank, dead ones included until they are reaped
        self.starter = Starter(loop, context)
        self._next_generation: Generation | None = None  # as the coordinator has ordered it
        self._address: str | None = None  # of this node, as the other nodes reach it
        self._ready_setup: WorkerSetup | None = None  # what `begin` has made; None once there are `workers`
        self._number = 0  # of the generation that was started last
        self._has_process_group = False  # a worker of the current generation has made a process group
        self._start_timer = loop.timer(None, self._start_some)
        self.output = context.output(context.draft)
        self._flush_timer = loop.timer(None, lambda: self.output.flush(loop.now()))  # shows unfinished lines
        self._backpressure = Backpressure(loop, context.queue)  # has workers wait for the output's reader
        self.start_notice = StartNotice(loop)
        self._describe_timer = loop.timer(None, self._describe, may_come_late=True)
        self._sample_at = inf  # when to sample what the workers use; inf: not now
        self._given_up: set[str] = set()  # the warnings of `call_or_warn` about what has failed
        # what most jobs do without: None until it is needed, and then made by `inspection`, `debuggers`, `sampler`
        self.made_inspection: Inspection | None = None
        self.made_debuggers: Debuggers | None = None
        self._made_sampler: Sampler | None = None
        self._ended_scripts: EndedScripts | None = None

    def before_sleep(self) -> None:
        """Adapt to how much output waits, and have the loop come by where there are workers to start or output to show."""
        self._hold_or_mute_output()
        self._start_timer.set(self._loop.now() if self._can_start_some else None)
        self._flush_timer.set(self.output.deadline)
        if self._loop.now() >= self._sample_at:
            self._sample()

    def _hold_or_mute_output(self) -> None:
        """Leave the workers' pipes alone while too much of their output waits, or drop it from view if nobody reads it."""
        backpressure = self._backpressure
        backpressure.update(logged=self.output.logs_have_all)
        if self.workers is not None:
            self.workers.pause_output(backpressure.holds or self._context.files.holds)
        self.output.muted = backpressure.mutes
        if not backpressure.mutes:
            self._context.reporter.report_dropped_output(self.output.dropped)

    # --- the start of a generation

    def take_order(self, generation: Generation, address: str | None) -> None:
        """Take what the coordinator has ordered for the next generation, and the address of this node that the others reach."""
        self._next_generation, self._address = generation, address
        if self.made_inspection is not None:
            self.made_inspection.begin()

    def begin(self) -> None:
        """Make all ready for the workers of the generation that was ordered, which are started when the loop comes by."""
        assert self._next_generation is not None
        context, generation, spec = self._context, self._next_generation, self._context.inputs.spec
        try:
            setup = context.worker_setup(generation, self._address)
        except LaunchError as error:  # what all nodes agreed on does not fit this one: told as of its first rank
            failure = StartFailure(min(generation.ranks), context.host, error.message, error.status)
            self._loop.post(node.StartFailed(failure, self._loop.now()))
        else:
            context.reporter.use_plan(setup.plan, setup.folder)
            self.starter.prepare(setup.plan, setup.env)
            error_files = setup.error_files
            error_files.forget_all_but(generation.number)
            if error_files.notified >= 0:  # else there is no descriptor: what the workers announce is found later
                self._loop.watch(error_files.notified, self._on_notifications)
            self._has_process_group = False
            self._ready_setup = setup
        if spec.debug_on_error or spec.debugpy_ranks:
            debugpy_ranks_here = generation.ranks & (spec.debugpy_ranks or frozenset())
            try:
                self.debuggers.listen(debugpy_ranks_here)
            except OSError as error:
                context.reporter.warn(f"no worker can be given a debugger: {error.strerror}")

    @property
    def _can_start_some(self) -> bool:
        """Whether workers are yet to be started, and can be now."""
        if self._ready_setup is not None:
            return self._ready_setup.folder.is_settled  # the path of the logs, which the workers get, is known
        workers = self.workers
        return workers is not None and workers.may_start and self.starter.is_ready

    def _start_some(self) -> None:
        """Start a few workers. Called by the loop, which serves events between two such rounds, so no signal waits for all."""
        # settled: the folder is made or refused, or its disk hangs, and is not waited for
        if self._ready_setup is not None and self._ready_setup.folder.is_settled:
            why_refused = self._ready_setup.folder.refusal
            if why_refused is not None:  # of a folder that the user has asked for; without any other, workers start
                first = self._ready_setup.plan.workers[0]
                self._ready_setup = None
                failure = StartFailure(first.rank, first.host, why_refused, USAGE)
                self._loop.post(node.StartFailed(failure, self._loop.now()))
                return
            self._make_workers(self._ready_setup)
        workers = self.workers
        if workers is None or not self._can_start_some:  # as while what forks them is not ready
            return
        try:
            started = workers.start(STARTS_PER_ROUND)
        except CannotStart as error:
            failure = StartFailure(error.rank, workers.host, str(error), error.status, error.errno)
            self._loop.post(node.StartFailed(failure, self._loop.now()))
            return
        for rank, pid in started:
            self._context.reporter.worker_started(rank, pid)
            self._loop.post(node.WorkerStarted(rank, self._loop.now()))
            if self._context.may_be_held:  # by a debugger around the command: no limit of time counts
                self._loop.post(node.DebuggerAttached(rank, self._loop.now()))
        if not workers.waiting and self._context.is_last_generation:
            self.starter.fork_no_more()  # a fork server may end now

    def _make_workers(self, setup: WorkerSetup) -> None:
        """Make the workers of a generation whose run folder is ready, without processes yet; `_start_some` starts them."""
        self._ready_setup, self._number = None, setup.generation
        spec, plan, now = self._context.inputs.spec, setup.plan, self._loop.now()
        if plan is not self._context.draft:  # nodes have agreed on it, and a rank may be elsewhere than before
            dropped_before = self.output.dropped
            self.output = self._context.output(plan)
            self.output.dropped = dropped_before
            self._context.run_id = plan.run_id
        self.output.restart()
        if self._ended_scripts is not None:
            self._ended_scripts.forget_generation()
        self.plan = plan
        self.workers = Workers(self._loop, setup, self.starter, self.output, self.running)
        if setup.on_terminal and spec.verbosity >= 0:
            before_processes = f"importing {plan.preload[0]}" if plan.preload else "starting"
            self.start_notice.begin(self.workers, self.output, tuple(sorted(setup.on_terminal)), before_processes)
        if not spec.no_sample and setup.folder.path is not None:
            self._sample_at = now + SAMPLE_AFTER
            if setup.generation == 0:
                self._describe_timer.set(now + DESCRIBE_AFTER)
        self._context.reporter.generation_started(setup.generation, setup.term, setup.port)
        has_terminal = any(worker.terminal for worker in plan.workers)  # and may leave a line there without its end
        can_move_cursor = Stream.ERR in self._context.inputs.screen.live  # stderr is a terminal that can
        self._context.shares_line = has_terminal and can_move_cursor

    def start_no_more(self) -> None:
        """Drop the workers that were not started yet: the generation is to end."""
        self._ready_setup = None
        if self.workers is not None:
            self.workers.waiting.clear()

    # --- while it lives

    def carry_out(self, action: node.Action) -> None:
        """Carry out an action of the decision that concerns the workers there are; without any, do nothing."""
        workers, output, now = self.workers, self.output, self._loop.now()
        if workers is None:
            return
        match action:
            case node.ForwardSignal(signum, ranks):
                workers.forward(signum, ranks)
                if signum == SIGWINCH:
                    output.show_bars_again(now)
            case node.StopWorkers(signum, ranks, by_cluster):
                self.start_notice.end()
                if self.made_debuggers is not None:
                    self.made_debuggers.detach_all()
                workers.end(signum, ranks, time.monotonic(), by_cluster=by_cluster)
            case node.KillWorkers(ranks):
                workers.end(SIGKILL, ranks, time.monotonic())
            case node.CaptureStacks():
                self._capture_stacks(workers, action)
            case node.FindStuck(ranks):
                # what failed is warned of once, and not called again
                warning = "workers that hang get the whole grace period"
                self.call_or_warn(warning, lambda: self.inspection.find_stuck(ranks))
            case node.CheckProgress(asks_for_stacks):  # `has_written` then says of a rank whether it wrote since a time
                warning = "a job in which nothing moves is no longer noticed"
                self.call_or_warn(
                    warning, lambda: self.inspection.check_progress(workers.has_written, asks=asks_for_stacks)
                )
            case node.NameRunning(ranks, seconds):
                self._context.reporter.print(render_still_running(workers.written_since_stop(ranks), seconds))
            case node.NameStuck(ranks, seconds):
                self._context.reporter.print(render_stuck(sorted(ranks), seconds))
            case node.FindRaised():
                for rank, error in workers.recorded_and_not_ended():
                    # lingers: it has not ended in time after its exception
                    self._loop.post(node.WorkerRaised(rank, error, now, lingers=True))
            case node.HostStore():
                self.call_or_warn("a store that is looked for at MASTER_PORT is not hosted", workers.host_store)
            case node.LendTerminal(rank):
                workers.drain(rank)  # what it wrote before its debugger has the terminal is shown before
                output.hide(True)
                self.debuggers.lend_terminal(rank)
            case node.RefuseTerminal(rank):
                self.debuggers.refuse_terminal(rank)
            case node.ShowOutput():
                output.hide(False)

    def _capture_stacks(self, workers: Workers, action: node.CaptureStacks) -> None:
        """Have the stacks captured; where they are not wanted, or that fails, answer at once: the stop waits for the answer."""
        is_wanted = workers.may_have_joined or not action.if_in_group
        if not is_wanted or not self.call_or_warn(
            "stacks are missing",
            lambda: self.inspection.capture_before_stop(action),
        ):
            self._loop.post(node.StacksCaptured(self._loop.now()))

    def suspend(self, suspended: bool) -> None:
        """Stop the processes of all workers, or have them go on."""
        if self.workers is not None:
            self.workers.suspend(suspended)
        self.output.show_bars_again(self._loop.now())  # when the job goes on, the shell has written to the screen

    @property
    def has_stopped(self) -> bool:
        """Whether no worker runs: each is stopped, or has ended."""
        return self.workers is None or self.workers.has_stopped

    def _on_notifications(self) -> None:
        """Read what workers have announced through their pipe, a byte each, and post an event for each kind of news."""
        found = self._context.error_files.take_notifications()
        if JOINED in found and not self._has_process_group:
            self._has_process_group = True
            self.start_notice.end()
            self._loop.post(GroupJoined())
        self.start_notice.note_imports(found.count(IMPORTING), found.count(IMPORTED))
        if SCRIPT_ENDED in found:  # a worker that lingers after that is named, unless naming has failed before
            self.call_or_warn(_WARNING_NOT_NAMED, self._note_ended_scripts)
        if STORE_WANTED in found:
            self._loop.post(node.StoreWanted(self._loop.now()))
        if RAISED in found:
            # before more is read of the others' output: what they write after a failure only follows from it, and is folded
            self.output.note_failed(lambda: self._context.error_files.written(self._number))
            self._loop.post(node.ErrorRecorded(self._loop.now()))
        # nothing catches an exception any more: its worker is about to end
        if FINAL in found and self.workers is not None:
            for event in self._events_of_final(self.workers):
                self._loop.post(event)

    def _note_ended_scripts(self) -> None:
        """Have the workers named that do not end although their script has."""
        if self._ended_scripts is None:
            from ddplaunch.launcher.node.ended_scripts import EndedScripts  # once a script has ended, time matters less

            self._ended_scripts = EndedScripts(self._loop, self.running)
        self._ended_scripts.note(self._context.error_files.scripts_ended(self._number))

    def name_lingering(self, ranks: Iterable[int]) -> None:
        """Have a child find out what Python waits for in these workers, whose script has ended long ago, and tell the user."""
        from ddplaunch.launcher.node.ended_scripts import WITHIN, describe_lingering

        def tell(samples: Sequence[Sample] | None) -> None:
            for text in describe_lingering(samples or (), self.running):
                self._context.reporter.emit("notice", text=text)
                self._context.reporter.tell(text)

        workers = [self.running[rank] for rank in ranks if rank in self.running]
        self.call_or_warn(
            _WARNING_NOT_NAMED, lambda: self.inspection.capture(workers, WITHIN, tell, convert_samples=tuple)
        )

    def events_of_end(self, rank: int, *, names_causes: bool) -> list[node.Event]:
        """Return the events of a worker's end, after reading all that the worker wrote before; none while the worker lives.

        `names_causes`: of a worker that failed, the exceptions that others have recorded come first, since one of those may be
        the cause. Not while the workers are being stopped: then each end brings its own exception with it.
        """
        workers, now = self.workers, self._loop.now()
        assert workers is not None
        try:
            exit = workers.exit_of(rank, time.monotonic())
        except CannotStart as error:
            failure = StartFailure(rank, workers.host, str(error), error.status, error.errno)
            return [node.StartFailed(failure, now)]
        if exit is None:
            return []
        self.start_notice.end()
        has_failed = exit.status != 0
        if has_failed:  # tracebacks that others write from now on only follow from that, and are folded
            self.output.note_failed(lambda: {rank})  # asked for the ranks only if any are
        raised = workers.newly_raised() if has_failed and names_causes else ()
        causes = [node.WorkerRaised(other, what, now) for other, what in raised if other != rank]
        return [*causes, node.WorkerExited(exit, now)]

    def _events_of_final(self, workers: Workers) -> list[node.Event]:
        """Return the exceptions that workers have recorded since the last look, then whose exceptions are final."""
        now = self._loop.now()
        raised = [node.WorkerRaised(rank, error, now) for rank, error in workers.newly_raised()]
        final = self._context.error_files.final(self._number)
        return [*raised, *(node.ExceptionFinal(rank, now) for rank in sorted(final & workers.running.keys()))]

    @property
    def inspection(self) -> Inspection:
        """What captures the stacks of the workers, and checks their progress; made at its first use."""
        if self.made_inspection is None:
            from ddplaunch.launcher.look.inspection import Inspection  # most jobs need none

            self.made_inspection = Inspection(self._loop, self._context.host, self.running, self)
        return self.made_inspection

    def stderr_tail(self, rank: int) -> str:
        """Return the last lines that a worker has written to stderr."""
        return self.output.tail(rank)

    @property
    def sampler(self) -> Sampler:
        """What samples how much of the machine the workers use; made at its first use."""
        if self._made_sampler is None:
            from ddplaunch.launcher.look.sampler import Sampler  # a short job needs none

            node, folder = self._context.inputs.node, self._context.folder
            devices = node.devices if node.hardware.visible_variable == "CUDA_VISIBLE_DEVICES" else ()
            self._made_sampler = Sampler(self._loop, devices, folder)
        return self._made_sampler

    def _sample(self) -> None:
        """Record what the workers use, as long as that does not fail."""
        self._sample_at, workers = inf, self.workers
        if workers is not None and self.call_or_warn(
            _WARNING_NOT_SAMPLED,
            lambda: self.sampler.sample(self.plan.workers, self.running, workers.progress, self._number),
        ):
            self._sample_at = self.sampler.due

    def _describe(self) -> None:
        """Have a child find out which code runs, and on which hardware, for about.json in the run folder. Called by the loop."""
        from ddplaunch.record.about import WITHIN, about  # a short job needs none

        inputs, folder = self._context.inputs, self._context.folder
        assert folder is not None
        program, devices = inputs.spec.program, inputs.node.devices
        # else a function of `launch()`, say
        is_script = program.kind is ProgramKind.SCRIPT and program.target != RUNNER
        code = os.path.dirname(os.path.abspath(program.target)) if is_script else "."

        def keep(found: dict[str, Any]) -> None:
            if found:  # else the child has failed
                folder.write("about.json", found)

        question = partial(about, code, self.plan.interpreter, devices, inputs.env, self._context.known_secrets)
        nothing: dict[str, Any] = {}
        self._loop.ask(question, nothing, keep, within=WITHIN)

    @property
    def debuggers(self) -> Debuggers:
        """Where workers ask for what a debugger needs; made at its first use."""
        if self.made_debuggers is None:
            from ddplaunch.launcher.look.debuggers import Debuggers  # few jobs are debugged

            context = self._context
            self.made_debuggers = Debuggers(self._loop, self.running, context.reporter, context.debug_address)
        return self.made_debuggers

    def call_or_warn(self, warning: str, call: Callable[[], object]) -> bool:
        """Call what a job can do without, unless it has failed before; return whether it never has.

        When it fails the user reads `warning`, which says what the job lacks from then on, and why.
        """
        if warning not in self._given_up:
            call_or_report(call, partial(self._give_up, warning))
        return warning not in self._given_up

    def _give_up(self, warning: str, why: str) -> None:
        self._given_up.add(warning)
        self._context.reporter.warn(f"{warning}: {why}")

    @property
    def silent_for(self) -> float:
        """How many seconds ago a worker has last written to its pipes, or was started; 0 if one writes to the terminal itself."""
        workers = self.workers
        if workers is None or any(map(workers.has_terminal, workers.running)):
            return 0.0
        started = (time.monotonic() - worker.started_at for worker in workers.running.values())
        return min((*workers.seconds_silent.values(), *started), default=0.0)

    # --- its end

    def stacks_at_end(self, number: int) -> StacksAtEnd | None:
        """Return where the workers of this generation were when they had to end; None if the user is not to see that."""
        if self.made_inspection is None or not self.made_inspection.samples:
            return None
        from ddplaunch.launcher.look.answers import stacks_at_end  # most jobs do not fail

        return stacks_at_end(number, self.made_inspection.samples)

    def reap(self, state: node.State) -> list[WorkerExit]:
        """Release all that the generation held, and return the ends of its workers; none between two generations."""
        workers, self.workers = self.workers, None
        self.start_notice.end()
        self.output.release(self._loop.now())  # the tracebacks that it holds
        self._sample_at = inf
        if self._made_sampler is not None:
            self.call_or_warn(_WARNING_NOT_SAMPLED, self._made_sampler.flush)
        if workers is None:
            return []
        inspection = self.made_inspection
        if inspection is not None and inspection.samples:  # the workers were looked into before they were stopped
            self.call_or_warn("the stacks of the workers are not kept", lambda: self._keep_stacks(workers, inspection))
        return workers.reap(state.exits, self._loop.now())

    def _keep_stacks(self, workers: Workers, inspection: Inspection) -> None:
        """Write where the workers were to the folder of the run, and when they came to their collectives."""
        from ddplaunch.record.seen.arrivals import rows_of_samples  # few jobs have stacks to keep

        workers.keep_stacks(inspection.stacks)
        if (folder := self._context.folder) is not None and not self._context.inputs.spec.no_sample:
            for row in rows_of_samples(inspection.samples, time.time_ns() - time.monotonic_ns()):
                folder.keep_sample(COLLECTIVES, row)

    def close(self) -> None:
        """Release what is kept from one generation to the next."""
        if self.made_debuggers is not None:
            self.made_debuggers.close()
        if self._made_sampler is not None:
            self.call_or_warn(_WARNING_NOT_SAMPLED, self._made_sampler.close)
        self.starter.close()
