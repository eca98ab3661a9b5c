"""The folder of a run: the plan, the events, the logs, the error files, the summary. Never fails the job.

    RUN/plan.json  RUN/events.jsonl  RUN/summary.json  RUN/rank-3.out  RUN/rank-3.err  RUN/errors/0/3.json

The nodes of one job may share a home, so each has such a folder of its own below RUN: RUN/node-0, RUN/node-1.

With --log-dir the logs lie as torchrun lays them: DIR/RUN_ID_xxxx/attempt_0/3/{stdout.log,stderr.log,error.json}.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from itertools import count
from typing import Any

from ddplaunch.plan import Plan
from ddplaunch.report.events import VERSION, Event
from ddplaunch.spec import JobSpec

KEPT = 20  # runs
LOG_LIMIT = 1 << 30  # bytes of one stream of one worker
_OF_A_NODE = ("node-", "rank-")  # what the names of such folders begin with


class RunFolder:
    """The folder that keeps the record of one run; `path` is None if there is none."""

    def __init__(
        self,
        path: str | None,
        *,
        torchrun_layout: bool,
        run: str | None = None,
        scratch: str | None = None,
        problem: str | None = None,
    ) -> None:
        self.path = path
        self._run = run or path  # the folder of the whole run
        self.problem = problem  # the first thing that could not be written, and why
        self._torchrun_layout = torchrun_layout
        self._scratch = scratch  # where workers write their exceptions if there is no folder; removed at the end
        self._events = -1
        if path is not None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._events = os.open(f"{path}/events.jsonl", flags, 0o600)
            _lock(self._events)

    @classmethod
    def make(cls, root: str, run_id: str, *, torchrun_layout: bool, tmp: str, below: str | None = None) -> RunFolder:
        """Make the folder for this run below `root`; where that cannot be, a scratch folder in `tmp`.

        `below` is the name of this node's own folder in that of the run. A second run with an equal id gets a name of its
        own: in torchrun's layout every run does, else the id and a number.
        """
        if below is not None:
            root, own = f"{root}/{run_id}", below
        else:
            own = run_id
        names = (f"{own}.{number}" if number else own for number in count())
        path = ""
        try:
            os.makedirs(root, mode=0o700, exist_ok=True)
            while not path:
                name = f"{run_id}_{os.urandom(4).hex()}" if torchrun_layout else next(names)
                with suppress(FileExistsError):
                    os.mkdir(f"{root}/{name}", 0o700)
                    path = f"{root}/{name}"
            return cls(path, torchrun_layout=torchrun_layout, run=root if below is not None else None)
        except OSError as error:
            problem = f"no logs are kept: {error.strerror}: {error.filename}"
            return cls.none(run_id, tmp=tmp, problem=problem)

    @classmethod
    def none(cls, run_id: str, *, tmp: str, problem: str | None = None) -> RunFolder:
        """Keep nothing; only the workers' exceptions have a place while the job runs."""
        scratch = f"{tmp}/ddplaunch-{run_id}-{os.urandom(2).hex()}"
        try:
            os.mkdir(scratch, 0o700)
        except OSError:
            return cls(None, torchrun_layout=False, problem=problem)
        return cls(None, torchrun_layout=False, scratch=scratch, problem=problem)

    def tidy(self) -> None:
        """Remove all but the newest runs beside this one; on a slow disk that may take longer than to start the job."""
        if self._run is not None and not self._torchrun_layout:
            with suppress(OSError):
                _keep_newest(os.path.dirname(self._run), KEPT)

    def close(self) -> None:
        """Remove what was only for the time of the job."""
        if self._scratch is not None:
            _remove(self._scratch)

    def __call__(self, event: Event) -> None:
        """Append one event; a full disk is noted once."""
        if self._events < 0:
            return
        fields = {"v": VERSION, "event": event.name, "at": round(time.time(), 6), "mono": event.mono, **event.fields}
        line = json.dumps(fields).encode() + b"\n"
        try:
            written = os.write(self._events, line)
            if written < len(line):  # the disk is full; readers of the file find whole lines only
                os.ftruncate(self._events, os.fstat(self._events).st_size - written)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), f"{self.path}/events.jsonl")
        except OSError as error:
            self._note(error)

    def logs(self, generation: int, rank: int, local_rank: int) -> tuple[str, str] | None:
        """Give the paths of a worker's stdout and stderr logs."""
        if self.path is None:
            return None
        if self._torchrun_layout:
            attempt = self._folder(self.path, f"attempt_{generation}", str(local_rank))
            return (f"{attempt}/stdout.log", f"{attempt}/stderr.log") if attempt else None
        return f"{self.path}/rank-{rank}.out", f"{self.path}/rank-{rank}.err"

    def filtered(self, generation: int) -> tuple[str, str] | None:
        """Give the paths that torchrun's --duplicate-stdout-filters and --duplicate-stderr-filters write to."""
        base = self.path
        if base is not None and self._torchrun_layout:
            base = self._folder(base, f"attempt_{generation}")
        return None if base is None else (f"{base}/filtered_stdout.log", f"{base}/filtered_stderr.log")

    def error_file(self, generation: int, rank: int, local_rank: int) -> str:
        """Give the path that a worker writes its uncaught exception to; "" if there is none."""
        base = self.path or self._scratch
        if base is None:
            return ""
        if self._torchrun_layout:
            attempt = self._folder(base, f"attempt_{generation}", str(local_rank))
            return f"{attempt}/error.json" if attempt else ""
        folder = self._folder(base, "errors", str(generation))
        return f"{folder}/{rank}.json" if folder else ""

    def write(self, name: str, content: Mapping[str, Any]) -> None:
        """Write one JSON file of the folder, whole or not at all."""
        if self.path is None:
            return
        path = f"{self.path}/{name}"
        try:
            with open(f"{path}.new", "w", encoding="utf-8") as file:
                file.write(json.dumps(content, indent=1) + "\n")
            os.replace(f"{path}.new", path)
        except OSError as error:
            self._note(error)
            with suppress(OSError):
                os.unlink(f"{path}.new")

    def _folder(self, path: str, *below: str) -> str | None:
        """Make folders one below the other. A `path` that was removed meanwhile stays removed."""
        for name in below:
            path = f"{path}/{name}"
            try:
                os.mkdir(path, 0o700)
            except FileExistsError:
                pass
            except OSError as error:
                self._note(error)
                return None
        return path

    def _note(self, error: OSError) -> None:
        if self.problem is None:
            self.problem = f"{error.strerror}: {error.filename or self.path}"


def _keep_newest(root: str, number: int) -> None:
    """Remove all but the newest runs and those that still go on. Other jobs may be doing the same."""
    runs = [entry for entry in os.scandir(root) if entry.is_dir(follow_symlinks=False)]
    if len(runs) <= number:
        return
    runs.sort(key=_last_written)
    for entry in runs[: len(runs) - number]:
        if not _goes_on(entry.path):
            _remove(entry.path)


def _remove(folder: str) -> None:
    """Remove a folder as far as it can be removed; as shutil does it, whose import takes longer than the work."""
    for place, folders, files in os.walk(folder, topdown=False):
        for name in (*files, *folders):
            path = f"{place}/{name}"
            with suppress(OSError):
                os.rmdir(path) if name in folders and not os.path.islink(path) else os.unlink(path)
    with suppress(OSError):
        os.rmdir(folder)


def _last_written(entry: os.DirEntry[str]) -> float:
    times = []
    for path in (*_events_files(entry.path), entry.path):
        try:
            times.append(os.stat(path).st_mtime)
        except OSError:
            pass
    return times[0] if len(times) == 1 else max(times[:-1], default=0.0)  # 0: removed meanwhile


def _lock(events: int) -> None:
    """Show others that the run goes on, for as long as any process of ours has this file open."""
    try:
        fcntl.flock(events, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        pass  # a file system without locks


def _events_files(run: str) -> list[str]:
    """The files of events in the folder of a run: its own, or those of its nodes."""
    try:
        nodes = [entry.path for entry in os.scandir(run) if entry.is_dir() and entry.name.startswith(_OF_A_NODE)]
    except OSError:
        nodes = []
    return [f"{folder}/events.jsonl" for folder in (nodes or [run])]


def _goes_on(run: str) -> bool:
    """Whether the run in this folder has not ended."""
    return any(_is_written(file) for file in _events_files(run))


def _is_written(file: str) -> bool:
    """Whether the agent that writes these events still runs."""
    try:
        events = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(events, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return not os.path.exists(f"{os.path.dirname(file)}/summary.json")
    finally:
        os.close(events)
    return False


def run_id_of(spec: JobSpec) -> str:
    """Give the name of this run: as was asked, or one that no other run has."""
    return spec.run_id or f"{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(2).hex()}"


def folder_of_run(spec: JobSpec, env: Mapping[str, str], plan: Plan) -> RunFolder:
    """Make the folder of this run, or one that keeps nothing, as was asked."""
    tmp = env.get("TMPDIR") or "/tmp"
    if spec.log_dir == os.devnull:  # torchrun's value for none
        return RunFolder.none(plan.run_id, tmp=tmp)
    if spec.log_dir:
        root = os.path.abspath(spec.log_dir)
        return RunFolder.make(root, spec.rdzv_id or plan.run_id, torchrun_layout=True, tmp=tmp)
    state = env.get("XDG_STATE_HOME", "")
    if not os.path.isabs(state):  # which the XDG standard says to ignore
        state = os.path.join(env.get("HOME") or os.path.expanduser("~"), ".local", "state")
    if not os.path.isabs(state):
        problem = "no logs are kept: HOME is not set, and this user has no home folder"
        return RunFolder.none(plan.run_id, tmp=tmp, problem=problem)
    root = os.path.join(state, "ddplaunch", "runs")
    # homes are often shared, so each node has a folder of its own in that of the run
    node = None if len(plan.seats) == 1 else f"node-{plan.node_rank}"
    if len(plan.seats) > plan.nnodes:
        node = f"rank-{plan.workers[0].rank}"  # a command was started for each rank
    return RunFolder.make(root, plan.run_id, torchrun_layout=False, tmp=tmp, below=node)
