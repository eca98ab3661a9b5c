"""What Slurm does with the job that we are part of, as `scontrol` describes it. `parse` and `condition` are pure.

What `scontrol show job` said when the tasks had got SIGTERM (Slurm 22.05; "COMPLETING" hides what the job will have been):

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

from ddplaunch.record import record
from ddplaunch.slurm import scontrol as slurmctld
from ddplaunch.slurm.scontrol import Unknown, scontrol

PATIENCE = 20.0  # seconds for one answer; slurmctld's own MessageTimeout is 10

_NEVER = ("None", "Unknown", "N/A", "(null)", "")


class Condition(Enum):
    """What Slurm is doing with the job."""

    RUNNING = "running"
    REQUEUED = "requeued"  # Slurm itself sends it back: preemption, a lost node, `scontrol requeue`
    PREEMPTED = "preempted"
    OUT_OF_WALLTIME = "out of walltime"
    NODE_LOST = "node lost"
    CANCELLED = "cancelled"  # or its script has ended, which looks the same
    OVER = "over"  # for a reason that has no place here


@record(kw_only=True)
class JobRecord:
    """A job as the controller describes it."""

    states: tuple[str, ...]  # "RUNNING"; newer versions may give several
    reason: str
    restarts: int
    preempted_at: str  # "2026-11-21T19:40:51", "" for not at all
    ends_at: str
    is_batch: bool
    may_requeue: bool
    nodes: str = ""  # a host list of those that it has, or has yet to leave


# --- pure


def job_id(env: Mapping[str, str]) -> str:
    """Give the id by which `scontrol` knows this job alone: an array element's own, a het job's first one."""
    array, index = env.get("SLURM_ARRAY_JOB_ID"), env.get("SLURM_ARRAY_TASK_ID")
    if array and index:
        return f"{array}_{index}"
    return env.get("SLURM_HET_JOB_ID") or env.get("SLURM_JOB_ID_HET_GROUP_0") or env.get("SLURM_JOB_ID", "")


def restarts(env: Mapping[str, str]) -> int:
    """Give how often Slurm has started this job again."""
    text = env.get("SLURM_RESTART_COUNT", "")
    return int(text) if text.isdecimal() else 0


def parse(text: str) -> JobRecord | None:
    """Read what `scontrol show job -o` says of one job; None if it is something else."""
    fields = next(iter(slurmctld.parse(text)), {})
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


def condition(job: JobRecord, restarts: int) -> Condition:
    """Say what Slurm is doing with a job whose processes were told of `restarts` before."""
    states = set(job.states)
    if job.restarts > restarts or states & {"PENDING", "REQUEUED", "REQUEUE_HOLD"}:
        return Condition.REQUEUED
    if job.reason == "TimeLimit" or "TIMEOUT" in states:
        return Condition.OUT_OF_WALLTIME
    if job.reason == "NodeDown" or "NODE_FAIL" in states:
        return Condition.NODE_LOST
    is_ending = not states <= {"RUNNING", "SUSPENDED", "CONFIGURING", "SIGNALING", "STAGE_OUT"}
    if "PREEMPTED" in states or (job.preempted_at and not (is_ending and job.preempted_at < job.ends_at)):
        return Condition.PREEMPTED
    # the signal that was meant for the workers has ended the script: nobody has cancelled the job
    if not is_ending or job.reason == "JobLaunchFailure" or job.reason.startswith("RaisedSignal"):
        return Condition.RUNNING
    return Condition.CANCELLED if job.reason == "None" or "CANCELLED" in states else Condition.OVER


# --- the controller


def ask(env: Mapping[str, str], patience: float = PATIENCE) -> JobRecord:
    """Ask about this job.

    Raises:
        Unknown: there is no answer.
    """
    job = parse(scontrol(env, ("show", "job", "-o", job_id(env)), patience))
    if job is None:
        raise Unknown("scontrol's answer cannot be read")
    return job
