"""The folder of a run, as its agent fills it: plan, events, logs, exceptions, summary. Never fails the job, touches no disk.

    RUN/plan.json  RUN/events.jsonl  RUN/summary.json  RUN/rank-3.out  RUN/rank-3.err  RUN/errors/0/3.json
    RUN/stacks/0.txt  RUN/samples.jsonl  RUN/collectives.jsonl  RUN/about.json

The nodes of one job may share a home, so each has such a folder of its own below RUN: RUN/node-0, RUN/node-1.

With --log-dir the logs lie as torchrun lays them: DIR/RUN_ID_xxxx/attempt_0/3/{stdout.log,stderr.log,error.json}.

What is to be written goes over a queue to another process, which hangs in place of this one if the disk does.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from itertools import count as counted
from typing import Any

from ddplaunch.plan import Plan
from ddplaunch.record.events import VERSION, Event
from ddplaunch.record.file_queue import EVENT, HOLD, JSON, MAKE, REMOVE, REPLACE, SAMPLE, FileQueue, Log, pack
from ddplaunch.record.folders import run_id_of, runs_folder
from ddplaunch.spec.job import JobSpec
from ddplaunch.system.errors import LaunchError
from ddplaunch.system.words import count

SAMPLES, COLLECTIVES = "samples.jsonl", "collectives.jsonl"
_HINT_OTHER_DISK = "`export XDG_STATE_HOME=FOLDER` or `--log-dir FOLDER` keeps the next ones on another disk"
LOG_LIMIT = 1 << 30  # bytes of one stream of one worker


class RunFolder:
    """The folder that keeps the record of one run, written by another process (the writer); `path` is None if there is none."""

    def __init__(
        self,
        files: FileQueue,
        root: str = "",
        name: str = "",
        *,
        runs: str | None,
        torchrun_layout: bool,
        keep: int = 0,
        needed_by: str = "",
    ) -> None:
        """Have the folder `name` made below `root`, with a number behind a name that is taken; without a name, keep nothing.

        Old runs in `runs`, the folder of all runs, are removed after `keep` days; 0: never. None: `root` is that of --log-dir, in
        which nothing is removed. `torchrun_layout`: files have the names that torchrun gives. `needed_by` is the option, as
        typed, without whose folder no worker may start; "": none.
        """
        self.files = files
        self.path: str | None = f"{root}/{name}" if name else None  # as it will be, until it is made
        self.is_made = not name  # the writer has made it, or it is known that there will be none
        self.problem: str | None = None  # the first thing that could not be written, and why
        self.refusal: str | None = None  # why no worker may start: the folder that was asked for cannot be made
        self.warning: str | None = None  # who else may replace the folder
        self.notices: list[str] = []  # what was done with old runs, and is not reported yet
        self._torchrun_layout = torchrun_layout
        self._needed_by = needed_by
        self._reported_hanging = False  # whether the last message said that the disk hangs
        if name and not files.is_open:
            self._keep_nothing("there is no room for one more process")
        elif name:
            files.on_reply = self._on_reply
            files.put(MAKE, pack({"root": root, "name": name, "runs": runs, "keep": keep}))

    @classmethod
    def none(cls, files: FileQueue, problem: str | None = None) -> RunFolder:
        """Keep nothing."""
        folder = cls(files, runs=None, torchrun_layout=False)
        folder.problem = problem
        return folder

    def _on_reply(self, reply: Mapping[str, Any]) -> None:
        """Note what the writer replies: the folder is made, cannot be made, or has a problem; or old runs were removed."""
        match reply:
            case {"made": path, "unsafe": unsafe}:  # unsafe: None, or who may replace it
                self.path, self.is_made = path, True
                if unsafe is not None:
                    self.warning = f"the folder of the logs may be replaced: {unsafe}"
            case {"notice": text}:
                self.notices.append(text)
            case {"none": why}:
                self._keep_nothing(why)
                self.files.fails = True
            case {"problem": problem, **more}:
                self.problem = self.problem or problem
                output_is_lost = "fails" in more  # a log, and not another file, could not be written
                self.files.fails = self.files.fails or output_is_lost
                if not self.is_made:
                    # before its first reply a writer only has a problem if it ends: there will be no folder
                    self.path, self.is_made = None, True

    def _keep_nothing(self, why: str) -> None:
        """Go on without a folder, or, where one was asked for, say why no worker may start."""
        self.path, self.is_made = None, True
        if self._needed_by:
            self.refusal = f"{self._needed_by}: {why}"
        else:
            self.problem = f"no logs are kept: {why}"

    @property
    def whole(self) -> str | None:
        """The path, as long as all that was to be written there was: on a full disk a log may be empty."""
        return self.path if self.problem is None else None

    @property
    def is_settled(self) -> bool:
        """Whether `path` says what it is, as far as that can be known: nothing waits for a disk that hangs."""
        if not self.is_made:
            self.files.receive()
        return self.is_made or self.files.hangs

    def __call__(self, event: Event) -> None:
        """Append one event."""
        if self.path is not None:
            fields = {"v": VERSION, "event": event.name, "at": round(time.time(), 6), "mono": event.mono}
            self.files.put(EVENT, pack({**fields, **event.fields}))

    def keep_sample(self, name: str, sample: Mapping[str, Any]) -> int:
        """Append a line to this file, unless the disk hangs or is far behind; return the bytes, roughly."""
        if self.path is None or self.files.hangs or self.files.size > HOLD:
            return 0
        data = pack((name, sample))
        self.files.put(SAMPLE, data)
        return len(data)

    def write(self, name: str, content: Mapping[str, Any]) -> None:
        """Write one JSON file of the folder, whole or not at all."""
        if self.path is not None:
            self.files.put(JSON, pack((name, content)))

    def keep_exception(self, generation: int, rank: int, local_rank: int, content: bytes) -> None:
        """Write what a worker has recorded of the exception that ended it."""
        self._keep(f"attempt_{generation}/{local_rank}/error.json", f"errors/{generation}/{rank}.json", content)

    def keep_stacks(self, generation: int, content: bytes) -> None:
        """Write where the workers of a generation were when they had to end."""
        self._keep(f"attempt_{generation}/stacks.txt", f"stacks/{generation}.txt", content)

    def _keep(self, name_of_torchrun: str, name: str, content: bytes) -> None:
        if self.path is not None:
            own = name_of_torchrun if self._torchrun_layout else name
            self.files.put(REPLACE, own.encode() + b"\n" + content)

    def remove(self, path: str) -> None:
        """Remove a file elsewhere, on a disk that may hang as well."""
        self.files.put(REMOVE, os.fsencode(path))

    def log_names(self, generation: int, rank: int, local_rank: int) -> tuple[str, str]:
        """Return the names of a worker's stdout and stderr logs in the folder."""
        if self._torchrun_layout:
            attempt = f"attempt_{generation}/{local_rank}"
            return f"{attempt}/stdout.log", f"{attempt}/stderr.log"
        return f"rank-{rank}.out", f"rank-{rank}.err"

    def open_logs(self, names: tuple[str, str], limit: int | None) -> tuple[Log, Log] | None:
        """Open two logs of at most `limit` bytes each; None if there is no folder."""
        if self.path is None:
            return None
        out, err = (self.files.open_log(pack({"name": name, "limit": limit})) for name in names)
        return out, err

    def filtered_names(self, generation: int) -> tuple[str, str]:
        """Return the names of what torchrun's --duplicate-stdout-filters and --duplicate-stderr-filters write to."""
        base = f"attempt_{generation}/" if self._torchrun_layout else ""
        return f"{base}filtered_stdout.log", f"{base}filtered_stderr.log"

    def news(self, on_host: str) -> str | None:
        """Return a message if the disk hangs or answers again since the last call, else None; `on_host`: "" or " on HOST"."""
        if self.files.hangs is self._reported_hanging:
            return None
        self._reported_hanging = self.files.hangs
        if self.files.hangs:
            what = "its logs wait"
            if not self.is_made:
                what += f". `ddplaunch ps`, `stop` and `logs` do not find it: {_HINT_OTHER_DISK}"
            return f"warning: the log folder {self.path}{on_host} does not answer. The job goes on, and {what}"
        lines = self.files.dropped_lines
        dropped = [f"{count(lines, 'line')} of log were dropped meanwhile"] if lines else []
        return "; ".join([f"the log folder {self.path}{on_host} answers again", *dropped])

    def leave(self, on_host: str) -> str | None:
        """Leave to the writer what waits, as this process ends; return a message if the disk hangs, else None.

        `on_host`: as for `news`.
        """
        hangs = self.files.hangs
        self.files.leave()
        if not hangs:
            return None
        lines = self.files.dropped_lines
        dropped = f"{count(lines, 'line')} of log dropped; " if lines else ""
        return f"warning: the log folder {self.path}{on_host} does not answer: {dropped}what waits is written if it ever does"


def folder_of_run(
    spec: JobSpec, env: Mapping[str, str], plan: Plan, files: FileQueue, *, is_part: bool = False
) -> RunFolder:
    """Have the folder of this run made where --log-dir wants it; return a folder that keeps nothing if none is wanted.

    `is_part`: the folder is that of one node, and lies in the run's, which the command that has started all agents makes.
    """
    if spec.log_dir == os.devnull:  # torchrun's value for none
        return RunFolder.none(files)
    is_of_command = not plan.workers  # a command that has started all agents has no workers itself
    own_part = f"node-{plan.node_rank}"
    if spec.log_dir:
        root = os.path.abspath(spec.log_dir)
        if is_part:
            root, name = f"{root}/{_shared_name(spec, plan.run_id)}", own_part
        elif is_of_command:
            name = _shared_name(spec, plan.run_id)
        else:
            # a second run with an equal id gets a name of its own
            name = f"{spec.rdzv_id or plan.run_id}_{os.urandom(4).hex()}"
        # the command that has started all agents goes on without: the hosts of the workers keep the logs
        needed_by = f"--log-dir {spec.log_dir}" if plan.workers else ""
        return RunFolder(files, root, name, runs=None, torchrun_layout=True, needed_by=needed_by)
    if (runs := runs_folder(env)) is None:
        home = env.get("HOME")
        why = f"HOME={home} is no absolute path" if home else "HOME is not set, and this user has no home folder"
        return RunFolder.none(files, f"no logs are kept: {why}")
    root, name = runs, plan.run_id
    if plan.workers and len(plan.agents) > plan.nnodes:
        root, name = f"{runs}/{plan.run_id}", f"rank-{plan.workers[0].rank}"  # a command was started for each rank
    elif is_part or (plan.workers and len(plan.agents) > 1):
        # homes are often shared, so each node has a folder of its own in that of the run
        root, name = f"{runs}/{plan.run_id}", own_part
    return RunFolder(files, root, name, runs=runs, torchrun_layout=False, keep=spec.keep_runs)


def run_id_with_nodes(spec: JobSpec, env: Mapping[str, str]) -> str:
    """Return the name of a run whose nodes lay their folders into its own; one that was asked for and is taken gets a number.

    The command that starts all agents calls this and tells them the name: an agent alone would find that the first
    agent's folder has taken it. Where the disk hangs, the name is taken as it was asked for.
    """
    asked, runs = run_id_of(spec), runs_folder(env)
    is_drawn = spec.run_id is None
    keeps_nothing = spec.log_dir == os.devnull or (runs is None and not spec.log_dir)
    if is_drawn or keeps_nothing:
        return asked
    from ddplaunch.system.process.files import exists_on_disk  # few jobs need it

    def folder(run_id: str) -> str:
        return f"{os.path.abspath(spec.log_dir)}/{_shared_name(spec, run_id)}" if spec.log_dir else f"{runs}/{run_id}"

    with suppress(LaunchError):
        for number in counted():
            run_id = f"{asked}.{number}" if number else asked
            if not exists_on_disk([folder(run_id)], "the folder of runs"):
                return run_id
    return asked


def _shared_name(spec: JobSpec, run_id: str) -> str:
    """Return the name of a folder in that of --log-dir which all processes of the job know, though none tells another."""
    from hashlib import sha256  # few jobs need it

    return f"{spec.rdzv_id or run_id}_{sha256(run_id.encode()).hexdigest()[:8]}"
