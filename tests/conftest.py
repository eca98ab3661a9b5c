"""The command as a test runs it: in a home of its own, marked, and proven to leave nothing behind."""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from ddplaunch.reach.repeated_stop import REPEAT_WINDOW

if TYPE_CHECKING:
    from tests.forks import Commands

PROGRAMS = Path(__file__).parent / "programs"
# `make test &` and nohup have signals ignored, and the command would take that over
for ignored in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
    if signal.getsignal(ignored) is signal.SIG_IGN:
        signal.signal(ignored, signal.default_int_handler if ignored == signal.SIGINT else signal.SIG_DFL)
# a command starts in half the time, and tests are collected in a third, where what they import is compiled already
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

TESTS = Path(__file__).parent
LIGHT_TORCH = str(TESTS / "torch" / "light")
QUICK = ("cli", "unit")  # folders without a long test
PATIENCE = 120.0  # seconds until a test gives up waiting for something that should have happened long ago


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keep the garbage collector from what is collected: it stays, and looking through it takes a quarter of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Take files from all folders in turn, so that workers of xdist wait in some and compute in others; quick ones last."""
    folders: dict[str, dict[Path, None]] = {}  # and their files, in order
    for item in items:
        folders.setdefault(item.path.relative_to(TESTS).parts[0], {})[item.path] = None
    turns = {
        file: (folder in QUICK, (number + 0.5) / len(files))
        for folder, files in folders.items()
        for number, file in enumerate(files)
    }
    items.sort(key=lambda item: turns[item.path])


def descriptors() -> set[str]:
    """The numbers of all open files, but for those of objects that earlier tests have left to the garbage collector."""
    gc.collect()
    return set(os.listdir("/proc/self/fd"))


def until(condition: Callable[[], Any], what: str, patience: float = PATIENCE) -> Any:
    """Wait until `condition` gives something true, and give that; fail the test naming `what` if it never does."""
    for value in _answers(condition, patience):
        if value:
            return value
    raise AssertionError(f"waited {patience:g} s in vain for: {what}")


def left_after(patience: float, question: Callable[[], Any]) -> Any:
    """Ask what is left until nothing is, for `patience` seconds at most, and give the last answer."""
    for left in _answers(question, patience):
        if not left:
            break
    return left


def _answers(question: Callable[[], Any], patience: float) -> Iterator[Any]:
    """Ask again and again, for so long; seldom if it takes a command, or all of /proc, for there are other tests."""
    give_up = time.monotonic() + patience
    while True:
        before = _cpu_seconds()
        yield question()
        if time.monotonic() >= give_up:
            break
        time.sleep(min(max(0.005, 8 * (_cpu_seconds() - before)), 0.5))


def _cpu_seconds() -> float:
    """What we have taken of a CPU, and the commands that we ran."""
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)


@dataclass
class Result:
    """A command that has ended."""

    status: int
    out: str
    err: str
    seconds: float

    def expect(self, status: int) -> Result:
        """Return this, having proven that the command ended with this status."""
        assert self.status == status, f"{self.out}{self.err}"
        return self


@dataclass
class Job:
    """One invocation of the real command and all that descends from it, known by a mark in the environment."""

    home: Path
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    process: subprocess.Popen[bytes] | None = None
    began: float = 0.0
    command: list[str] = field(default_factory=lambda: [sys.executable, "-m", "ddplaunch"])

    @property
    def env(self) -> dict[str, str]:
        """The environment of the command: nothing of an outer job, state and temporary files below the home."""
        kept = {
            k: v for k, v in os.environ.items() if not k.startswith(("PET_", "DDPLAUNCH_", "TORCHELASTIC_", "SLURM_"))
        }
        for name in (
            "RANK",
            "LOCAL_RANK",
            "WORLD_SIZE",
            "MASTER_ADDR",
            "MASTER_PORT",
            "OMP_NUM_THREADS",
            "FORCE_COLOR",
        ):
            kept.pop(name, None)
        return {
            "TORCHINDUCTOR_CACHE_DIR": str(self.home / "inductor"),  # else torch makes it, and keeps it, in TMPDIR
            **kept,
            "XDG_STATE_HOME": str(self.home / "state"),
            "TMPDIR": str(self.home / "tmp"),
            "DDP_TEST_MARK": self.mark,
            "DDP_TEST_DIR": str(self.home / "signs"),
        }

    def argv(self, *args: object) -> list[str]:
        """The real command with these arguments."""
        return [*self.command, *map(str, args)]

    def start(self, *args: object, env: dict[str, str] | None = None, **popen: Any) -> subprocess.Popen[bytes]:
        """Start the command; its output goes to pipes unless told otherwise."""
        for name in ("state", "tmp", "signs"):
            (self.home / name).mkdir(exist_ok=True)
        for sign in (self.home / "signs").iterdir():  # of an earlier run
            sign.unlink()
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            self.argv(*args), env={**self.env, **(env or {})}, **{"cwd": self.home, **streams, **popen}
        )
        return self.process

    def wait(self, timeout: float = PATIENCE) -> Result:
        """Wait for the command to end."""
        assert self.process is not None
        try:
            out, err = self.process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            left = "\n".join(f"{pid} {_stat(pid)}" for pid in self.left())
            self.process.kill()
            out, err = self.process.communicate()
            pytest.fail(f"the command did not end in {timeout:g} s\nout: {out!r}\nerr: {err!r}\nleft:\n{left}")
        return Result(
            self.process.returncode,
            (out or b"").decode(errors="replace"),
            (err or b"").decode(errors="replace"),
            time.monotonic() - self.began,
        )

    def run(self, *args: object, timeout: float = PATIENCE, **popen: Any) -> Result:
        """Run the command to its end."""
        self.start(*args, **popen)
        return self.wait(timeout)

    def behave(
        self, *behaviours: str, workers: int = 2, nodes: int = 1, options: Sequence[object] = (), **popen: Any
    ) -> subprocess.Popen[bytes]:
        """Start behave.py with so many workers on each node, simulated if there are several, and wait until all are ready."""
        where = ("--nnodes", nodes, "--simulate") if nodes > 1 else ()
        program = PROGRAMS / "behave.py"
        process = self.start("--nproc-per-node", workers, *where, *options, program, *behaviours, **popen)
        self.signs("ready", workers * nodes)
        return process

    # --- what workers show

    def sign(self, name: str, patience: float = PATIENCE) -> str:
        """Wait until a worker has put up this sign (a file), and give its content."""
        path = self.home / "signs" / name
        return str(until(lambda: path.exists() and (path.read_text() or " "), f"the sign {name}", patience)).strip()

    def signs(self, name: str, number: int) -> list[str]:
        """Wait for one sign of each rank: NAME-0, NAME-1, ..."""
        return [self.sign(f"{name}-{rank}") for rank in range(number)]

    def got(self, rank: int) -> list[str]:
        """The signals that a worker of behave.py has had so far."""
        path = self.home / "signs" / f"got-{rank}"
        return path.read_text().split() if path.exists() else []

    def has_sign(self, name: str) -> bool:
        """Whether this sign is up."""
        return (self.home / "signs" / name).exists()

    # --- what is left

    def left(self) -> list[int]:
        """The processes, zombies aside, that descend from the command, wherever they have gone."""
        found = []
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                try:  # thousands of times for all processes: a Path takes as long as the file
                    with open(f"/proc/{entry}/environ", "rb", buffering=0) as file:
                        environ = file.read()
                except OSError:
                    continue
                if self.mark.encode() in environ and int(entry) != os.getpid():
                    found.append(int(entry))
        return found

    def nothing_left(self, patience: float = 0.0) -> None:
        """Prove that no process, port or temporary file of the command remains; `patience` only if it was killed."""
        left = left_after(patience, self.left)
        assert not left, [_stat(pid) for pid in left]
        for port in self.ports():
            assert _is_free(port) or _is_taken(port) or _is_free(port), f"port {port} is in use, and by no process"
        files = [path for path in (self.home / "tmp").glob("*") if not _is_torchs(path)]
        assert not files, files

    def kill_all(self) -> None:
        """End whatever a failed test has left."""
        for pid in self.left():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def close_pipes(self) -> None:
        """Close what a failed test has not read, which would be a warning in a later one."""
        if self.process is not None:
            for pipe in filter(None, (self.process.stdin, self.process.stdout, self.process.stderr)):
                pipe.close()

    # --- the run folder

    @property
    def folder(self) -> Path:
        """The folder of the latest run, as soon as it is there: it is made by a process of its own, maybe after workers."""
        runs = self.home / "state" / "ddplaunch" / "runs"
        found: list[Path] = until(lambda: list(runs.glob("*")), "a run folder")
        return max(found, key=lambda path: path.stat().st_mtime)

    def events(self, *names: str) -> list[dict[str, Any]]:
        """The events of the latest run that have been written, all or those of these names."""
        return events_in(self.folder, *names)

    def ports(self) -> list[int]:
        """The MASTER_PORTs of every run below this home."""
        return [
            event["master_port"]
            for file in self.home.glob("state/ddplaunch/runs/*/events.jsonl")
            for event in map(json.loads, file.read_text().splitlines())
            if event["event"] == "generation_started"
        ]

    def pids(self) -> dict[int, int]:
        """The pid of each rank, latest generation, once all of them have been written."""

        def started() -> dict[int, int]:
            last: list[dict[str, Any]] = []
            for event in self.events("generation_started", "worker_started"):
                last = [] if event["event"] == "generation_started" else [*last, event]
            return {event["rank"]: event["pid"] for event in last}

        size = until(lambda: self.events("job_started"), "the first event")[0]["world_size"]
        return dict(until(lambda: len(pids := started()) == size and pids, "the start of all workers"))


def events_in(folder: Path, *names: str) -> list[dict[str, Any]]:
    """The events of a node that have been written, all or those of these names; one that is just being written is waited for."""
    file = folder / "events.jsonl"
    until(file.exists, "the file of events")
    text = until(lambda: (text := file.read_text()).endswith("\n") and text, "whole lines in the file of events")
    events = map(json.loads, text.splitlines())
    return [event for event in events if not names or event["event"] in names]


def _is_torchs(path: Path) -> bool:
    """Whether it is the folder of generated modules that torch leaves when it is killed: 2.9 does, 2.13 does not."""
    names = {file.name for file in path.iterdir()} - {"__pycache__"} if path.is_dir() else set()
    return names == {"_remote_module_non_scriptable.py"}


def _is_free(port: int) -> bool:
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", port))
            probe.listen()  # would fail if anybody listened; TIME_WAIT is no socket of anybody's
    except OSError:
        return False
    return True


def _is_taken(port: int) -> bool:
    """Whether a process listens at this port: none of the command's is left, so that it is one of another test."""
    return any(each.pid and each.laddr[1] == port for each in psutil.net_connections("tcp") if each.laddr)


def _stat(pid: int) -> str:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        return f"{Path(f'/proc/{pid}/stat').read_text().strip()[:80]} :: {command}"
    except OSError:
        return f"{pid} (gone)"


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    """One invocation of the command; whatever the test leaves of it is an error, and is ended."""
    job = Job(tmp_path)
    yield job
    try:
        job.nothing_left()
    finally:
        job.kill_all()
        job.close_pipes()


@pytest.fixture(scope="module")
def commands() -> Iterator[Commands]:
    """Runs commands that start no process."""
    from tests.forks import Commands  # which is about jobs itself

    commands = Commands()
    yield commands
    commands.close()


@pytest.fixture
def program() -> Callable[[str], Path]:
    """Find a worker that misbehaves on purpose."""
    return lambda name: PROGRAMS / f"{name}.py"


@pytest.fixture
def light_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have jobs import torch in half the time, where they do no more with it than meet, or train on CPUs."""
    monkeypatch.setenv("PYTHONPATH", LIGHT_TORCH)


def let_the_echo_die() -> None:
    """Wait until the same signal is meant, and no copy such as timeout(1) sends."""
    time.sleep(2 * REPEAT_WINDOW)


def insist(process: subprocess.Popen[str]) -> None:
    """Have the workers of a job that stops killed, as a second Ctrl-C does where there is a terminal."""
    process.send_signal(signal.SIGQUIT)


def lines_of(text: str, prefix: str) -> Sequence[str]:
    """The lines of one rank, without its prefix."""
    return [line.removeprefix(prefix) for line in text.splitlines() if line.startswith(prefix)]
