"""What the agent works with: the workers' plan, the run folder, the screen and the teller.

It is made when the agent asks for it: with several nodes only the coordinator's word completes it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from ddplaunch.agent.pipes import CONTROL, STDERR, STDOUT, OutputQueue
from ddplaunch.agent.workers import WorkerSetup
from ddplaunch.cluster import Allocation
from ddplaunch.devices.node import Node
from ddplaunch.output.display import Display, Stream
from ddplaunch.output.sinks import Output
from ddplaunch.output.streams import Screen, ShownWorker
from ddplaunch.plan import Plan
from ddplaunch.record import record
from ddplaunch.report.events import Event
from ddplaunch.report.reporter import Reporter
from ddplaunch.report.run_folder import LOG_LIMIT, RunFolder, folder_of_run
from ddplaunch.spec import JobSpec, Streams
from ddplaunch.supervise.outcome import ClusterEnding

if TYPE_CHECKING:  # one node needs none of it
    from ddplaunch.control.messages import Begin

_LONGEST = 10_000  # characters, each of at most six bytes: less than a message holds

_TAGS = {Stream.OUT: STDOUT, Stream.ERR: STDERR}
_MASKS = {Streams.NONE: set(), Streams.OUT: {Stream.OUT}, Streams.ERR: {Stream.ERR}, Streams.BOTH: set(Stream)}


@record(kw_only=True)
class JobInputs:
    """All that is known before the agent starts."""

    spec: JobSpec
    env: Mapping[str, str]  # of the caller
    allocation: Allocation
    node: Node
    draft: Plan  # complete for one node; with several, as if all were like this one
    screen: Screen
    speaks: bool = True  # for the whole job
    tells: bool = False  # of each worker's pid, to whoever started this agent
    answers: bool = False  # how the job ended, to whoever called for it, in place of the user
    why_ending: Callable[[], ClusterEnding] | None = None  # asks the cluster, which may take seconds


class AgentSetup:
    """Gives the agent what it works with."""

    def __init__(self, setting: JobInputs) -> None:
        self._setting = setting
        self.folder: RunFolder | None = None

    def equip(self, begin: Begin | None, address: str | None) -> WorkerSetup:
        """Give what the workers are started with; `begin` and `address` are what the coordinator said.

        Raises:
            LaunchError: what all nodes agreed on does not fit this one.
        """
        setting = self._setting
        plan = setting.draft
        if begin is not None:
            from ddplaunch.coordinator.plan import agreed_plan  # one node needs none of it

            plan = agreed_plan(begin, address, setting.spec, setting.allocation, setting.node)
        if self.folder is None:
            self.make_folder(plan)
        assert self.folder is not None
        spec = setting.spec
        return WorkerSetup(
            plan=plan,
            env=setting.env,
            folder=self.folder,
            log_limit=None if spec.log_dir else LOG_LIMIT,
            role=spec.role,
            mps_control=setting.node.mps_control,
            duplicated={Stream.OUT: spec.duplicate_stdout_filters, Stream.ERR: spec.duplicate_stderr_filters},
        )

    def make_folder(self, plan: Plan) -> None:
        """Make the run folder."""
        self.folder = folder_of_run(self._setting.spec, self._setting.env, plan)

    def tidy(self) -> None:
        """Remove the oldest runs."""
        if self.folder is not None:
            self.folder.tidy()

    def output(self, queue: OutputQueue, plan: Plan | None) -> Output:
        """Give what shows and keeps the workers' output; `plan` is that of this generation, None: the draft."""
        setting, spec = self._setting, self._setting.spec
        plan = plan or setting.draft
        shown = [
            ShownWorker(
                rank=worker.rank, local_rank=worker.local_rank, role=spec.role, streams=_shown(spec, worker.local_rank)
            )
            for worker in plan.workers
        ]
        display = Display(
            mode=spec.output,
            ranks=shown,
            colour=set(setting.screen.colour),
            terminal=set(setting.screen.terminals),
            template=setting.env.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"),
            world_size=plan.world_size,
        )
        return Output(display, lambda stream, data: queue.put(_TAGS[stream], data))

    def reporter(self, queue: OutputQueue) -> Reporter:
        """Give what tells."""
        setting = self._setting
        return Reporter(
            lambda text: queue.put(STDERR, text.encode(errors="surrogateescape")),
            time.monotonic,
            readers=(partial(_tell, queue),) if setting.tells else (),
            verbosity=setting.spec.verbosity,
            # what becomes an exception elsewhere has none
            colour=Stream.ERR in setting.screen.colour and not setting.answers,
            cwd=_cwd(),
            origins=setting.spec.origins,
            reports=setting.speaks,
            answer=partial(_answer, queue) if setting.answers and setting.speaks else None,
            last=partial(_last, queue) if setting.allocation.start else None,
            what_ends=setting.why_ending,
        )


def _tell(queue: OutputQueue, event: Event) -> None:
    match event.name:
        case "job_started":
            queue.put(CONTROL, b'{"type":"begun","world_size":%d}' % event.fields["world_size"])
        case "worker_started":
            queue.put(CONTROL, b'{"type":"worker","rank":%d,"pid":%d}' % (event.fields["rank"], event.fields["pid"]))


def _last(queue: OutputQueue, text: str) -> None:
    """Leave it to whoever started this agent to say it when nothing more comes from any host."""
    _answer(queue, {"type": "last_words", "text": text})


def _answer(queue: OutputQueue, what: Mapping[str, Any]) -> None:
    """Say something in one message; of a text that is too long for it, the beginning."""
    import json

    if "text" in what:
        what = {**what, "text": what["text"][:_LONGEST]}
    queue.put(CONTROL, json.dumps(what, ensure_ascii=False).encode(errors="replace"))


def _shown(spec: JobSpec, local_rank: int) -> frozenset[Stream]:
    """torchrun's rules: redirected streams go to files only, unless they are tee'd; filtered ranks go nowhere else."""
    if spec.local_ranks_filter is not None and local_rank not in spec.local_ranks_filter:
        return frozenset()
    if spec.debug_rank is not None:
        return frozenset()  # the terminal belongs to the debugged worker
    hidden = _MASKS[spec.redirects.of(local_rank)] - _MASKS[spec.tee.of(local_rank)]
    return frozenset(set(Stream) - hidden)


def _cwd() -> str:
    try:
        return os.getcwd()
    except OSError:  # removed meanwhile: no path lies below it
        return ""
