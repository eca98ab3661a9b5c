"""A whole agent over a fake loop: real parts and real pipes, workers that are played, and a time that only passes in sleep."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, cast

from ddplaunch.launcher.decide.node import Policy
from ddplaunch.launcher.job.local_link import coordinate_alone
from ddplaunch.launcher.node.agent import Agent
from ddplaunch.launcher.node.context import WorkerSetup
from ddplaunch.launcher.node.job import AgentJob, JobInputs
from ddplaunch.launcher.node.starter import Starter, WorkerPipes
from ddplaunch.plan import WorkerPlan
from ddplaunch.plan.cluster.by_flags import of_one_node
from ddplaunch.plan.devices import Hardware
from ddplaunch.plan.devices.node import Node
from ddplaunch.plan.make import make_plan
from ddplaunch.reach.pipes import FrontPipes
from ddplaunch.record.file_queue import FileQueue
from ddplaunch.spec.error_file import ErrorFiles
from ddplaunch.system.console.streams import Screen, Stream
from ddplaunch.system.process.child import Child, End, RunningWorker, Usage
from tests.loops import FakeLoop
from tests.unit.builders import spec


class PlayedChild:
    """The process of a worker as the kernel shows it: its end is that of a pipe."""

    is_kept = True
    has_stopped = False

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.ended, self._alive = os.pipe()
        self.end: End | None = None

    def look(self) -> End | None:
        return self.end

    def exits(self, end: End) -> None:
        self.end = end
        os.close(self._alive)

    def rouse_parent(self) -> None:
        """It has none but the test."""

    def reap(self) -> Usage:
        assert self.end is not None, "a process that runs is not reaped"
        os.close(self.ended)
        return Usage(0, 0.0)


class PlayedWorker(RunningWorker):
    """A worker that does as the test says; signals are noted, and end it as `dies_of` says, so many seconds later."""

    def __init__(self, bed: Bed, rank: int, pipes: Mapping[Stream, int]) -> None:
        self.played = PlayedChild(1 << 22 | rank)
        super().__init__(rank, cast(Child, self.played), 0.0, by_itself=True)
        self._bed = bed
        self._pipes = pipes
        self.dies_of: dict[int, float] = {signal.SIGTERM: 0.0, signal.SIGINT: 0.0, signal.SIGKILL: 0.0}

    def why_not_started(self, program: str) -> None:
        """It always was."""

    def writes(self, text: str, stream: Stream = Stream.OUT) -> None:
        os.write(self._pipes[stream], text.encode())

    def exits(self, code: int | None = 0, signum: int | None = None) -> None:
        """End, unless it has."""
        if self.played.end is None:
            for fd in self._pipes.values():
                os.close(fd)
            self.played.exits(End(code if signum is None else None, signum, False))

    def signal(self, signum: int, members: object = None) -> None:
        if self.played.end is None and signum != signal.SIGCONT:
            self._bed.note(f"{signal.Signals(signum).name} to rank {self.rank}")
            if signum in self.dies_of:
                self._bed.after(self.dies_of[signum], partial(self.exits, None, signum))


class PlayedStarter:
    """Starts them."""

    is_ready = True
    pids: frozenset[int] = frozenset()

    def __init__(self, bed: Bed) -> None:
        self._bed = bed

    def prepare(self, *_: object) -> None:
        """There is nothing to prepare."""

    fork_no_more = close = prepare

    def leftovers(self) -> list[Any]:
        return []

    def start(
        self,
        plans: Sequence[WorkerPlan],
        setup: WorkerSetup,
        pipes: WorkerPipes,
        _of_mps: Mapping[str, str],
    ) -> list[RunningWorker]:
        started: list[RunningWorker] = []
        for plan in plans:
            pumps = pipes.make(plan.rank)
            worker = PlayedWorker(self._bed, plan.rank, {name: os.dup(pump.write_fd) for name, pump in pumps.items()})
            pipes.watch(plan.rank, pumps, None)
            self._bed.workers[plan.rank] = worker
            started.append(worker)
        self._bed.note(f"generation {setup.generation}: ranks {', '.join(str(plan.rank) for plan in plans)} started")
        self._bed.started(setup.generation)
        return started


class Bed:
    """One agent and its front; `story` is what happened, in its order, `shown` what the front was sent."""

    def __init__(self, opened: ExitStack, workers: int, **options: Any) -> None:
        asked = spec(target="/train.py", nproc_per_node=workers, log_dir="/dev/null", **options)
        here = Node(host="node", hardware=Hardware(), devices=(), python="python", bootstrap="/bootstrap.py", env={})
        allocation = of_one_node(asked, "node")
        draft = make_plan(asked, allocation, here, run_id="run-1")
        self.loop = FakeLoop()
        self.workers: dict[int, PlayedWorker] = {}  # of the generation that there is
        self.story: list[str] = []
        self._stories: dict[int, Callable[[], None]] = {}
        pipes = FrontPipes.make()
        self.pipes = pipes
        self.front = pipes.output[0]
        self.front.setblocking(False)
        inputs = JobInputs(
            spec=asked,
            env={},
            allocation=allocation,
            node=here,
            draft=draft,
            screen=Screen(terminals=frozenset(), colour=frozenset()),
            error_files=ErrorFiles("run-1", "/tmp"),
        )
        opened.callback(inputs.error_files.remove)
        for fd in (*pipes.signals, *pipes.requests, *pipes.replies, *pipes.start, pipes.lease):
            opened.callback(_close, fd)
        for sock in (*pipes.output, *pipes.spared):
            opened.callback(sock.close)
        job = AgentJob(
            policy=Policy(
                ranks=draft.ranks,
                stop_signals=asked.ending_signals,
                grace_period=asked.grace_period,
                stacks_timeout=1.0,
            ),
            inputs=inputs,
            link=lambda: partial(coordinate_alone, asked, draft),
            signals=asked.ending_signals,
            sent_again=frozenset(),
        )
        self.agent = Agent(self.loop, job, job.link(), FileQueue(), pipes)
        self.agent._generations.starter = cast(Starter, PlayedStarter(self))

    def note(self, what: str) -> None:
        self.story.append(what)

    def after(self, seconds: float, call: Callable[[], object]) -> None:
        """Have something happen in so many seconds."""
        self.loop.timer(self.loop.now() + seconds, call)

    def once_started(self, generation: int, call: Callable[[], None]) -> None:
        """Have something happen when the workers of this generation are there."""
        self._stories[generation] = call

    def started(self, generation: int) -> None:
        if generation in self._stories:
            self.after(0.0, self._stories[generation])

    def press(self, signum: int = signal.SIGINT) -> None:
        """Send the front a signal."""
        self.note(f"the user sends {signal.Signals(signum).name}")
        self.pipes.pass_on(signum)

    def run(self) -> int:
        """Run the agent to its end, and give the status."""
        return self.agent.run()

    @property
    def shown(self) -> str:
        """All that the front was sent, each message behind the letter of its stream."""
        text = ""
        while True:
            try:
                text += self.front.recv(1 << 17).decode()
            except (TimeoutError, BlockingIOError):
                return text


def _close(fd: int) -> None:
    try:
        os.close(fd)
    except OSError:
        pass


def listen_to_the_front_alone(source: Any, _signals: object) -> None:
    source._own_signals_fd = source._replies_fd  # which never has anything to read
    source._on_signals = lambda: None
    source._loop.watch(source._front_signals_fd, source._on_front_signals)
    source._loop.watch(source._requests_fd, source._on_requests)
