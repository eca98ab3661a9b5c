"""Where the benchmarks run: a folder that is removed afterwards, a clean environment, and the commands to compare."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

PROGRAMS = Path(__file__).resolve().parent / "programs"
REPOSITORY = PROGRAMS.parent.parent
_MEMORY = Path("/dev/shm")
_ROOM = 2 << 30  # bytes that the logs of a flood may need
_FOREIGN = ("DDPLAUNCH_", "PET_", "TORCHELASTIC_", "SLURM_")
_NOT_OURS = ("PYTHONDONTWRITEBYTECODE", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Measured(float):
    """The median of several rounds; half of them lie between `low` and `high`."""

    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Measured:
        """Return what these rounds come to."""
        measured = cls(median(values))
        measured.low, _, measured.high = quantiles(values, method="inclusive") if len(values) > 1 else values * 3
        return measured


class Rounds:
    """What was measured in turns: in each round each measure once, so that all meet the same machine."""

    def __init__(self, number: int, *measures: Callable[[], float]) -> None:
        self.number = number
        self._taken = [[measure() for measure in measures] for _ in range(number)]

    def medians(self) -> list[float]:
        """Return the median of each measure."""
        return [median(column) for column in zip(*self._taken, strict=True)]

    def of(self, combined: Callable[..., float]) -> Measured:
        """Return what the measures of a round come to together, as their difference or ratio does."""
        return Measured.of([combined(*taken) for taken in self._taken])


@dataclass(frozen=True)
class Beside:
    """The same measured of ddplaunch and of torchrun, for the picture."""

    what: str
    ours: float
    torchrun: float
    unit: str


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One measured number and what it should be."""

    name: str
    value: float
    unit: str
    target: float | None = None  # None: there to compare with
    more_is_better: bool = False
    how: str = ""  # from which numbers it was made
    beside: Beside | None = None

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None: there is none."""
        if self.target is None:
            return None
        return self.value >= self.target if self.more_is_better else self.value <= self.target

    @property
    def spread(self) -> tuple[float, float]:
        """Between which values half of the rounds lie; of a single measurement, the value itself."""
        return (self.value.low, self.value.high) if isinstance(self.value, Measured) else (self.value, self.value)

    @property
    def is_missed(self) -> bool:
        """Whether the target is missed by more than the rounds differ among themselves."""
        low, high = self.spread
        return self.target is not None and (high < self.target if self.more_is_better else low > self.target)


class Bed:
    """A folder, an environment and a mark by which every process that a benchmark started is found again."""

    def __init__(self, *, quick: bool) -> None:
        self.quick = quick
        in_memory = _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free > _ROOM
        self.folder = Path(tempfile.mkdtemp(prefix="ddplaunch-bench-", dir=_MEMORY if in_memory else None))
        self._mark = uuid.uuid4().hex
        kept = {k: v for k, v in os.environ.items() if not k.startswith(_FOREIGN) and k not in _NOT_OURS}
        self.env = {
            **kept,
            "PYTHONPATH": os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH")))),
            "XDG_STATE_HOME": str(self.folder / "state"),
            "TMPDIR": str(self.folder),  # torchrun leaves a folder there each time
            "OMP_NUM_THREADS": "1",  # the same for all, and torchrun does not warn
            "BENCH_MARK": self._mark,
        }
        self.ddplaunch = _command("ddplaunch", "ddplaunch")
        self.torchrun = _command("torchrun", "torch.distributed.run")
        self.python = [sys.executable]

    def close(self) -> None:
        """End what is left and remove the folder."""
        self.end_left()
        shutil.rmtree(self.folder)

    def end_left(self) -> None:
        """End what a command has left."""
        for pid in self.left():
            with suppress(ProcessLookupError):  # one of them may be what had ended it
                os.kill(pid, signal.SIGKILL)

    def rounds(self, number: int) -> int:
        """How often to measure: so often, or less if it is to be quick."""
        return max(1, number // 3) if self.quick else number

    def start(self, argv: Sequence[str], **popen: Any) -> subprocess.Popen[bytes]:
        """Start a command whose output nobody wants, unless told otherwise."""
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        return subprocess.Popen(argv, **{"cwd": self.folder, "env": self.env, **streams, **popen})

    def seconds(self, argv: Sequence[str], *, status: int = 0, **popen: Any) -> float:
        """Run a command to its end and say how long it took."""
        began = time.perf_counter()
        ended = self.start(argv, **popen).wait()
        took = time.perf_counter() - began
        assert ended == status, f"{' '.join(argv)} ended with {ended}, not {status}"
        return took

    def shell_loop(self, workers: int, argv: Sequence[str]) -> list[str]:
        """The least that starts `workers` processes at once and waits for them."""
        loop = f'i=0; while [ $i -lt {workers} ]; do RANK=$i "$@" & i=$((i+1)); done; wait'
        return ["sh", "-c", loop, "sh", *argv]

    def training_loop(self, workers: int, argv: Sequence[str]) -> list[str]:
        """The same with the variables that a process group needs, typed by hand."""
        return ["env", *_group_variables(workers), *self.shell_loop(workers, argv)]

    def mpirun(self, workers: int, argv: Sequence[str]) -> list[str] | None:
        """The same started by Open MPI, where that is installed."""
        if shutil.which("mpirun") is None:
            return None
        ranks = 'RANK=$OMPI_COMM_WORLD_RANK exec "$@"'
        command = [
            "mpirun",
            "--oversubscribe",
            "--bind-to",
            "none",
            "-np",
            str(workers),
            "sh",
            "-c",
            ranks,
            "sh",
            *argv,
        ]
        as_root = "OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"
        return ["env", *as_root, *_group_variables(workers), *command]

    def left(self) -> list[int]:
        """The processes that a command has left, found by the mark in their environment."""
        found = []
        for entry in os.listdir("/proc"):
            if entry.isdigit() and int(entry) != os.getpid():
                try:
                    environ = Path("/proc", entry, "environ").read_bytes()
                except OSError:
                    continue
                if self._mark.encode() in environ:
                    found.append(int(entry))
        return found


def _group_variables(workers: int) -> tuple[str, ...]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return "MASTER_ADDR=127.0.0.1", f"MASTER_PORT={port}", f"WORLD_SIZE={workers}"


def program(name: str) -> str:
    """The path of a worker."""
    return str(PROGRAMS / f"{name}.py")


def _command(name: str, module: str) -> list[str]:
    script = Path(sys.executable).parent / name
    return [str(script)] if script.exists() else [sys.executable, "-m", module]
