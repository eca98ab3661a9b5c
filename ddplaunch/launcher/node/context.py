"""What all parts of an agent work with: the job, the run folder, the reporter and the queue of output to the front.

The front is the process that was typed, which has the terminal. The plan of the workers is made when a generation begins: with
several nodes it is complete only when they have agreed. A command that has started agents works with the same.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from functools import partial

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
from ddplaunch.reach.other_host import job_in_slurm, job_of_srun
from ddplaunch.reach.pipes import CONTROL, OURS, STDERR, OutputQueue
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
from ddplaunch.system.process.terminal import new_line
from ddplaunch.system.redaction import Redactor, literals

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
    records_collectives: bool = True  # torch does, in each worker
    debugger: str = ""  # where workers ask for what a debugger needs, and how the job is debugged
    debugpy_ranks: frozenset[int] = frozenset()
    mps_control: str | None = None  # path of nvidia-cuda-mps-control, if the workers are to share GPUs by it
    on_terminal: frozenset[int]  # ranks whose output is shown on a terminal with what they draw
    terminal_variables: Mapping[str, str]  # that say so
    duplicated: Mapping[Stream, tuple[str, ...]]  # texts whose lines are copied to torchrun's filtered logs

    def error_file(self, rank: int) -> str:
        """Where a worker writes its exception; "" if there is no folder for it."""
        return self.error_files.path(self.generation, rank)

    def debugger_of(self, rank: int) -> str:
        """How a worker is debugged, and where it asks for what that needs."""
        return f"{self.debugger},debugpy" if rank in self.debugpy_ranks else self.debugger


class AgentContext:
    """What an agent's parts share: they get this one value, and each takes from it what it needs."""

    def __init__(self, loop: Loop, inputs: JobInputs, files: FileQueue, queue: OutputQueue) -> None:
        """Make the reporter, and have the process that writes `files` make the run folder, if its name is known already.

        Where nodes meet, the first of them names the run: then `worker_setup` makes the folder. `queue` goes to the front.
        """
        self._loop = loop
        self.inputs = inputs  # what was known before the agent started
        self.queue = queue
        self.shares_line = False  # a worker had the terminal itself, and may have left a line there without its end
        self.writes_itself = False  # to stderr: the front is lost, and the user is told all the same
        self.known_secrets = literals({**inputs.env, **dict(inputs.spec.env)})  # hidden wherever they stand
        self.reporter = self._reporter()
        self.draft = inputs.draft  # the plan as if all nodes were like this one
        # the name that all nodes know the run by: a command that starts all agents gives it; else "" until the nodes have met
        has_command = bool(inputs.allocation.hosts_to_start_on) or inputs.only_coordinates
        is_named_later = inputs.allocation.rendezvous is not None and not has_command
        self.run_id = "" if is_named_later else inputs.draft.run_id
        self.folder: RunFolder | None = None
        self.files = files
        self.error_files = inputs.error_files
        self.debug_address = f"ddplaunch-debug-{os.urandom(8).hex()}"  # abstract, unix(7)
        # how a job ended whose agents were started from here: printed after all of their output
        self.closing_lines = ""
        # without a control channel each node goes by its own plan
        nodes_meet = inputs.allocation.rendezvous is not None and not inputs.spec.no_control
        # a command that coordinates makes its folder later, with the plan of all nodes
        if not inputs.only_coordinates and not nodes_meet:
            self.make_folder(self.draft)

    @property
    def host(self) -> str:
        """The name of this node, as its workers have it."""
        return self.draft.workers[0].host

    def tell_port(self, port: int) -> None:
        """Tell a command that has started this agent at which port the coordinator, which is here, listens."""
        self.queue.put(CONTROL, b'{"type":"listening","port":%d}' % port)

    def worker_setup(self, generation: Generation, address: str | None) -> WorkerSetup:
        """Return everything that workers need to start; `address` is this node's address as the other nodes reach it.

        Raises:
            LaunchError: what all nodes agreed on does not fit this one.
        """
        inputs, spec, agreed = self.inputs, self.inputs.spec, generation.agreed
        plan = self.draft  # as if all nodes were like this one
        if agreed is not None:  # by several nodes
            from ddplaunch.launcher.job.join import agreed_plan  # one node needs none of it

            if is_loopback(agreed.address):  # of node 0: so all nodes are on one host, and reach this one there, too
                address = address or LOOPBACK
            plan = agreed_plan(agreed, generation.port, address, spec, inputs.allocation, inputs.node)
        if self.folder is None:
            self.make_folder(plan)
        assert self.folder is not None
        # the term (DDPLAUNCH_TERM) tells every generation from all before it; nodes that do not communicate have none in common
        has_common_term = agreed is not None or plan.nnodes == 1
        how_debugged = _how_debugged(spec, debugger_follows_children=inputs.node.debugger_follows_children)
        return WorkerSetup(
            plan=plan,
            generation=generation.number,
            term=generation.term if has_common_term else None,
            port=generation.port,
            env=inputs.env,
            folder=self.folder,
            error_files=self.error_files,
            log_limit=None if spec.log_dir else LOG_LIMIT,  # none for logs that the user has asked for
            role=spec.role,
            records_collectives=not spec.no_flight_recorder,
            debugpy_ranks=spec.debugpy_ranks or frozenset(),
            debugger=f"{self.debug_address},{int(ATTACH_SIGNAL)},{how_debugged}",  # as worker/bootstrap.py reads it
            mps_control=inputs.node.mps_control,
            on_terminal=self._on_terminal(plan),  # ranks whose progress bars stay in place there
            terminal_variables=of_terminal(inputs.screen.columns, inputs.screen.lines, highest=plan.world_size - 1),
            # texts whose lines go to torchrun's filtered logs, too
            duplicated={Stream.OUT: spec.duplicate_stdout_filters, Stream.ERR: spec.duplicate_stderr_filters},
        )

    @property
    def is_last_generation(self) -> bool:
        """Whether no generation can follow the first one: all workers start once."""
        return self.inputs.spec.max_restarts == 0 and not self.inputs.allocation.is_elastic

    @property
    def may_be_held(self) -> bool:
        """Whether a debugger around the command may hold any worker, so that time limits wait.

        Where other nodes were started by hand, their users know of none, and their time limits do not wait for it.
        """
        inputs = self.inputs
        return inputs.node.debugger_follows_children and (
            0 in inputs.draft.ranks or bool(inputs.allocation.hosts_to_start_on)
        )

    def make_folder(self, plan: Plan) -> None:
        """Have the run folder made; where a command has started the agents, each of them has a part of the command's."""
        is_part = self.inputs.allocation.has_front
        self.folder = folder_of_run(self.inputs.spec, self.inputs.env, plan, self.files, is_part=is_part)

    def output(self, plan: Plan) -> Output:
        """Return what shows the output of the plan's workers here, by way of the front, and keeps it in logs."""
        inputs, spec, screen = self.inputs, self.inputs.spec, self.inputs.screen
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
            screen=screen,
            template=_prefix_of_torchrun(spec),
            world_size=plan.world_size,
            wall_clock=self if spec.timestamps else None,  # `time_of_day`, before each line
            folds_tracebacks=spec.verbosity <= 0,
        )
        # where a command starts all agents, it shows the output of all nodes
        nodes_on_screen = plan.nnodes if inputs.allocation.hosts_to_start_on else 1
        return Output(display, self.queue, nodes=nodes_on_screen, on_terminal=self._on_terminal(plan))

    def _on_terminal(self, plan: Plan) -> frozenset[int]:
        """Return the ranks whose streams are both shown on a terminal, so that their progress bars stay in place there.

        None with --output raw or none; nor if the only worker's output is shown as it is: that worker has the terminal itself.
        """
        spec = self.inputs.spec
        are_bars_in_place = self.inputs.screen.live == BOTH  # on stdout and stderr, where the terminal can do that
        if not are_bars_in_place or spec.output in ("raw", "none") or is_shown_as_it_is(spec, plan.world_size):
            return frozenset()
        shown = (worker for worker in plan.workers if worker.rank == 0 or spec.output != "rank0")
        return frozenset(worker.rank for worker in shown if _shown(spec, worker.local_rank) == BOTH)

    def time_of_day(self, at: float) -> bytes:
        """Return the time of day, as it stands before a line, at a time of the loop's clock."""
        then = time.time() - self._loop.now() + at
        return f"{time.strftime('%H:%M:%S', time.localtime(then))}.{int(then % 1 * 1000):03d} ".encode()

    def _reporter(self) -> Reporter:
        """Return the reporter of this node, which tells the user, or a caller of `launch()`, by way of the front."""
        inputs = self.inputs
        is_in_slurm = inputs.allocation.cluster == "slurm"
        surroundings = Surroundings(
            host=inputs.node.host,
            cwd=working_directory() or "",  # "": it was removed, so that no path lies below it
            home=inputs.env.get("HOME", ""),
            cluster=inputs.cluster,
            slurm_job=job_in_slurm(inputs.env) if is_in_slurm else "",
            srun_job=job_of_srun(inputs.env, inputs.node.host) if is_in_slurm else "",
            bad_nodes="" if inputs.spec.simulate else bad_nodes_file(inputs.env),  # that remembers failed machines
            has_front=inputs.allocation.has_front,  # a command has started this agent, and coordinates
        )
        reporter = Reporter(
            inputs.spec,
            self._stderr(),
            time.monotonic,
            around=surroundings,
            reports_job=inputs.reports_job,
            caller=CallerReporter(self.queue) if inputs.reports_to_caller else None,
        )
        is_simulated_node = inputs.spec.simulate and not inputs.only_coordinates
        if is_simulated_node:  # the command may inject faults, for which it has to know the workers' processes
            reporter.add_reader(partial(_tell_of_workers, self.queue))  # which gets each event
        return reporter

    def _stderr(self) -> Stderr:
        """Return what hides the secrets in ddplaunch's own lines, colours them, and writes them by this context."""
        inputs, screen = self.inputs, self.inputs.screen
        # a caller in Python gets an exception, which has no colours
        has_colour = Stream.ERR in screen.colour
        return Stderr(
            writer=self,
            paint=Paint() if inputs.reports_to_caller else Paint(has_colour, screen.links, screen.columns),
            redactor=Redactor(self.known_secrets),
        )

    def write_line(self, text: str) -> None:
        """Write a line of ours to the front, or after its loss to our stderr."""
        inputs = self.inputs
        # a command that has started the agents (`only_coordinates`) shows a line of OURS once, however many of them say it
        tag = OURS if inputs.allocation.hosts_to_start_on and not inputs.only_coordinates else STDERR
        # a worker may have left a line on the terminal (2: stderr) without its end
        shown = (new_line(2) if self.shares_line else "") + visible(text)
        if self.writes_itself:
            write_stderr(shown)
        else:
            self.queue.put(tag, shown.encode(errors="surrogateescape"))

    def write_closing_line(self, text: str) -> None:
        """Write a line that closes the job; a command that has started agents first shows all their output."""
        if self.inputs.only_coordinates:
            self.closing_lines += visible(text)
        else:
            self.write_line(text)


def _tell_of_workers(queue: OutputQueue, event: Event) -> None:
    """Tell the command that has started this simulated node, and may inject faults, which process each worker is."""
    if event.name == "worker_started":
        queue.put(CONTROL, b'{"type":"worker","rank":%d,"pid":%d}' % (event.fields["rank"], event.fields["pid"]))


def _prefix_of_torchrun(spec: JobSpec) -> str | None:
    """Return torchrun's prefix of a line where its options ask for one; None: ours, as also if the user has given --output."""
    if spec.log_line_prefix_template is not None or "output" in spec.origins:
        return spec.log_line_prefix_template
    has_options_of_torchrun = spec.role != default("role") or spec.tee != default("tee")
    return "[${role_name}${local_rank}]:" if has_options_of_torchrun else None


def _how_debugged(spec: JobSpec, *, debugger_follows_children: bool) -> str:
    """A word for worker/bootstrap.py; "" if the job is not to be debugged."""
    if spec.debug_on_error:
        return "on-error"
    return "rank" if spec.debug_rank is not None or spec.debugpy_ranks is not None or debugger_follows_children else ""


def _shown(spec: JobSpec, local_rank: int) -> frozenset[Stream]:
    """Return which streams of a worker are shown, by torchrun's rules: redirected ones go to files only, unless they are tee'd.

    Of ranks that the user has filtered out nothing is shown.
    """
    if spec.local_ranks_filter is not None and local_rank not in spec.local_ranks_filter:
        return frozenset()
    if spec.debug_rank is not None:
        return frozenset()  # the terminal belongs to the debugged worker
    hidden = _MASKS[spec.redirects.of(local_rank)] - _MASKS[spec.tee.of(local_rank)]
    return frozenset(set(Stream) - hidden)
