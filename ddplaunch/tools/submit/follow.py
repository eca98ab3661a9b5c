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

from ddplaunch.reach.slurm.scontrol import JobRecord, ScontrolError, UnknownJob, show_jobs
from ddplaunch.system.errors import below, tell, write_stderr
from ddplaunch.system.exitcodes import NODE_LOST, OK, TIMEOUT, of_signal
from ddplaunch.system.process.apart import waiting
from ddplaunch.system.words import why_failed
from ddplaunch.tools.submit.output import Tail, output_files

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
        """Watch a submitted job; with `follow`, show the files of `tails` as they grow."""
        self._job = job
        self._tails = {tail.path: tail for tail in tails}
        self._shown: Mapping[str, int] = {}  # the job's output files, and the stream for each
        self._follow = follow
        self._observed = Observation()  # the last that Slurm has said of the job
        self._slurm_responds = True
        self._ran = False  # then its output files appear soon
        self._mid_line = False  # what was shown last has no newline at its end
        self._dropped: set[int] = set()  # streams that cannot be written

    def run(self) -> int:
        """Report each change of the job's state, and show its output, until the job is over; return the exit status."""
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
            with waiting():
                time.sleep(POLL_INTERVAL if self._follow else max(query_at - time.monotonic(), 0))

    def _query(self, now: float) -> bool:
        """Query the state of the job and report a change; return whether the state changed."""
        try:
            jobs = show_jobs(os.environ, self._job.id, POLL_TIMEOUT, cluster=self._job.cluster)
        except UnknownJob:
            observed = forgotten(self._observed)
            lines: tuple[str, ...] = (observed.ended[""].text,)
        except ScontrolError as error:
            if self._slurm_responds:
                self._slurm_responds = False
                self.print_below(f"Slurm does not respond, trying again: {error}")
            return False
        else:
            self._slurm_responds = True
            if self._follow and jobs:
                self._shown = output_files(jobs[0])
                self._ran = has_run(jobs[0])
            observed, lines = update(self._observed, jobs, now)
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
        """Show the output that came last; wait a little for files that a file server has not shown yet."""
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
        """Write all of `data` to stdout or stderr; a stream that fails is named, and dropped from then on."""
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
    tell(f"{text}\n")


# --- the state of the job, as scontrol shows it


RETURN_TIME = 10.0  # seconds after which a job that may be requeued, but was not, is over

FAILED = 1  # of a job that Slurm could not start, or whose exit status is unknown
_SIGTERM, _SIGKILL = 15, 9
# states of a job that is over (squeue(1), JOB STATE CODES), and its exit status if the script has none
_ENDS = {
    "BOOT_FAIL": NODE_LOST,
    "CANCELLED": of_signal(_SIGTERM),
    "COMPLETED": OK,
    "DEADLINE": TIMEOUT,
    "FAILED": FAILED,
    "NODE_FAIL": NODE_LOST,
    "OUT_OF_MEMORY": of_signal(_SIGKILL),
    "PREEMPTED": of_signal(_SIGTERM),
    "REVOKED": FAILED,
    "TIMEOUT": TIMEOUT,
}
_REQUEUEABLE = ("BOOT_FAIL", "NODE_FAIL", "PREEMPTED")
_WORDS = {
    "BOOT_FAIL": "ended because a node did not boot",
    "CANCELLED": "was cancelled",
    "COMPLETED": "completed",
    "DEADLINE": "ended at its deadline",
    "NODE_FAIL": "ended because a node failed",
    "OUT_OF_MEMORY": "ran out of memory",
    "PREEMPTED": "was preempted",
    "TIMEOUT": "reached its time limit",
}
# in other states, ExitCode is the signal by which Slurm ended the job, or a number of its own
_WITH_A_STATUS = ("CANCELLED", "COMPLETED", "FAILED")
_LAST_SIGNAL = 64
_LAUNCH_FAILURE = "JobLaunchFailure"
_FORGOTTEN = "is no longer known to Slurm, so its exit status is unknown"


class JobEnding(Struct, frozen=True, kw_only=True):
    """The end of a job, or of an element of an array."""

    status: int
    text: str  # as it follows "job 84 "


class Observation(Struct, frozen=True, kw_only=True):
    """What was observed of a job so far."""

    line: str = ""  # the state that was reported last
    ended: Mapping[str, JobEnding] = {}  # by element
    may_return: Mapping[str, float] = {}  # by element: since when it is in a state from which it may be requeued
    over: bool = False

    @property
    def status(self) -> int:
        """The status of the job; of an array, the worst."""
        return max((end.status for end in self.ended.values()), default=FAILED)


def update(observed: Observation, jobs: Sequence[JobRecord], at: float) -> tuple[Observation, tuple[str, ...]]:
    """Take what scontrol shows now; give the lines to report, without the job's id."""
    ended, may_return, lines = dict(observed.ended), {}, []
    alive = []
    for job in jobs:
        name = job.element
        since = observed.may_return.get(name, at)
        may_be_requeued = job.state in _REQUEUEABLE and job.may_requeue and at - since < RETURN_TIME
        if job.state in _ENDS and not may_be_requeued:
            if name not in ended:
                ended[name] = end_of(job)
                if name and ended[name].status:
                    lines.append(f"{name} {ended[name].text}")
            continue
        if job.state in _REQUEUEABLE:
            may_return[name] = since
        else:
            ended.pop(name, None)  # it was requeued
        alive.append(job)
    line = _state(alive) if alive else ""
    if line and line != observed.line:
        lines.append(line)
    over = bool(ended) and not alive
    found = Observation(line=line or observed.line, ended=ended, may_return=may_return, over=over)
    if over and "" in ended:
        lines.append(ended[""].text)
    elif over and found.status:
        lines.append(f"ended, with {found.status} as the worst status of its elements")
    elif over:
        lines.append("completed with all of its elements")
    return found, tuple(lines)


def forgotten(observed: Observation) -> Observation:
    """Take that slurmctld knows the job no more: it forgets jobs some minutes after their end."""
    return Observation(
        line=observed.line, ended={**observed.ended, "": JobEnding(status=FAILED, text=_FORGOTTEN)}, over=True
    )


def has_run(job: JobRecord) -> bool:
    """Whether the job was started, so that it has output."""
    return bool(job.nodes) and job.reason != _LAUNCH_FAILURE


def end_of(job: JobRecord) -> JobEnding:
    """Return how a job ended: the exit status of its script, or a status for the reason why there is none."""
    state = job.state
    if job.reason == _LAUNCH_FAILURE:
        text = "could not be started: the folder or the file of its output cannot be written, or the node is broken"
        return JobEnding(status=FAILED, text=text)
    status = 0
    if state in _WITH_A_STATUS:  # as a shell shows it
        code, _, number = job.exit_code.partition(":")
        status = of_signal(int(number)) if 0 < int(number or 0) <= _LAST_SIGNAL else int(code)
    status = status or _ENDS.get(state, FAILED)
    text = _WORDS.get(state, f"failed with status {status}")
    took = "" if job.run_time == "00:00:00" else f" after {job.run_time}"
    return JobEnding(status=status, text=f"{text}{took}")


def _state(jobs: Sequence[JobRecord]) -> str:
    """Return the state of a job, to follow the job's id in a sentence; "" if Slurm reports none."""
    running = [job for job in jobs if job.state == "RUNNING"]
    job = running[0] if running else jobs[0]
    if job.array_id and running:
        return "is running"
    state, reason = job.state, job.reason
    again = f", restart {job.restarts}" if job.restarts else ""
    if state == "RUNNING":
        return f"is running on {job.nodes}{again}"
    if state == "PENDING":  # without a reason, the scheduler has not considered it yet
        return "" if reason == "None" else f"is pending ({reason}){again}"
    return (
        "" if state in ("COMPLETING", "CONFIGURING", *_REQUEUEABLE) else f"is {state.lower().replace('_', ' ')}{again}"
    )
