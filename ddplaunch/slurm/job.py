"""What Slurm does with the job that we are part of, as `scontrol` describes it. `parse` and `status_of` are pure.

The output of `scontrol show job` when the tasks had got SIGTERM (Slurm 22.05; "COMPLETING" hides the final state):

| what came | JobState | Reason | Restarts | and |
| --- | --- | --- | --- | --- |
| `--signal=USR1@60`, `scancel --signal` | RUNNING | None | as before | |
| `scancel` | COMPLETING | None | as before | EndTime: now; ExitCode 0:15 or still 0:0 |
| the time limit | COMPLETING | TimeLimit | as before | EndTime: now |
| preemption by requeue | COMPLETING | None | one more | no PreemptTime any more |
| preemption with GraceTime | RUNNING | None | as before | PreemptTime: now, until the grace is over; then as above |
| preemption by cancel, at its end | COMPLETING | None | as before | PreemptTime = EndTime |
| `scancel` in the grace | COMPLETING | None | as before | PreemptTime before EndTime |
| `scontrol requeue`, a lost node | COMPLETING | None | one more | |
| a lost node, `--no-requeue` | COMPLETING | NodeDown | as before | |
| the script ended by a signal of its own | COMPLETING | JobLaunchFailure | as before | newer versions: RaisedSignal:... |
| the end of the script | COMPLETING | None | as before | as after `scancel` |

`scontrol requeue` takes a job that is COMPLETING too, even one that was cancelled; it refuses jobs of salloc and those with
`--no-requeue`. Of an array it takes ID_INDEX, and all elements where it is given the id that one element shares with the array.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum

from msgspec import Struct

from ddplaunch.slurm.scontrol import ScontrolError, parse_records, scontrol

ANSWER_TIMEOUT = 20.0  # seconds for one reply; slurmctld's own MessageTimeout is 10

_NEVER = ("None", "Unknown", "N/A", "(null)", "")


class JobStatus(Enum):
    """What Slurm is doing with the job."""

    RUNNING = "running"
    REQUEUED = "requeued"  # by Slurm itself: preemption, a lost node, `scontrol requeue`
    PREEMPTED = "preempted"
    OUT_OF_WALLTIME = "out of walltime"
    NODE_LOST = "node lost"
    CANCELLED = "cancelled"  # or its script has ended, which looks the same
    ENDED = "ended"  # for any other reason


class JobRecord(Struct, frozen=True, kw_only=True):
    """A job as slurmctld describes it."""

    states: tuple[str, ...]  # "RUNNING"; newer versions may give several
    reason: str
    restarts: int
    preempted_at: str  # "2026-11-21T19:40:51", "" for not at all
    ends_at: str
    is_batch: bool
    may_requeue: bool
    nodes: str = ""  # a host list


# --- pure


def job_id(env: Mapping[str, str]) -> str:
    """Return the id that means this job alone to `scontrol`: an array element's own, a het job's first one."""
    array, index = env.get("SLURM_ARRAY_JOB_ID"), env.get("SLURM_ARRAY_TASK_ID")
    if array and index:
        return f"{array}_{index}"
    return env.get("SLURM_HET_JOB_ID") or env.get("SLURM_JOB_ID_HET_GROUP_0") or env.get("SLURM_JOB_ID", "")


def restarts(env: Mapping[str, str]) -> int:
    """Return how often Slurm has restarted this job."""
    text = env.get("SLURM_RESTART_COUNT", "")
    return int(text) if text.isdecimal() else 0


def parse(text: str) -> JobRecord | None:
    """Parse the output of `scontrol show job -o` for one job; None if it is something else."""
    fields = next(iter(parse_records(text)), {})
    if "JobState" not in fields:
        return None
    count = fields.get("Restarts", "0")
    return JobRecord(
        states=tuple(re.split(r"[,+]", fields["JobState"])),
        reason=fields.get("Reason", "None"),
        restarts=int(count) if count.isdecimal() else 0,
        preempted_at=_time(fields.get("PreemptTime", "")),
        ends_at=_time(fields.get("EndTime", "")),
        is_batch=fields.get("BatchFlag", "1") != "0",
        may_requeue=fields.get("Requeue", "1") != "0",
        nodes=fields.get("NodeList", "").replace("(null)", ""),
    )


def _time(text: str) -> str:
    return "" if text in _NEVER else text


def status_of(job: JobRecord, restarts: int) -> JobStatus:
    """Say what Slurm is doing with a job that had been restarted so many times when its processes were started."""
    states = set(job.states)
    if job.restarts > restarts or states & {"PENDING", "REQUEUED", "REQUEUE_HOLD"}:
        return JobStatus.REQUEUED
    if job.reason == "TimeLimit" or "TIMEOUT" in states:
        return JobStatus.OUT_OF_WALLTIME
    if job.reason == "NodeDown" or "NODE_FAIL" in states:
        return JobStatus.NODE_LOST
    is_ending = not states <= {"RUNNING", "SUSPENDED", "CONFIGURING", "SIGNALING", "STAGE_OUT"}
    if "PREEMPTED" in states or (job.preempted_at and not (is_ending and job.preempted_at < job.ends_at)):
        return JobStatus.PREEMPTED
    # a signal for the workers has ended the script: the job was not cancelled
    if not is_ending or job.reason == "JobLaunchFailure" or job.reason.startswith("RaisedSignal"):
        return JobStatus.RUNNING
    return JobStatus.CANCELLED if job.reason == "None" or "CANCELLED" in states else JobStatus.ENDED


# --- scontrol


def query_job(env: Mapping[str, str], timeout: float = ANSWER_TIMEOUT) -> JobRecord:
    """Query slurmctld about this job.

    Raises:
        ScontrolError: there is no reply.
    """
    job = parse(scontrol(env, ("show", "job", "-o", job_id(env)), timeout))
    if job is None:
        raise ScontrolError("cannot parse the output of scontrol")
    return job
