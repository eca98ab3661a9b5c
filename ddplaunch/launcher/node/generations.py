"""The workers of this node, one generation after another: made ready, started a few at a time, looked into, reaped.

It does what was decided and posts what came of it; it decides nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any

from ddplaunch.launcher.decide import node
from ddplaunch.launcher.job.orders import Generation
from ddplaunch.launcher.node.context import AgentContext, WorkerSetup
from ddplaunch.launcher.node.events import GroupJoined
from ddplaunch.launcher.node.starter import CannotStart, Starter
from ddplaunch.launcher.node.workers import Workers
from ddplaunch.launcher.output.sinks import Output
from ddplaunch.record.run_folder import COLLECTIVES, SAMPLES
from ddplaunch.spec.error_file import IMPORTED, IMPORTING, JOINED, RAISED, SCRIPT_ENDED, STORE_WANTED
from ddplaunch.spec.job import RUNNER, ProgramKind
from ddplaunch.spec.outcome import StartFailure, WorkerExit
from ddplaunch.system.errors import LaunchError, expendable
from ddplaunch.system.exitcodes import USAGE
from ddplaunch.system.loop.loop import Loop
from ddplaunch.system.words import duration

if TYPE_CHECKING:
    from ddplaunch.launcher.look.debuggers import Debuggers
    from ddplaunch.launcher.look.inspection import Inspection
    from ddplaunch.launcher.look.sampler import Sampler
    from ddplaunch.launcher.node.ended_scripts import EndedScripts
    from ddplaunch.record.seen import Sample
    from ddplaunch.system.process.child import RunningWorker

# workers that are started between two waits for events: some 15 ms of fresh ones, 0.1 s of forks with torch
STARTS_PER_ROUND = 8
SAMPLE_AFTER = 1.0  # seconds: shorter jobs pay for no sample
DESCRIBE_AFTER = 2.0  # seconds: when the workers have their imports behind them, and shorter jobs pay nothing
_NOT_SAMPLED = "what the workers use is no longer recorded"
_NOT_NAMED = "workers that do not end after their script are not named"
PATIENCE = 2.0  # seconds of silence before the first row
_OFTEN = 60.0  # seconds in which the row counts each of them; later it counts tens


class Generations:
    """At most one of them lives: its workers are the current ones."""

    def __init__(self, loop: Loop, context: AgentContext) -> None:
        """Prepare for the first generation; `begin` starts one."""
        self._loop = loop
        self._context = context
        self.workers: Workers | None = None  # of the generation that there is; None between two
        self.running: dict[int, RunningWorker] = {}  # of these, by rank, dead ones included until they are reaped
        self._next: tuple[Generation, str | None] | None = None
        self._ready: tuple[Generation, WorkerSetup] | None = None  # but for the folder
        self._starts = loop.timer(None, self._start_some)
        self.output = context.output(context.draft)
        self._flushes = loop.timer(None, lambda: self.output.flush(loop.now()))
        self.starter = Starter(loop, context)
        self.inspected: Inspection | None = None  # what `inspection` gives, once it is needed
        self.debugged: Debuggers | None = None  # what `debuggers` gives, once it is needed
        self._sampled: Sampler | None = None  # what `sampler` gives, once it is needed
        self._sample_at = inf  # when the workers may be sampled
        self._describes = loop.timer(None, self._describe, may_rest=True)
        self._ended_scripts: EndedScripts | None = None  # once a script has ended
        self._given_up: set[str] = set()  # of what a job can do without
        self._has_joined = False
        self._number = 0  # of the generation that was started last
        self.start_notice = StartNotice(loop, self)
        self.plan = context.draft  # of the last generation, once there is one

    @property
    def run_id(self) -> str:
        """The name of the run that all nodes know; "" before those that were started one by one have met."""
        allocation = self._context.inputs.allocation
        is_known = self.plan is not self._context.draft or allocation.start or allocation.rendezvous is None
        return self.plan.run_id if is_known else ""

    # --- its start

    def prepare(self, generation: Generation, address: str | None) -> None:
        """Take what the coordinator has set for the next one, and the address of this node that the others reach."""
        self._next = generation, address
        if self.inspected is not None:
            self.inspected.begin()

    def begin(self) -> None:
        """Make all ready for the workers of the next generation, which are started when the loop comes by."""
        assert self._next is not None
        context, (generation, address) = self._context, self._next
        try:
            setup = context.worker_setup(generation, address)
        except LaunchError as error:
            host = context.draft.workers[0].host
            failure = StartFailure(min(generation.ranks), host, error.message, error.status)
            self._loop.post(node.StartFailed(failure, self._loop.now()))
        else:
            context.reporter.use_plan(setup.plan, setup.folder)
            self.starter.prepare(setup.plan, setup.env)
            setup.error_files.forget_all_but(generation.number)
            if (notified := setup.error_files.notified) >= 0:
                self._loop.watch(notified, self._on_notifications)
            self._has_joined = False
            self._ready = generation, setup
        if context.inputs.spec.debug_on_error or context.inputs.spec.debugpy_ranks:
            try:
                self.debuggers.listen(generation.ranks & (context.inputs.spec.debugpy_ranks or frozenset()))
            except OSError as error:
                context.reporter.warn(f"no worker can be given a debugger: {error.strerror}")

    def before_sleep(self) -> None:
        """Have the loop come by where there is something to do: workers to be started, output that waits to be shown."""
        self._starts.set(self._loop.now() if self._is_starting else None)
        self._flushes.set(self.output.deadline)
        if self._loop.now() >= self._sample_at:
            self._sample()

    @property
    def _is_starting(self) -> bool:
        """Whether workers are yet to be started, and can be."""
        if self._ready is not None:
            return self._ready[1].folder.is_settled
        workers = self.workers
        return workers is not None and workers.may_start and self.starter.is_ready

    def _start_some(self) -> None:
        """Start a few workers; the loop comes by between two such rounds, so that no signal waits for the last."""
        if self._ready is not None and self._ready[1].folder.is_settled:  # the path of the logs is known
            generation, setup = self._ready
            if setup.folder.refusal is not None:  # it was asked for
                self._ready = None
                failure = StartFailure(min(generation.ranks), setup.plan.workers[0].host, setup.folder.refusal, USAGE)
                self._loop.post(node.StartFailed(failure, self._loop.now()))
                return
            self._make_workers(generation, setup)
        workers = self.workers
        if workers is None or not self._is_starting:
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
            if self._context.may_be_held:
                self._loop.post(node.DebuggerAttached(rank, self._loop.now()))
        if not workers.waiting and self._context.is_last_generation:
            self.starter.fork_no_more()

    def _make_workers(self, generation: Generation, setup: WorkerSetup) -> None:
        """Make the workers of a generation whose run folder is ready; they start one by one from the loop."""
        self._ready, self._number = None, generation.number
        if generation.agreed is not None:
            dropped = self.output.dropped
            self.output = self._context.output(setup.plan)  # ranks may have changed
            self.output.dropped = dropped
        self.output.restart()
        if self._ended_scripts is not None:
            self._ended_scripts.begin()
        self.plan = setup.plan
        self.workers = Workers(self._loop, setup, self.starter, self.output, self.running)
        if setup.on_terminal and self._context.inputs.spec.verbosity >= 0:
            first = "starting" if not setup.plan.preload else f"importing {setup.plan.preload[0]}"
            self.start_notice.begin(self.output, tuple(sorted(setup.on_terminal)), first)
        if not self._context.inputs.spec.no_sample and setup.folder.path is not None:
            self._sample_at = self._loop.now() + SAMPLE_AFTER
            if generation.number == 0:
                self._describes.set(self._loop.now() + DESCRIBE_AFTER)
        self._context.reporter.generation_started(generation.number, setup.term, generation.port)

    def start_no_more(self) -> None:
        """Leave out the workers that were not started yet."""
        self._ready = None
        if self.workers is not None:
            self.workers.waiting.clear()

    # --- while it lives

    def _on_notifications(self) -> None:
        """Read what workers have announced through their pipe, and post an event for each kind of news."""
        found = self._context.error_files.notifications()
        if JOINED in found and not self._has_joined:
            self._has_joined = True
            self.start_notice.end()
            self._loop.post(GroupJoined())
        self.start_notice.imports(found.count(IMPORTING), found.count(IMPORTED))
        if SCRIPT_ENDED in found:
            self.guard(_NOT_NAMED, self._note_ended_scripts)
        if STORE_WANTED in found:
            self._loop.post(node.StoreWanted(self._loop.now()))
        if RAISED in found:
            self.output.note_failed(lambda: self._context.error_files.written(self._number))
            self._loop.post(node.ErrorRecorded(self._loop.now()))

    def _note_ended_scripts(self) -> None:
        """Have the workers named that do not end although their script has."""
        if self._ended_scripts is None:
            from ddplaunch.launcher.node.ended_scripts import (
                EndedScripts,  # after the first script has ended, time matters less
            )

            self._ended_scripts = EndedScripts(self._loop, self.running)
        self._ended_scripts.note(self._context.error_files.scripts_ended(self._number))

    def name_lingering(self, ranks: Iterable[int]) -> None:
        """Say what Python waits for in these workers, whose script has ended long ago."""
        from ddplaunch.launcher.node.ended_scripts import WITHIN, lingering

        def say(samples: Sequence[Sample] | None) -> None:
            for text in lingering(samples or (), self.running):
                self._context.reporter.emit("notice", text=text)
                self._context.reporter.tell(text)

        workers = [self.running[rank] for rank in ranks if rank in self.running]
        self.guard(_NOT_NAMED, lambda: self.inspection.capture(workers, WITHIN, say, convert=tuple))

    def end_of(self, rank: int, *, tells_why: bool) -> list[node.Event]:
        """Return how a worker has ended, after reading all that the worker wrote before; None while the worker lives.

        `tells_why`: with the exceptions of others, unless they are being stopped: then each end brings its own error with it.
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
        if exit.status != 0:
            self.output.note_failed(lambda: {rank})
        raised = workers.newly_raised() if exit.status != 0 and tells_why else ()
        others = [node.WorkerRaised(other, what, now) for other, what in raised if other != rank]
        return [*others, node.WorkerExited(exit, now)]

    @property
    def inspection(self) -> Inspection:
        """What looks into the workers."""
        if self.inspected is None:
            from ddplaunch.launcher.look.inspection import Inspection  # most jobs need none

            self.inspected = Inspection(self._loop, self._context.draft.workers[0].host, self.running, self._printed)
        return self.inspected

    def _printed(self, rank: int) -> str:
        """Return the end of what a rank has written to stderr."""
        return self.output.tail(rank)

    @property
    def sampler(self) -> Sampler:
        """What knows what the workers use."""
        if self._sampled is None:
            from ddplaunch.launcher.look.sampler import Sampler  # a short job needs none

            node, folder = self._context.inputs.node, self._context.folder
            devices = node.devices if node.hardware.visible_variable == "CUDA_VISIBLE_DEVICES" else ()
            self._sampled = Sampler(self._loop, devices, lambda row: folder.keep_sample(SAMPLES, row) if folder else 0)
        return self._sampled

    def _sample(self) -> None:
        """Record what the workers use, as long as that does not fail."""
        self._sample_at, workers = inf, self.workers
        if workers is not None and self.guard(
            _NOT_SAMPLED,
            lambda: self.sampler.sample(self.plan.workers, self.running, workers.progress, self._number),
        ):
            self._sample_at = self.sampler.due

    def _describe(self) -> None:
        """Have a child find out what code runs, and where."""
        from ddplaunch.record.about import WITHIN, about  # a short job needs none

        inputs, folder = self._context.inputs, self._context.folder
        assert folder is not None
        program, plan = inputs.spec.program, self.plan
        is_script = program.kind is ProgramKind.SCRIPT and program.target != RUNNER
        of_program = os.path.dirname(os.path.abspath(program.target)) if is_script else "."
        question = partial(
            about, of_program, plan.interpreter, inputs.node.devices, inputs.env, self._context.known_secrets
        )
        nothing: dict[str, Any] = {}
        self._loop.ask(
            question, nothing, lambda found: folder.write("about.json", found) if found else None, within=WITHIN
        )

    @property
    def debuggers(self) -> Debuggers:
        """Where workers ask for what a debugger needs."""
        if self.debugged is None:
            from ddplaunch.launcher.look.debuggers import Debuggers  # few jobs are debugged

            context = self._context
            self.debugged = Debuggers(self._loop, self.running, context.reporter, context.debug_address)
        return self.debugged

    def guard(self, without: str, call: Callable[[], object]) -> bool:
        """Call what a job can do without, unless it has failed before; return whether it never has."""
        if without not in self._given_up:
            expendable(call, partial(self._give_up, without))
        return without not in self._given_up

    def _give_up(self, without: str, why: str) -> None:
        self._given_up.add(without)
        self._context.reporter.warn(f"{without}: {why}")

    @property
    def silent(self) -> float:
        """How many seconds ago a worker has last written to its pipes, or was started; 0 if one writes past us."""
        workers = self.workers
        if workers is None or any(map(workers.has_terminal, workers.running)):
            return 0.0
        started = (time.monotonic() - worker.started_at for worker in workers.running.values())
        return min((*workers.quiet.values(), *started), default=0.0)

    # --- its end

    def reap(self, state: node.State) -> list[WorkerExit]:
        """Release all that the generation held, and give the ends of its workers."""
        workers, self.workers = self.workers, None
        self.start_notice.end()
        self.output.release(self._loop.now())
        self._sample_at = inf
        if self._sampled is not None:
            self.guard(_NOT_SAMPLED, self._sampled.flush)
        if workers is None:
            return []
        if (inspected := self.inspected) is not None and inspected.samples:
            self.guard("the stacks of the workers are not kept", lambda: self._keep_stacks(workers, inspected))
        return workers.reap(state.exits, self._loop.now())

    def _keep_stacks(self, workers: Workers, inspected: Inspection) -> None:
        """Write where the workers were to the folder of the run, and when they came to their collectives."""
        from ddplaunch.record.seen.arrivals import of_samples  # few jobs have stacks to keep

        workers.keep_stacks(inspected.stacks)
        if (folder := self._context.folder) is not None and not self._context.inputs.spec.no_sample:
            for row in of_samples(inspected.samples, time.time_ns() - time.monotonic_ns()):
                folder.keep_sample(COLLECTIVES, row)

    def close(self) -> None:
        """Release what is kept from one generation to the next."""
        if self.debugged is not None:
            self.debugged.close()
        if self._sampled is not None:
            self.guard(_NOT_SAMPLED, self._sampled.close)
        self.starter.close()


class StartNotice:
    """From the start of a generation to its first output, process group or exit; it has no timer before and afterwards."""

    def __init__(self, loop: Loop, generations: Generations) -> None:
        self._loop = loop
        self._generations = generations
        self._timer = loop.timer(None, self._show_status, may_rest=True)
        self._began = 0.0
        self._first = ""
        self._importing = 0  # workers that have begun to import torch, and not finished
        self._given: tuple[Output, tuple[int, ...]] | None = None

    def begin(self, output: Output, ranks: tuple[int, ...], first: str) -> None:
        """Watch these ranks, whose output is shown on a terminal; `first` says what happens before they have processes."""
        self._first = first
        self._began = self._loop.now()
        self._importing = 0
        self._given = (output, ranks)
        self._timer.set(self._began + PATIENCE)

    def imports(self, begun: int, finished: int) -> None:
        """Note that so many more workers have begun and finished to import torch."""
        self._importing += begun - finished

    def end(self) -> None:
        """Take the row away, and show none until the next generation."""
        self._timer.cancel()
        if self._given is not None:
            self._given[0].show_status((), "", self._loop.now())
            self._given = None

    def _show_status(self) -> None:
        """Show for how long the workers have been starting, until the first of them writes something."""
        if self._given is None:
            return
        output, ranks = self._given
        now = self._loop.now()
        if any(at >= self._began for at in output.written_at.values()):
            self.end()
            return
        seconds = round(now - self._began)
        output.show_status(ranks, f"{self._doing()}, {duration(seconds)}", now)
        self._timer.set(now + (1.0 if seconds < _OFTEN else 10.0))

    def _doing(self) -> str:
        workers = self._generations.workers
        if workers is None or workers.waiting:
            return self._first
        return "importing torch" if self._importing > 0 else "running, nothing printed yet"
