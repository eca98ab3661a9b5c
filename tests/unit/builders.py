"""Specs, plans and ends of workers to test with: a test names only what it is about."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from ddplaunch.cli.job import parse, resolve
from ddplaunch.launcher.tell.causes import NO_TRACES, Evidence
from ddplaunch.plan import Plan, PlannedAgent, WorkerPlan
from ddplaunch.record.seen import Arrivals
from ddplaunch.record.seen.arrivals import increments
from ddplaunch.spec.job import JobSpec, Program, ProgramKind
from ddplaunch.spec.outcome import Frame, WorkerExit
from ddplaunch.system.console.streams import BOTH, ShownWorker, Stream
from ddplaunch.system.errors import LaunchError


class Host:
    """A host with these files and no others, which surely is in its Slurm job."""

    def __init__(self, files: Mapping[str, str] | None = None) -> None:
        self._files = files or {}

    def read(self, path: str) -> str:
        """Return the text of a file."""
        try:
            return self._files[path]
        except KeyError:
            raise FileNotFoundError(2, "No such file or directory", path) from None

    def doubt_about_job(self, _nodes: Sequence[str]) -> str:
        """Return no doubt."""
        return ""


def spec(
    kind: ProgramKind = ProgramKind.SCRIPT,
    *,
    target: str = "train.py",
    program: Program | None = None,
    origins: Mapping[str, str] | None = None,
    **fields: Any,
) -> JobSpec:
    """Return a job asked for on the command line, unless `origins` says where else."""
    typed = {name: "--debug" if name == "debug_rank" else f"--{name.replace('_', '-')}" for name in fields}
    return JobSpec(program=program or Program(kind=kind, target=target), origins={**typed, **(origins or {})}, **fields)


def typed_spec(words: str = "", env: Mapping[str, str] | None = None, folder: Path | None = None) -> JobSpec:
    """Return the job of `ddplaunch WORDS train.py`, typed with these variables in this folder."""
    return resolve(parse([*words.split(), "train.py"]), env or {}, str(folder) if folder else None)


def shown_workers(*ranks: int, streams: frozenset[Stream] = BOTH, **fields: str) -> list[ShownWorker]:
    """Return the workers of a node as its console shows them."""
    return [
        ShownWorker(rank=rank, local_rank=local_rank, streams=streams, **fields)
        for local_rank, rank in enumerate(ranks)
    ]


def of_node(**traces: Any) -> Evidence:
    """Return evidence that holds these traces of the failed worker's node."""
    return Evidence(traces=replace(NO_TRACES, **traces))


def plan_of(*workers: WorkerPlan, **fields: Any) -> Plan:
    """Return the plan of a job of one node with these workers."""
    values: dict[str, Any] = {
        "run_id": "run-1",
        "cluster": "local",
        "nnodes": 1,
        "node_rank": 0,
        "master_addr": "127.0.0.1",
        "master_port": None,
        "init_method": "env",
        "backend": "gloo",
        "pin": "device",
        "interpreter": "python",
        "workers": workers,
        "agents": (PlannedAgent(workers[0].host, len(workers)),),
        **fields,
    }
    return Plan(**values)


def worker_exit(
    rank: int = 0, code: int | None = 0, signal: int | None = None, *, at: float = 1.0, **fields: Any
) -> WorkerExit:
    """Return the end of a worker that ran for as long as its node has been up."""
    values: dict[str, Any] = {
        "local_rank": rank,
        "host": "node",
        "pid": 100 + rank,
        "device": "cpu",
        "seconds": at,
        **fields,
    }
    return WorkerExit(rank=rank, code=None if signal else code, signal=signal, at=at, **values)


def frame(file: str, line: int = 1, function: str = "f", source: str = "") -> Frame:
    """Return a line of a traceback."""
    return Frame(file=file, line=line, function=function, source=source)


def write_files(root: Path, files: Mapping[str, str]) -> None:
    """Write the files of a machine, as /proc and /sys have them, below `root`."""
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)


def refusal(call: Callable[[], object]) -> tuple[str, str | None]:
    """Return the message and the hint of the error with which a call ends."""
    with pytest.raises(LaunchError) as raised:
        call()
    return raised.value.message, raised.value.hint


def arrivals(rank: int, first: int, times: Sequence[int], members: str = "0-3") -> Arrivals:
    """Return when a rank came to collectives of one group, numbered from `first` on."""
    numbers = range(first, first + len(times))
    return Arrivals(
        rank=rank,
        group="gloo 0",
        members=members,
        numbers=increments(numbers),
        times=increments(times),
        newest=numbers[-1],
        newest_at=times[-1],
        length=1,
        period=0.1,
    )
