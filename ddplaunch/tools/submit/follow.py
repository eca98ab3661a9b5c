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
from ddplaunch.system.errors import indented, tell, write_stderr
from ddplaunch.system.exitcodes import NODE_LOST, OK, TIMEOUT, of_signal
from ddplaunch.system.process.apart import disk_watch_paused
from ddplaunch.system.process.command import do_nothing
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
    watch = _Watch(job, tails, follow)
    try:
        for signum in _SIGNALS:
            if signal.getsignal(signum) is not signal.SIG_IGN:  # as under nohup
                signal.signal(signum, _interrupt)
        return watch.run()
    except _Interrupted as interrupted:
        status = of_signal(interrupted.signum)
    except BrokenPipeError:  # the reader of our stdout has closed it
        status = of_signal(signal.SIGPIPE)
    watch.print_below(f"job {job.id} goes on; `{job.cancel}` ends it")
    return status


def _interrupt(signum: int, _frame: FrameType | None) -> NoReturn:
    """End the waiting; another signal, which may have come at once, must not end this command before its last line."""
    for each in _SIGNALS:
        if signal.getsignal(each) is _interrupt:
            signal.signal(each, do_nothing)
    raise _Interrupted(signum)


class _Watch:
    """Watches a submitted job: polls scontrol for its state and reports changes, and with --follow shows its output files."""

    def __init__(self, job: Submitted, tails: Sequence[Tail], follow: bool) -> None:
        """Prepare; `tails` read output files that existed before the job."""
        self._job = job
        self._tails = {tail.path: tail for tail in tails}  # by the path of an output file: what reads it
        self._output_files: Mapping[str, int] = {}  # the job's output files, and the stream for each
        self._follow = follow
        self._observed = Observation()  # the last that Slurm has said of the job
        self._slurm_responds = True
        self._was_started = False  # the job: only then its output files appear
        self._is_mid_line = False  # what was shown last has no newline at its end
        self._failed_streams: set[int] = set()  # 1 stdout, 2 stderr: nothing is written there any more

    def run(self) -> int:
        """Report each change of the job's state, and show its output, until the job is over; return the exit status."""
        interval = FIRST_INTERVAL  # seconds between queries, more and more of them as long as nothing changes
        query_at = 0.0  # monotonic
        while True:
            now = time.monotonic()
            if now >= query_at:
                has_changed = self._query(now)
                if has_changed:
                    interval = FIRST_INTERVAL
                if self._observed.is_over:
                    return self._observed.status
                query_at = time.monotonic() + interval
                interval = min(1.5 * interval, LONGEST_INTERVAL)
            has_output = self._show()
            is_reported_running = " running" in self._observed.reported_state  # "is running on node1"
            if has_output and not is_reported_running:  # what writes runs: the user is to read that soon
                query_at = 0.0
            with disk_watch_paused():
                time.sleep(POLL_INTERVAL if self._follow else max(query_at - time.monotonic(), 0))

    def _query(self, now: float) -> bool:
        """Query the state of the job and report a change; return whether the state changed."""
        try:
            jobs = show_jobs(os.environ, self._job.id, POLL_TIMEOUT, cluster=self._job.cluster)
        except UnknownJob:
            observed = after_slurm_forgot(self._observed)
            lines: tuple[str, ...] = (_TEXT_IF_FORGOTTEN,)
        except ScontrolError as error:
            if self._slurm_responds:
                self._slurm_responds = False
                self.print_below(f"Slurm does not respond, trying again: {error}")
            return False
        else:
            self._slurm_responds = True
            if self._follow and jobs:
                self._output_files = output_files(jobs[0])  # the only one: --follow takes no array
                self._was_started = has_run(jobs[0])
            observed, lines = update(self._observed, jobs, now)
        if observed.is_over:
            self._show_the_rest()  # before the line about the end
        self._observed = observed
        for line in lines:
            # a line about an element of an array begins with the element's id
            self.print_below(f"job {line}" if line.startswith(f"{self._job.id}_") else f"job {self._job.id} {line}")
        return bool(lines)

    def _show(self, *, is_last: bool = False) -> bool:
        """Show new output, if it is the last also half a character at its end; return whether there was any."""
        anything = False
        for path, stream in self._output_files.items():
            tail = self._tails.setdefault(path, Tail(path))
            while data := tail.read(is_last=is_last):
                self._write(stream, data)
                anything = True
        return anything

    def _show_the_rest(self) -> None:
        """Show the output that came last; wait a little for files that a file server has not shown yet."""
        deadline = time.monotonic() + FILE_TIMEOUT
        while True:
            self._show(is_last=True)
            missing = [path for path in self._output_files if not self._tails[path].is_there]
            if not missing or not self._was_started or time.monotonic() > deadline:
                break
            time.sleep(POLL_INTERVAL)
        if self._was_started:
            for path in missing:
                self.print_below(f"{path} cannot be seen from here")

    def _write(self, stream: int, data: bytes) -> None:
        """Write all of `data` to stdout or stderr; a stream that fails is named, and dropped from then on."""
        if stream in self._failed_streams:
            return
        self._is_mid_line = not data.endswith(b"\n")
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(stream, view) :]
            except BlockingIOError:  # another process that shares the file has set O_NONBLOCK
                select.select((), (stream,), ())
            except BrokenPipeError:  # `wait` ends with the status of SIGPIPE
                raise
            except OSError as error:
                self._failed_streams.add(stream)
                self.print_below(
                    f"cannot write to {'stdout' if stream == 1 else 'stderr'}: {why_failed(error)}; the output is in its file"
                )
                return

    def print_below(self, text: str) -> None:
        """Print a message on a line of its own."""
        if self._is_mid_line and os.isatty(2) and os.isatty(1):
            write_stderr("\n")
        self._is_mid_line = False
        notify(f"ddplaunch: {indented(text)}")


def notify(text: str) -> None:
    """Print a line to stderr."""
    tell(f"{text}\n")


# --- the state of the job, as scontrol shows it


REQUEUED_WITHIN = 10.0  # seconds; a job that may be requeued, and was not by then, is over

FAILED = 1  # of a job that Slurm could not start, or whose exit status is unknown
_SIGTERM, _SIGKILL = 15, 9
# states of a job that is over (squeue(1), JOB STATE CODES), and its exit status if the script has none
_STATUS_OF_END = {
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
_WORDS_OF_END = {
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
_WITH_STATUS_OF_SCRIPT = ("CANCELLED", "COMPLETED", "FAILED")
_LAST_SIGNAL = 64
_LAUNCH_FAILURE = "JobLaunchFailure"
_TEXT_IF_FORGOTTEN = "is no longer known to Slurm, so its exit status is unknown"


_NO_ARRAY = ""  # what JobRecord.element is of a job that is no array


class JobEnding(Struct, frozen=True, kw_only=True):
    """The end of a job, or of an element of an array."""

    status: int
    text: str  # as it follows "job 84 "


class Observation(Struct, frozen=True, kw_only=True):
    """What was observed of a job so far."""

    reported_state: str = ""  # the one that was reported last, in words
    ended: Mapping[str, JobEnding] = {}  # by element of an array: "84_3"; of a job that is no array by `_NO_ARRAY`
    # by element: since when it is in a state from which Slurm may requeue it
    may_requeue_since: Mapping[str, float] = {}
    is_over: bool = False

    @property
    def status(self) -> int:
        """The status of the job; of an array, the worst."""
        return max((end.status for end in self.ended.values()), default=FAILED)


def update(observed: Observation, jobs: Sequence[JobRecord], at: float) -> tuple[Observation, tuple[str, ...]]:
    """Return what is observed of a job by what scontrol shows now (`at`: monotonic seconds), and lines to report, without its id.

    `jobs` has one record for each element of an array. An element that has ended stays so, though Slurm forgets it, until it
    runs again.
    """
    ended, may_requeue_since, lines = dict(observed.ended), {}, []
    alive = []
    for job in jobs:
        element = job.element
        since = observed.may_requeue_since.get(element, at)
        may_be_requeued = job.state in _REQUEUEABLE and job.may_requeue and at - since < REQUEUED_WITHIN
        has_ended = job.state in _STATUS_OF_END and not may_be_requeued
        if has_ended:
            if element not in ended:
                ended[element] = end_of(job)
                if element != _NO_ARRAY and ended[element].status != OK:
                    lines.append(f"{element} {ended[element].text}")
            continue
        if job.state in _REQUEUEABLE:
            may_requeue_since[element] = since
        else:
            ended.pop(element, None)  # it was requeued
        alive.append(job)
    state = _state_in_words(alive) if alive else ""
    if state and state != observed.reported_state:
        lines.append(state)
    now = Observation(
        reported_state=state or observed.reported_state,
        ended=ended,
        may_requeue_since=may_requeue_since,
        is_over=bool(ended) and not alive,
    )
    if now.is_over:
        lines.append(_end_in_words(now))
    return now, tuple(lines)


def _end_in_words(observed: Observation) -> str:
    """Return how a job that is over ended, to follow the job's id in a sentence."""
    if _NO_ARRAY in observed.ended:
        return observed.ended[_NO_ARRAY].text
    if observed.status != OK:
        return f"ended, with {observed.status} as the worst status of its elements"
    return "completed with all of its elements"


def after_slurm_forgot(observed: Observation) -> Observation:
    """Return the observation that Slurm has forgotten the job, as some minutes after its end: it is over, with unknown status."""
    ended = {**observed.ended, _NO_ARRAY: JobEnding(status=FAILED, text=_TEXT_IF_FORGOTTEN)}
    return Observation(reported_state=observed.reported_state, ended=ended, is_over=True)


def has_run(job: JobRecord) -> bool:
    """Whether the job was started, so that it has output."""
    return bool(job.nodes) and job.reason != _LAUNCH_FAILURE


def end_of(job: JobRecord) -> JobEnding:
    """Return how a job ended: the exit status of its script, or a status for the reason why there is none."""
    state = job.state
    if job.reason == _LAUNCH_FAILURE:
        text = "could not be started: the folder or the file of its output cannot be written, or the node is broken"
        return JobEnding(status=FAILED, text=text)
    status = OK
    if state in _WITH_STATUS_OF_SCRIPT:
        code, _, number = job.exit_code.partition(":")  # "3:0"; behind the colon the signal that ended the script
        signum = int(number or 0)
        status = of_signal(signum) if 0 < signum <= _LAST_SIGNAL else int(code)
    if status == OK:  # the script has none, or has caught the signal by which Slurm ended it
        status = _STATUS_OF_END.get(state, FAILED)
    text = _WORDS_OF_END.get(state, f"failed with status {status}")
    took = "" if job.run_time == "00:00:00" else f" after {job.run_time}"
    return JobEnding(status=status, text=f"{text}{took}")


def _state_in_words(jobs: Sequence[JobRecord]) -> str:
    """Return the state of a job, of an array that of an element which runs if there is one; "" if there is nothing to say.

    It follows the job's id in a sentence.
    """
    running = [job for job in jobs if job.state == "RUNNING"]
    job = running[0] if running else jobs[0]
    is_array = bool(job.array_id)
    if is_array and running:
        return "is running"
    again = f", restart {job.restarts}" if job.restarts else ""
    if job.state == "RUNNING":
        return f"is running on {job.nodes}{again}"
    if job.state == "PENDING":
        is_considered = job.reason != "None"  # by the scheduler
        return f"is pending ({job.reason}){again}" if is_considered else ""
    if job.state in ("COMPLETING", "CONFIGURING", *_REQUEUEABLE):  # short ones
        return ""
    return f"is {job.state.lower().replace('_', ' ')}{again}"
