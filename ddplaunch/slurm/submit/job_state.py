"""The state of a job that was submitted, from the records of scontrol: as text, and its exit status at the end. Pure.

Time comes with each observation, as monotonic seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct

from ddplaunch.exitcodes import NODE_LOST, OK, TIMEOUT, of_signal
from ddplaunch.slurm.scontrol import JobRecord

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
        if _is_over(job, at - observed.may_return.get(name, at)):
            if name not in ended:
                ended[name] = end_of(job)
                if name and ended[name].status:
                    lines.append(f"{name} {ended[name].text}")
            continue
        if job.state in _REQUEUEABLE:
            may_return[name] = observed.may_return.get(name, at)
        else:
            ended.pop(name, None)  # it was requeued
        alive.append(job)
    line = _state(alive) if alive else ""
    if line and line != observed.line:
        lines.append(line)
    if ended and not alive:
        lines.append(_summary(ended))
    return Observation(
        line=line or observed.line, ended=ended, may_return=may_return, over=bool(ended) and not alive
    ), tuple(lines)


def forgotten(observed: Observation) -> Observation:
    """Take that slurmctld knows the job no more: it forgets jobs some minutes after their end."""
    return Observation(
        line=observed.line, ended={**observed.ended, "": JobEnding(status=FAILED, text=_FORGOTTEN)}, over=True
    )


def has_run(job: JobRecord) -> bool:
    """Whether the job was started, so that it has output."""
    return bool(job.nodes) and job.reason != _LAUNCH_FAILURE


def end_of(job: JobRecord) -> JobEnding:
    """Say how a job ended: with the exit status of its script, or one for the reason why it has none."""
    state = job.state
    if job.reason == _LAUNCH_FAILURE:
        text = "could not be started: the folder or the file of its output cannot be written, or the node is broken"
        return JobEnding(status=FAILED, text=text)
    status = (_exit_code(job) if state in _WITH_A_STATUS else 0) or _ENDS.get(state, FAILED)
    text = _WORDS.get(state, f"failed with status {status}")
    took = "" if job.run_time == "00:00:00" else f" after {job.run_time}"
    return JobEnding(status=status, text=f"{text}{took}")


def _exit_code(job: JobRecord) -> int:
    """The exit status of the script, as a shell shows it."""
    code, _, number = job.exit_code.partition(":")
    return of_signal(int(number)) if 0 < int(number or 0) <= _LAST_SIGNAL else int(code)


def _is_over(job: JobRecord, since: float) -> bool:
    if job.state in _REQUEUEABLE and job.may_requeue:
        return since >= RETURN_TIME
    return job.state in _ENDS


def _state(jobs: Sequence[JobRecord]) -> str:
    """The state of a job, as it follows its id in a sentence; "" if it is not reported."""
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


def _summary(ended: Mapping[str, JobEnding]) -> str:
    if "" in ended:
        return ended[""].text
    worst = max(end.status for end in ended.values())
    return f"ended, with {worst} as the worst status of its elements" if worst else "completed with all of its elements"
