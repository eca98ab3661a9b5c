"""What all parts of an agent work with: the job, the run folder, the reporter and the way to the front.

The plan of the workers is made when a generation begins: with several nodes it is complete only when they have agreed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from msgspec import Struct

from ddplaunch.launcher.job.orders import Generation
from ddplaunch.launcher.node.job import JobInputs
from ddplaunch.launcher.output.display import Display
from ddplaunch.launcher.output.sinks import Output
from ddplaunch.launcher.tell.reporter import CallerReporter, Reporter, Stderr, Surroundings
from ddplaunch.plan import Plan
from ddplaunch.plan.cluster.endpoints import LOOPBACK
from ddplaunch.plan.make import is_shown_as_it_is
from ddplaunch.plan.variables import of_terminal
from ddplaunch.reach.other_host import job_in_slurm
from ddplaunch.reach.pipes import CONTROL, OURS, STDERR, STDOUT, OutputQueue
from ddplaunch.record.events import Event
from ddplaunch.record.file_queue import FileQueue
from ddplaunch.record.folders import bad_nodes_file
from ddplaunch.record.run_folder import LOG_LIMIT, RunFolder, folder_of_run
from ddplaunch.spec.error_file import ErrorFiles
from ddplaunch.spec.job import JobSpec, Streams, default
from ddplaunch.spec.program import working_directory
from ddplaunch.system.console.paint import Paint
from ddplaunch.system.console.streams import BOTH, ShownWorker, Stream
from ddplaunch.system.errors import visible, write_stderr
from ddplaunch.system.loop.loop import Loop
from ddplaunch.system.net.addresses import is_loopback
from ddplaunch.system.process.child import ATTACH_SIGNAL
from ddplaunch.system.redaction import Redactor, literals

_LONGEST = 10_000  # characters, each of at most six bytes: less than a message holds

_TAGS = {Stream.OUT: STDOUT, Stream.ERR: STDERR}
_MASKS = {Streams.NONE: set(), Streams.OUT: {Stream.OUT}, Streams.ERR: {Stream.ERR}, Streams.BOTH: set(Stream)}


class WorkerSetup(Struct, frozen=True, kw_only=True):
    """What the workers of a generation are started with."""

    plan: Plan
    generation: int
    term: int | None  # DDPLAUNCH_TERM; None: nodes that do not communicate have none in common
    port: int  # MASTER_PORT
    env: Mapping[str, str]  # of the caller
    folder: RunFolder
    error_files: ErrorFiles
    log_limit: int | None  # bytes
    role: str
    has_recorder: bool = True  # torch records the collectives of each worker
    debugger: str = ""  # where workers ask for what a debugger needs, and how the job is debugged
    debugpy_ranks: frozenset[int] = frozenset()
    mps_control: str | None = None  # path of nvidia-cuda-mps-control, if the workers are to share GPUs by it
    on_terminal: frozenset[int]  # ranks whose output is shown on a terminal with what they draw
    of_terminal: Mapping[str, str]  # the variables that say so
    duplicated: Mapping[Stream, tuple[str, ...]]  # texts whose lines are copied to torchrun's filtered logs

    def error_file(self, rank: int) -> str:
        """Where a worker writes its exception; "" if there is no folder for it."""
        return self.error_files.path(self.generation, rank)

    def debugger_of(self, rank: int) -> str:
        """How a worker is debugged, and where it asks for what that needs."""
        return f"{self.debugger},debugpy" if rank in self.debugpy_ranks else self.debugger


class AgentContext:
    """One value for all parts of an agent."""

    def __init__(self, loop: Loop, inputs: JobInputs, files: FileQueue, queue: OutputQueue) -> None:
        """Have the process that takes `files` make the folder of the run while all else is made ready."""
        self._loop = loop
        self.inputs = inputs  # what was known before the agent started
        self.queue = queue  # to the front
        self.writes_itself = False  # the front is lost, and the user is told all the same
        self.known_secrets = literals({**inputs.env, **dict(inputs.spec.env)})  # hidden wherever they stand
        self.reporter = self._reporter()
        self.draft = inputs.draft
        self.folder: RunFolder | None = None
        self.files = files
        self.error_files = inputs.error_files
        self.debug_address = f"ddplaunch-debug-{os.urandom(8).hex()}"  # abstract, unix(7)
        self.last_words = ""  # what closes a job whose agents were started from here: it comes behind the output of all
        if not inputs.leads and (inputs.allocation.rendezvous is None or inputs.spec.no_control):
            self.make_folder(self.draft)

    def worker_setup(self, generation: Generation, address: str | None) -> WorkerSetup:
        """Return everything that workers need to start; `address` is this node's address as the other nodes reach it.

        Raises:
            LaunchError: what all nodes agreed on does not fit this one.
        """
        inputs, spec = self.inputs, self.inputs.spec
        plan = self.draft
        if generation.agreed is not None:
            from ddplaunch.launcher.job.join import agreed_plan  # one node needs none of it

            if is_loopback(generation.agreed.address):
                address = address or LOOPBACK
            plan = agreed_plan(generation.agreed, generation.port, address, spec, inputs.allocation, inputs.node)
        if self.folder is None:
            self.make_folder(plan)
        assert self.folder is not None
        is_common = generation.agreed is not None or plan.nnodes == 1
        return WorkerSetup(
            plan=plan,
            generation=generation.number,
            term=generation.term if is_common else None,
            port=generation.port,
            env=inputs.env,
            folder=self.folder,
            error_files=self.error_files,
            log_limit=None if spec.log_dir else LOG_LIMIT,
            role=spec.role,
            has_recorder=not spec.no_flight_recorder,
            debugpy_ranks=spec.debugpy_ranks or frozenset(),
            debugger=f"{self.debug_address},{int(ATTACH_SIGNAL)},{_how_debugged(spec, is_followed=inputs.node.is_followed)}",
            mps_control=inputs.node.mps_control,
            on_terminal=self._on_terminal(plan),
            of_terminal=of_terminal(inputs.screen.columns, inputs.screen.lines, highest=plan.world_size - 1),
            duplicated={Stream.OUT: spec.duplicate_stdout_filters, Stream.ERR: spec.duplicate_stderr_filters},
        )

    @property
    def is_last_generation(self) -> bool:
        """Whether no generation can follow that which is there."""
        return self.inputs.spec.max_restarts == 0 and not self.inputs.allocation.is_elastic

    @property
    def may_be_held(self) -> bool:
        """Whether a debugger around the command may hold any worker, so that time limits wait.

        Where other nodes were started by hand, their users know of none, and their time limits do not wait for it.
        """
        inputs = self.inputs
        return inputs.node.is_followed and (0 in inputs.draft.ranks or bool(inputs.allocation.start))

    def make_folder(self, plan: Plan) -> None:
        """Have the run folder made."""
        is_part = self.inputs.allocation.has_front
        self.folder = folder_of_run(self.inputs.spec, self.inputs.env, plan, self.files, is_part=is_part)

    def output(self, plan: Plan) -> Output:
        """Return what shows and keeps the workers' output."""
        inputs, spec = self.inputs, self.inputs.spec
        shown = [
            ShownWorker(
                rank=worker.rank,
                local_rank=worker.local_rank,
                role=spec.role,
                host=inputs.node.host,
                streams=_shown(spec, worker.local_rank),
            )
            for worker in plan.workers
        ]
        display = Display(
            mode="raw" if is_shown_as_it_is(spec, plan.world_size) else spec.output,
            ranks=shown,
            screen=inputs.screen,
            template=_template(spec),
            world_size=plan.world_size,
            stamp=self._time_of_day if spec.timestamps else None,
            folds_tracebacks=spec.verbosity <= 0,
        )
        queue = self.queue
        nodes = plan.nnodes if inputs.allocation.start else 1  # whose bars one terminal shows
        return Output(
            display,
            lambda stream, data: queue.put(_TAGS[stream], data),
            queue.put_bars,
            nodes=nodes,
            on_terminal=self._on_terminal(plan),
        )

    def _on_terminal(self, plan: Plan) -> frozenset[int]:
        """Return the ranks whose streams both go to a terminal, so that their progress bars stay in place there.

        Not with --output raw, which shows everything as the worker would write it to a pipe.
        """
        spec = self.inputs.spec
        if (
            self.inputs.screen.live != BOTH
            or spec.output in ("raw", "none")
            or is_shown_as_it_is(spec, plan.world_size)
        ):
            return frozenset()
        return frozenset(
            worker.rank
            for worker in plan.workers
            if _shown(spec, worker.local_rank) == BOTH and (worker.rank == 0 or spec.output != "rank0")
        )

    def _time_of_day(self, at: float) -> bytes:
        """Return the time of day at a time of the loop's clock, as it stands before a line."""
        then = time.time() - self._loop.now() + at
        return f"{time.strftime('%H:%M:%S', time.localtime(then))}.{int(then % 1 * 1000):03d} ".encode()

    def _reporter(self) -> Reporter:
        """Return the reporter of this node, with the readers and the colours that fit where the job was started."""
        inputs, screen, queue, to_caller = self.inputs, self.inputs.screen, self.queue, self.inputs.reports_to_caller
        ours = OURS if inputs.allocation.start and not inputs.leads else STDERR

        def put(text: str) -> None:
            if self.writes_itself:
                write_stderr(visible(text))
            else:
                queue.put(ours, visible(text).encode(errors="surrogateescape"))

        reporter = Reporter(
            inputs.spec,
            Stderr(
                put=put,
                put_last=self._keep_last if inputs.leads else put,
                # what becomes an exception elsewhere has no colours
                paint=Paint() if to_caller else Paint(Stream.ERR in screen.colour, screen.links, screen.columns),
                redactor=Redactor(self.known_secrets),
            ),
            time.monotonic,
            around=Surroundings(
                host=inputs.node.host,
                cwd=working_directory() or "",  # removed meanwhile: no path lies below it
                home=inputs.env.get("HOME", ""),
                cluster=inputs.cluster,
                slurm_job=job_in_slurm(inputs.env) if inputs.allocation.cluster == "slurm" else "",
                bad_nodes="" if inputs.spec.simulate else bad_nodes_file(inputs.env),
                has_front=inputs.allocation.has_front,
            ),
            reports_job=inputs.reports_job,
            caller=CallerReporter(partial(_send, queue)) if to_caller else None,
        )
        if inputs.spec.simulate and not inputs.leads:
            reporter.add_reader(partial(_tell_of_workers, queue))
        return reporter

    def _keep_last(self, text: str) -> None:
        self.last_words += visible(text)


def _tell_of_workers(queue: OutputQueue, event: Event) -> None:
    """Tell the command that has started this simulated node, and may inject faults, which process each worker is."""
    if event.name == "worker_started":
        queue.put(CONTROL, b'{"type":"worker","rank":%d,"pid":%d}' % (event.fields["rank"], event.fields["pid"]))


def _send(queue: OutputQueue, what: Mapping[str, Any]) -> None:
    """Send one message; of a text that is too long for it, the beginning."""
    import json

    if "text" in what:
        text = visible(what["text"])
        # cut between lines: a colour or a link may not be left open
        what = {**what, "text": text if len(text) <= _LONGEST else text[:_LONGEST].rpartition("\n")[0]}
    queue.put(CONTROL, json.dumps(what, ensure_ascii=False).encode(errors="replace"))


def _template(spec: JobSpec) -> str | None:
    """torchrun's prefix where its options ask for one, unless --output asks for ours."""
    if spec.log_line_prefix_template is not None or "output" in spec.origins:
        return spec.log_line_prefix_template
    asked = spec.role != default("role") or spec.tee != default("tee")
    return "[${role_name}${local_rank}]:" if asked else None


def _how_debugged(spec: JobSpec, *, is_followed: bool) -> str:
    """A word for worker/bootstrap.py; "" if the job is not to be debugged."""
    if spec.debug_on_error:
        return "on-error"
    return "rank" if spec.debug_rank is not None or spec.debugpy_ranks is not None or is_followed else ""


def _shown(spec: JobSpec, local_rank: int) -> frozenset[Stream]:
    """torchrun's rules: redirected streams go to files only, unless they are tee'd; filtered ranks go nowhere else."""
    if spec.local_ranks_filter is not None and local_rank not in spec.local_ranks_filter:
        return frozenset()
    if spec.debug_rank is not None:
        return frozenset()  # the terminal belongs to the debugged worker
    hidden = _MASKS[spec.redirects.of(local_rank)] - _MASKS[spec.tee.of(local_rank)]
    return frozenset(set(Stream) - hidden)
