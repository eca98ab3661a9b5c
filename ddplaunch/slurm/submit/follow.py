"""Waits for a job that was submitted, and shows its output as it grows.

Neither Slurm nor a network file system reports a change, so both are polled.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import NoReturn

from msgspec import Struct

from ddplaunch.errors import below, visible, write_stderr
from ddplaunch.exitcodes import of_signal
from ddplaunch.slurm.scontrol import ScontrolError, UnknownJob, show_jobs
from ddplaunch.slurm.submit import job_state
from ddplaunch.slurm.submit.output import Tail, output_files
from ddplaunch.words import why_failed

POLL_INTERVAL = 0.25  # seconds between two reads of the output
FIRST_INTERVAL, LONGEST_INTERVAL = 1.0, 5.0  # seconds between two queries of slurmctld
POLL_TIMEOUT = 60.0  # seconds for a reply, which holds nothing up; scontrol itself retries a busy slurmctld
FILE_TIMEOUT = 3.0  # seconds after the job's end in which a file may still appear in a shared folder

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Submitted(Struct, frozen=True, kw_only=True):
    """A job that Slurm has accepted."""

    id: str
    cluster: str | None = None  # for --clusters

    @property
    def cancel(self) -> str:
        """The command that ends it."""
        return f"scancel {self.id}" if self.cluster is None else f"scancel --clusters={self.cluster} {self.id}"

    @property
    def parsable(self) -> str:
        """The job as `sbatch --parsable` writes it."""
        return self.id if self.cluster is None else f"{self.id};{self.cluster}"


class _Interrupted(Exception):
    """A signal ended the waiting."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


def wait(job: Submitted, *, tails: Sequence[Tail] = (), follow: bool = False) -> int:
    """Wait until the job ends, report its states, and give its exit status; a signal ends the waiting, not the job.

    `tails` are its output files that existed before it.
    """
    for signum in _SIGNALS:
        if signal.getsignal(signum) is not signal.SIG_IGN:  # nohup
            signal.signal(signum, _interrupt)
    watch = _Watch(job, tails, follow)
    try:
        return watch.run()
    except _Interrupted as left:
        for signum in _SIGNALS:
            signal.signal(signum, signal.SIG_IGN)
        status = of_signal(left.signum)
    except BrokenPipeError:  # the reader of our stdout has closed it
        status = of_signal(signal.SIGPIPE)
    watch.print_below(f"job {job.id} goes on; `{job.cancel}` ends it")
    return status


def _interrupt(signum: int, _frame: FrameType | None) -> NoReturn:
    raise _Interrupted(signum)


class _Watch:
    def __init__(self, job: Submitted, tails: Sequence[Tail], follow: bool) -> None:
        self._job = job
        self._tails = {tail.path: tail for tail in tails}
        self._shown: Mapping[str, int] = {}  # the job's output files, and the stream for each
        self._follow = follow
        self._observed = job_state.Observation()
        self._responds = True
        self._ran = False  # then its output files appear soon
        self._mid_line = False
        self._dropped: set[int] = set()  # streams that cannot be written

    def run(self) -> int:
        pause, query_at = FIRST_INTERVAL, 0.0
        while True:
            now = time.monotonic()
            if now >= query_at:
                if self._query(now):
                    pause = FIRST_INTERVAL
                if self._observed.over:
                    return self._observed.status
                query_at = time.monotonic() + pause
                pause = min(1.5 * pause, LONGEST_INTERVAL)
            if self._show() and " running" not in self._observed.line:
                query_at = 0.0  # output: the job is running
            time.sleep(POLL_INTERVAL if self._follow else max(query_at - time.monotonic(), 0))

    def _query(self, now: float) -> bool:
        """Query the state of the job, report it, and return whether it changed."""
        try:
            jobs = show_jobs(os.environ, self._job.id, POLL_TIMEOUT, cluster=self._job.cluster)
        except UnknownJob:
            observed = job_state.forgotten(self._observed)
            lines: tuple[str, ...] = (observed.ended[""].text,)
        except ScontrolError as error:
            if self._responds:
                self._responds = False
                self.print_below(f"Slurm does not respond, trying again: {error}")
            return False
        else:
            self._responds = True
            if self._follow and jobs:
                self._shown = output_files(jobs[0])
                self._ran = job_state.has_run(jobs[0])
            observed, lines = job_state.update(self._observed, jobs, now)
        if observed.over:
            self._show_the_rest()
        self._observed = observed
        for line in lines:
            # a line about an element of an array begins with the element's id
            self.print_below(f"job {line}" if line.startswith(f"{self._job.id}_") else f"job {self._job.id} {line}")
        return bool(lines)

    def _show(self, *, end: bool = False) -> bool:
        """Show new output; return whether there was any."""
        anything = False
        for path, stream in self._shown.items():
            tail = self._tails.setdefault(path, Tail(path))
            while data := tail.read(end=end):
                self._write(stream, data)
                anything = True
        return anything

    def _show_the_rest(self) -> None:
        deadline = time.monotonic() + FILE_TIMEOUT
        while True:
            self._show(end=True)
            missing = [path for path in self._shown if not self._tails[path].is_there]
            if not missing or not self._ran or time.monotonic() > deadline:
                break
            time.sleep(POLL_INTERVAL)
        if self._ran:
            for path in missing:
                self.print_below(f"{path} cannot be seen from here")

    def _write(self, stream: int, data: bytes) -> None:
        if stream in self._dropped:
            return
        self._mid_line = not data.endswith(b"\n")
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(stream, view) :]
            except BlockingIOError:  # another process that shares the file has set O_NONBLOCK
                select.select((), (stream,), ())
            except BrokenPipeError:
                raise
            except OSError as error:
                self._dropped.add(stream)
                self.print_below(
                    f"cannot write to {'stdout' if stream == 1 else 'stderr'}: {why_failed(error)}; the output is in its file"
                )
                return

    def print_below(self, text: str) -> None:
        """Print a message on a line of its own."""
        if self._mid_line and os.isatty(2) and os.isatty(1):
            write_stderr("\n")
        self._mid_line = False
        notify(f"ddplaunch: {below(text)}")


def notify(text: str) -> None:
    """Print a line to stderr."""
    write_stderr(visible(f"{text}\n"))
