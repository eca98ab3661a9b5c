"""Part of the agent that samples what workers use: CPU, memory and steps from /proc, GPUs by a child that asks NVML.

A sampler never wakes the agent: it takes a sample when the agent is awake for something else, at most once a second. At rest that
is each 10 s, when the agent checks for progress. The samples become lines of samples.jsonl. The longer that file, the rarer
the samples are.
"""

from __future__ import annotations

import marshal
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from msgspec import Struct

from ddplaunch.record.events import VERSION
from ddplaunch.record.run_folder import SAMPLES
from ddplaunch.system.loop.loop import Loop
from ddplaunch.system.process.ask import FIRST
from ddplaunch.system.process.child import RunningWorker
from ddplaunch.system.process.tree import usage
from ddplaunch.system.words import compress

if TYPE_CHECKING:
    from ddplaunch.plan import WorkerPlan
    from ddplaunch.plan.devices import Device
    from ddplaunch.spec.outcome import Progress

_INTERVAL = 1.0  # seconds from one sample to the next, at least
_BYTES_PER_DOUBLING = 1 << 17  # bytes of samples after which the interval doubles: 8 workers write 1 MB a day
_CPU_SHARE = 0.005  # of a core that samples may take
_MIB = 1 << 20
_FRESH = 30.0  # seconds for which an answer of NVML counts
_LONGEST_ANSWER = 1 << 16  # bytes


class GpuUse(Struct, frozen=True):
    """What the GPUs of a worker do, whoever uses them; None if that is not known."""

    percent: int | None  # of the time in which it computed, of several GPUs on average
    memory: int | None  # bytes in use, of several GPUs in sum


class GpuGauge:
    """A child that asks NVML, which may hang: nothing waits for the child, `ask` and `receive` take what there is."""

    def __init__(self, loop: Loop, devices: Sequence[Device]) -> None:
        """Start nothing yet: the first question starts the child. `devices` are the NVIDIA GPUs of this node."""
        self._loop = loop
        self._devices = devices
        # by the name of a device, its index in an answer
        self._indices = {device.uuid or str(device): index for index, device in enumerate(devices)}
        self._socket: socket.socket | None = None  # to the child, once it is started
        self._is_asked = False  # and has not answered yet
        self._is_useless = not devices  # there is no GPU, or the child has ended, for lack of NVML
        self._answer: list[tuple[int | None, int | None]] = []  # percent and bytes, as in `GpuUse`, of each device
        self._answered_at = -inf  # by the loop's clock; before the first answer, too old to count

    def ask(self) -> None:
        """Ask for the use of all GPUs, unless a question is not answered yet, or the child has ended."""
        if self._is_asked or self._is_useless:
            return
        try:
            if self._socket is None:
                self._start_child()
            assert self._socket is not None
            self._socket.send(b"?")
            self._is_asked = True
        except OSError:  # the child has ended
            self._is_useless = True

    def _start_child(self) -> None:
        """Start the child, which answers over the other end of a socket pair until that is closed."""
        devices = self._devices

        def serve() -> None:
            from ddplaunch.plan.devices import nvidia  # 20 ms; only this child needs it

            nvidia.serve_use(FIRST, devices)  # the first descriptor that a child is handed: its end of the pair

        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        with theirs:
            self._loop.ask(serve, None, descriptors=(theirs.fileno(),))  # nobody waits for what `serve` returns: None

    def receive(self) -> bool:
        """Receive the answer, if it is there; return whether all questions are answered."""
        if self._is_asked and self._socket is not None:
            try:
                answer = self._socket.recv(_LONGEST_ANSWER)
            except BlockingIOError:
                return False
            except OSError:
                answer = b""
            self._is_asked = False
            if not answer:  # the child has ended
                self._is_useless = True
                return False
            self._answer, self._answered_at = marshal.loads(answer), self._loop.now()
        return True

    def use_of(self, names: Iterable[str]) -> GpuUse:
        """Return what these devices do, as the last answer says; names are those of `WorkerPlan.devices`."""
        indices = [self._indices[name] for name in names if name in self._indices]
        if not indices or len(self._answer) <= max(indices) or self._loop.now() - self._answered_at > _FRESH:
            return GpuUse(None, None)
        percents, memories = zip(*(self._answer[index] for index in indices), strict=True)
        known = [percent for percent in percents if percent is not None]
        used = [memory for memory in memories if memory is not None]
        return GpuUse(round(sum(known) / len(known)) if known else None, sum(used) if used else None)

    def close(self) -> None:
        """Have the child end."""
        if self._socket is not None:
            self._socket.close()


class _CpuReading(NamedTuple):
    """The CPU time of a process at a time."""

    at: float  # CLOCK_MONOTONIC
    seconds: float


class _Row(NamedTuple):
    """A sample that waits for what the GPUs did at that time."""

    content: dict[str, Any]  # becomes a line of samples.jsonl
    plans: Sequence[WorkerPlan]  # of the workers in it


class SampleFolder(Protocol):
    """What keeps samples, as `RunFolder` does."""

    def keep_sample(self, name: str, sample: Mapping[str, Any]) -> int:
        """Append a line to this file; return how many bytes it has."""


class Sampler:
    """Takes the samples of one generation (start of all workers) after another, and knows what the GPUs do."""

    def __init__(self, loop: Loop, devices: Sequence[Device], folder: SampleFolder | None) -> None:
        """`devices` are the NVIDIA GPUs of this node; `folder` is the run folder, None: there is none."""
        self.due = inf  # by the loop's clock, when the next sample may be taken
        self._loop = loop
        self._folder = folder
        self._gpus = GpuGauge(loop, devices)
        self._cpu: dict[int, _CpuReading] = {}  # by pid, at the last sample
        self._unwritten: _Row | None = None
        self._bytes_written = 0  # bytes of samples so far

    def sample(
        self,
        plans: Sequence[WorkerPlan],
        running: Mapping[int, RunningWorker],
        progress: Mapping[int, Progress],
        generation: int,
    ) -> None:
        """Take a sample of the workers that live; it is written at the next one, when the GPUs have answered.

        A worker without memory is about to end: the kernel has freed it.
        """
        began = time.process_time()
        self.flush()
        found = [(plan, running[plan.rank], usage(running[plan.rank].pid)) for plan in plans if plan.rank in running]
        alive = [
            (plan, worker, used)
            for plan, worker, used in found
            if used is not None and used.state not in "ZX" and used.rss
        ]
        now = time.monotonic()
        percents = []  # of a core, since the last sample
        for _, worker, used in alive:
            last = self._cpu.get(worker.pid, _CpuReading(worker.started_at, 0.0))
            percents.append(round(100 * max(used.cpu_seconds - last.seconds, 0.0) / max(now - last.at, 0.001)))
        self._cpu = {worker.pid: _CpuReading(now, used.cpu_seconds) for _, worker, used in alive}
        row = {
            "v": VERSION,
            "mono": round(now, 2),
            "generation": generation,
            "ranks": compress(plan.rank for plan, _, _ in alive),
            "cpu": percents,
            "memory": [used.rss // _MIB for _, _, used in alive],
        }
        steps = [progress[plan.rank].step if plan.rank in progress else None for plan, _, _ in alive]
        if any(step is not None for step in steps):
            row["step"] = steps
        self._gpus.ask()
        self._unwritten = _Row(row, [plan for plan, _, _ in alive])
        cpu_seconds = time.process_time() - began
        doublings = self._bytes_written // _BYTES_PER_DOUBLING  # so that a long job's file stays small
        interval = _INTERVAL * 2**doublings
        self.due = self._loop.now() + max(interval, cpu_seconds / _CPU_SHARE)

    def flush(self) -> None:
        """Write the last sample, with what the GPUs did if NVML has answered since."""
        if self._unwritten is None:
            return
        (row, plans), self._unwritten = self._unwritten, None
        if self._gpus.receive():
            uses = [self._gpus.use_of(plan.devices) for plan in plans]
            if any(use.percent is not None for use in uses):
                row["gpu"] = [use.percent for use in uses]
            if any(use.memory is not None for use in uses):
                row["gpu_memory"] = [None if use.memory is None else use.memory // _MIB for use in uses]
        has_workers = bool(row["cpu"])
        if has_workers and self._folder is not None:
            self._bytes_written += self._folder.keep_sample(SAMPLES, row)

    def gpus(self, plans: Iterable[WorkerPlan]) -> dict[int, GpuUse]:
        """Return what the GPUs of each worker did a moment ago, and ask for what they do now."""
        self._gpus.receive()
        uses = {plan.rank: self._gpus.use_of(plan.devices) for plan in plans}
        self._gpus.ask()
        return uses

    def close(self) -> None:
        """Write the last sample, and have the child end."""
        self.flush()
        self._gpus.close()
