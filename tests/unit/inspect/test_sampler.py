"""What the workers use: samples that wake nobody, become rarer as they grow, and wait for no GPU that does not answer."""

from __future__ import annotations

import marshal
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ddplaunch.launcher.look import sampler
from ddplaunch.launcher.look.sampler import GpuUse, Sampler
from ddplaunch.plan import WorkerPlan
from ddplaunch.plan.devices import Device
from ddplaunch.record.run_folder import SAMPLES
from ddplaunch.spec.outcome import Progress
from ddplaunch.system.process.child import RunningWorker
from tests.loops import FakeLoop

GIB = 1 << 30


class Driver(FakeLoop):
    """A loop whose child for NVML is played: `answers` answers it, or nobody does."""

    child: socket.socket | None = None

    def ask(
        self,
        question: Callable[[], Any],
        otherwise: Any,
        answered: Callable[[Any], object] = lambda _: None,
        descriptors: Sequence[int] = (),
        within: float | None = None,
    ) -> Any:
        assert self.child is None, "one child is enough"
        self.child = socket.socket(fileno=os.dup(descriptors[0]))
        return super().ask(question, otherwise, answered)

    def answers(self, *uses: tuple[int | None, int | None]) -> None:
        assert self.child is not None
        assert self.child.recv(1) == b"?"
        self.child.send(marshal.dumps(list(uses)))

    def ends(self) -> None:
        if self.child is not None:
            self.child.close()


def plan(rank: int, *devices: str) -> WorkerPlan:
    return WorkerPlan(rank=rank, local_rank=rank, node_rank=0, host="alpha", argv=(), variables={}, devices=devices)


def running(*pids: int) -> dict[int, RunningWorker]:
    workers = {rank: SimpleNamespace(pid=pid, started_at=time.monotonic() - 10) for rank, pid in enumerate(pids)}
    return cast("dict[int, RunningWorker]", workers)


def gpus(count: int) -> list[Device]:
    return [Device(kind="cuda", index=index, visible_as=str(index), uuid=f"GPU-{index}") for index in range(count)]


class Bed:
    def __init__(self, devices: Sequence[Device] = ()) -> None:
        self.loop = Driver()
        self.rows: list[Mapping[str, Any]] = []
        self.sampler = Sampler(self.loop, devices, self)
        self.size = 100

    def keep_sample(self, name: str, sample: Mapping[str, Any]) -> int:
        assert name == SAMPLES
        self.rows.append(sample)
        return self.size


Beds = Callable[..., Bed]


@pytest.fixture
def beds() -> Iterator[Beds]:
    made: list[Bed] = []

    def make(devices: Sequence[Device] = ()) -> Bed:
        made.append(Bed(devices))
        return made[-1]

    yield make
    for bed in made:
        bed.sampler.close()
        bed.loop.ends()


def test_a_sample_has_the_cpu_the_memory_and_the_step_of_each_worker_that_lives(beds: Beds) -> None:
    bed = beds()
    plans = [plan(0), plan(1), plan(2)]
    bed.sampler.sample(plans, running(os.getpid(), 1 << 22, os.getpid()), {2: Progress(step=7, total=None)}, 1)
    bed.sampler.close()
    [row] = bed.rows
    assert (row["generation"], row["ranks"], row["step"]) == (1, "0,2", [None, 7])
    assert row["memory"][0] > 1
    assert row["cpu"][0] >= 0
    assert "gpu" not in row


def test_workers_that_are_all_gone_leave_no_sample(beds: Beds) -> None:
    bed = beds()
    bed.sampler.sample([plan(0)], running(1 << 22), {}, 0)
    bed.sampler.close()
    assert bed.rows == []


def test_a_sample_is_due_a_second_later_sets_no_timer_and_becomes_rarer_as_the_file_grows(beds: Beds) -> None:
    bed = beds()
    bed.size = sampler._BYTES_PER_DOUBLING
    gaps = []
    for _ in range(4):
        bed.sampler.sample([plan(0)], running(os.getpid()), {}, 0)
        gaps.append(bed.sampler.due - bed.loop.now())
    assert [round(gap) for gap in gaps] == [1, 2, 4, 8]
    assert bed.loop.is_idle


def test_a_sample_has_what_the_gpus_did_when_it_was_taken(beds: Beds) -> None:
    bed = beds(gpus(3))
    plans = [plan(0, "GPU-0", "GPU-1"), plan(1, "GPU-2")]
    bed.sampler.sample(plans, running(os.getpid(), os.getpid()), {}, 0)
    bed.loop.answers((50, GIB), (70, 2 * GIB), (None, 4 * GIB))
    bed.sampler.flush()
    [row] = bed.rows
    assert (row["gpu"], row["gpu_memory"]) == ([60, None], [3072, 4096])
    assert bed.loop.is_idle


def test_a_driver_that_hangs_costs_the_figures_of_gpus_alone(beds: Beds) -> None:
    bed = beds(gpus(1))
    for _ in range(3):
        bed.sampler.sample([plan(0, "GPU-0")], running(os.getpid()), {}, 0)
    bed.sampler.close()
    assert len(bed.rows) == 3
    assert not any("gpu" in row for row in bed.rows)
    assert len(bed.loop.questions) == 1
    assert bed.sampler.gpus([plan(0, "GPU-0")]) == {0: GpuUse(None, None)}


def test_without_nvml_nobody_is_asked_again(beds: Beds) -> None:
    bed = beds(gpus(1))
    bed.sampler.gpus([plan(0, "GPU-0")])
    bed.loop.ends()
    for _ in range(3):
        assert bed.sampler.gpus([plan(0, "GPU-0")]) == {0: GpuUse(None, None)}
    assert len(bed.loop.questions) == 1


def test_who_asks_again_gets_the_last_answer_until_it_is_old(beds: Beds) -> None:
    bed = beds(gpus(1))
    bed.sampler.gpus([plan(0, "GPU-0")])
    bed.loop.answers((50, GIB))
    assert bed.sampler.gpus([plan(0, "GPU-0")]) == {0: GpuUse(50, GIB)}
    bed.loop.pass_time(31)
    assert bed.sampler.gpus([plan(0, "GPU-0")]) == {0: GpuUse(None, None)}


@pytest.mark.parametrize("devices", [(), ("cuda:0",)])
def test_a_worker_without_a_gpu_that_nvml_knows_has_no_figures(beds: Beds, devices: tuple[str, ...]) -> None:
    bed = beds(gpus(1))
    bed.sampler.gpus([plan(0, *devices)])
    bed.loop.answers((50, GIB))
    assert bed.sampler.gpus([plan(0, *devices)]) == {0: GpuUse(None, None)}
