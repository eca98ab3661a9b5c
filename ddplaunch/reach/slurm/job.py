"""The job of Slurm that we run in: its id, what Slurm does with it and why, how it is requeued, and how far it had come.

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

The output of `scontrol show` once node2 of node[1-3] was lost and the tasks had got SIGTERM (Slurm 22.05, `--no-requeue`):

| what happened | the job's NodeList | State of node2 |
| --- | --- | --- |
| its slurmd was killed, SlurmdTimeout before | node[1,3] | DOWN+NOT_RESPONDING, in older versions DOWN* |
| `scontrol update state=down` | node[1,3] | DOWN; IDLE half a second later, for its slurmd lived (ReturnToService=2) |
| `scontrol update state=fail` | node[1-3]; it runs on | MIXED+FAIL |

Nodes on which nothing of the job is left disappear from the list as well.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from enum import Enum
from hashlib import sha256
from typing import TypeVar

import msgspec
from msgspec import Struct

from ddplaunch.plan.cluster import hostlist
from ddplaunch.reach.slurm.scontrol import (
    JobRecord,
    ScontrolError,
    ScontrolMissing,
    Unreachable,
    parse_nodes,
    scontrol,
    show_jobs,
)
from ddplaunch.record.folders import make_all
from ddplaunch.spec.outcome import OUT_OF_WALLTIME, PREEMPTED, ClusterEnding, Intent
from ddplaunch.system import exitcodes
from ddplaunch.system.errors import LaunchError
from ddplaunch.system.process.files import open_regular, replaced

ANSWER_TIMEOUT = 20.0  # seconds for one reply; slurmctld's own MessageTimeout is 10
CONTROLLER_TIMEOUT = 5.0  # seconds for a reply of slurmctld while the other nodes of the job wait
RETRY_AFTER = 3.0  # seconds from one attempt without a reply to the next

_UNANSWERED = "Slurm's answer was not waited for"
_Reply = TypeVar("_Reply")


class JobStatus(Enum):
    """What Slurm is doing with the job."""

    RUNNING = "running"
    REQUEUED = "requeued"  # by Slurm itself: preemption, a lost node, `scontrol requeue`
    PREEMPTED = "preempted"
    OUT_OF_WALLTIME = "out of walltime"
    NODE_LOST = "node lost"
    CANCELLED = "cancelled"  # or its script has ended, which looks the same
    ENDED = "ended"  # for any other reason


# how the report of such an end begins
_LABELS = {
    JobStatus.REQUEUED: "requeued by Slurm",
    JobStatus.PREEMPTED: PREEMPTED,
    JobStatus.OUT_OF_WALLTIME: OUT_OF_WALLTIME,
    JobStatus.CANCELLED: "cancelled",
}

# --- its name and its state


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


def query_job(env: Mapping[str, str], timeout: float = ANSWER_TIMEOUT) -> JobRecord:
    """Query slurmctld about this job; ScontrolError if there is no reply."""
    for job in show_jobs(env, job_id(env), timeout):
        return job
    raise ScontrolError("cannot parse the output of scontrol")


def status_of(job: JobRecord, restarts: int) -> JobStatus:
    """Say what Slurm is doing with a job that had been restarted so many times when its processes were started.

    The table at the top of this module has the records that were seen. A preempted job may have some time until it is ended, its
    grace.
    """
    states = job.states
    if job.restarts > restarts or states & {"PENDING", "REQUEUED", "REQUEUE_HOLD"}:
        return JobStatus.REQUEUED
    if job.reason == "TimeLimit" or "TIMEOUT" in states:
        return JobStatus.OUT_OF_WALLTIME
    if job.reason == "NodeDown" or "NODE_FAIL" in states:
        return JobStatus.NODE_LOST
    is_ending = not states <= {"RUNNING", "SUSPENDED", "CONFIGURING", "SIGNALING", "STAGE_OUT"}
    # where Slurm itself ends a preempted job, both times are equal; they are texts, such as 2024-05-01T10:00:00
    was_cancelled_in_its_grace = is_ending and job.preempted_at < job.ends_at
    if "PREEMPTED" in states or (job.preempted_at and not was_cancelled_in_its_grace):
        return JobStatus.PREEMPTED
    script_ended_by_signal = job.reason == "JobLaunchFailure" or job.reason.startswith("RaisedSignal")
    # a signal for the workers has ended the script alone: the job was not cancelled
    if not is_ending or script_ended_by_signal:
        return JobStatus.RUNNING
    may_be_cancelled = job.reason == "None" or "CANCELLED" in states  # for `scancel` Slurm gives no reason
    return JobStatus.CANCELLED if may_be_cancelled else JobStatus.ENDED


# --- how long it waited, and why it ends


class SlurmQuestions(Struct, frozen=True):
    """Asks Slurm about this job, while all its nodes wait for the answer."""

    env: Mapping[str, str]
    timeout: float = CONTROLLER_TIMEOUT  # seconds for each query

    def time_in_queue(self) -> ClusterEnding:
        """Return how long a batch job has waited in the queue; a shell of salloc may start many jobs, each long after that."""
        with suppress(ScontrolError):
            if (job := query_job(self.env, self.timeout)).is_batch:
                return ClusterEnding(queued=job.queued)
        return ClusterEnding()

    def why_ending(self) -> ClusterEnding:
        """Return why Slurm is ending this job; empty if Slurm is not, or did not say."""
        try:
            job = query_job(self.env, self.timeout)
        except ScontrolError:
            # newer versions set the variable when the job starts: the time limit may have been changed since
            ends_at = self.env.get("SLURM_JOB_END_TIME", "")
            is_over = ends_at.isdecimal() and time.time() >= int(ends_at)
            return ClusterEnding(OUT_OF_WALLTIME) if is_over else ClusterEnding()
        found = status_of(job, restarts(self.env))
        if found is not JobStatus.NODE_LOST:
            return ClusterEnding(_LABELS.get(found, ""))
        lost = _describe_lost(self.env, job.nodes, self.timeout)
        return ClusterEnding(lost, outcome=(exitcodes.NODE_LOST, "node_lost"))


def _describe_lost(env: Mapping[str, str], remaining: str, timeout: float) -> str:
    """Return which nodes of the job were lost; `remaining` is the host list of the nodes that the job still has.

    Nodes on which nothing of the job is left are missing there as well. So where several are missing, those that are DOWN count.
    """
    given = env.get("SLURM_JOB_NODELIST", "")
    lost: list[str] = []
    with suppress(LaunchError):  # a host list of another form than we know
        still_there = hostlist.expand(remaining, "NodeList") if remaining else ()
        lost = [node for node in hostlist.expand(given, "SLURM_JOB_NODELIST") if node not in still_there]
    if len(lost) != 1 and given:
        candidates, lost = hostlist.compress(lost) if lost else given, []
        with suppress(ScontrolError):
            states = parse_nodes(scontrol(env, ("show", "nodes", "-o", candidates), timeout))
            lost = [node for node in states if "DOWN" in states[node]]
    if not lost:
        return "a node of the job was lost"
    return f"{hostlist.compress(lost)} {'was' if len(lost) == 1 else 'were'} lost (down in Slurm)"


# --- back into the queue


def why_not_requeued(job: JobRecord, found: JobStatus) -> str | None:
    """Return why ddplaunch does not requeue this job, to follow its name in a sentence; None if ddplaunch may requeue it."""
    match found:
        case JobStatus.REQUEUED:
            return "is requeued by Slurm itself"
        case JobStatus.CANCELLED:
            return "was cancelled, and so is not requeued"
        case JobStatus.ENDED:
            return f"has ended ({job.reason}), and is not requeued"
    if not job.is_batch:
        return "cannot be requeued: only jobs of sbatch can"
    if not job.may_requeue:
        return "cannot be requeued: submit it with `sbatch --requeue`"
    return None


def manual_requeue(env: Mapping[str, str], signum: int) -> str:
    """Return the line of a batch script that requeues the job after this signal."""
    own = "${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}" if "_" in job_id(env) else "$SLURM_JOB_ID"
    return f"[ $? -ne {exitcodes.of_signal(signum)} ] || scontrol requeue {own}"


class SlurmRequeue(Struct, frozen=True):
    """Requeues this job `max_requeues` times at most; Slurm's own requeues count.

    While slurmctld cannot be contacted, it is asked again, as long as the allocation lasts: a job that has saved, and is not
    requeued then, would end as completed.
    """

    env: Mapping[str, str]
    max_requeues: int
    retry_after: float = RETRY_AFTER

    @property
    def job(self) -> str:
        """The job, by its id in its cluster."""
        return f"{self.env.get('SLURM_CLUSTER_NAME', '')}/{job_id(self.env)}"

    @property
    def times_restarted(self) -> int:
        """How often the job has been started again so far."""
        return restarts(self.env)

    def decide(self, signum: int) -> Intent:
        """Decide whether the job is requeued after the notice `signum`."""
        job, notice = job_id(self.env), signal.Signals(signum).name
        reason = self._reason_against(job, notice)
        number = restarts(self.env) + 1
        text = reason or f"job {job} is requeued after {notice} (requeue {number} of at most {self.max_requeues})"
        return Intent(job=job, requeues=reason is None, text=text)

    def _reason_against(self, job: str, notice: str) -> str | None:
        """Return why the job is not requeued after this notice (a signal's name), in a sentence; None if it can be requeued.

        `job` is its id, "" outside of Slurm.
        """
        if not job:
            return f"the job is not requeued after {notice}: not inside a Slurm job (SLURM_JOB_ID is not set)"
        restarted = restarts(self.env)  # how often so far
        try:
            record = self._retry(lambda: query_job(self.env))
        except ScontrolMissing as error:
            line = manual_requeue(self.env, signal.Signals[notice])
            return (
                f"job {job} should be requeued after {notice}, but {error}; "
                f"put this after the command in the batch script: {line}"
            )
        except ScontrolError as error:
            return f"job {job} cannot be requeued after {notice}: {error}"
        if why := why_not_requeued(record, status_of(record, restarted)):
            return f"job {job} {why}"
        if restarted >= self.max_requeues:
            limit = f"(--max-requeues {self.max_requeues})"
            return f"job {job} has been requeued {restarted} times, and is not requeued after {notice} {limit}"
        return None

    def submit(self) -> str | None:
        """Requeue the job, which ends all its processes; return the reason in a sentence if that fails, else None."""
        job = job_id(self.env)
        try:
            self._retry(lambda: scontrol(self.env, ("requeue", job), ANSWER_TIMEOUT))
        except ScontrolError as error:
            # Slurm ends all processes of a job that it requeues, and may have ended scontrol before its reply
            with suppress(ScontrolError):
                if query_job(self.env).restarts > restarts(self.env):
                    return None
            return f"job {job} could not be requeued: {error}"
        return None

    def undecided(self, signum: int) -> Intent:
        """Return what `decide` comes to where Slurm is not waited for."""
        job, notice = job_id(self.env), signal.Signals(signum).name
        return Intent(job=job, requeues=False, text=f"job {job} is not requeued after {notice}: {_UNANSWERED}")

    @property
    def unsent(self) -> str | None:
        """What `submit` returns where Slurm is not waited for."""
        return f"job {job_id(self.env)} may not be requeued: {_UNANSWERED}"

    def describe_wait(self) -> str:
        """Ask once more, and return what to tell the user while there is no reply: a sentence with what scontrol says then."""
        said = ""
        try:
            query_job(self.env)
        except ScontrolError as error:
            said = f" ({error})"
        return f"Slurm has not replied yet{said}: ddplaunch goes on asking for the requeue of job {job_id(self.env)}"

    def _retry(self, ask: Callable[[], _Reply]) -> _Reply:
        """Ask slurmctld until it replies: it may be restarting, or have moved to another host."""
        while True:
            try:
                return ask()
            except Unreachable:
                time.sleep(self.retry_after)


REQUEUED_KEPT = 30 * 86400.0  # seconds, after which the file of a job is removed
_LARGEST_REQUEUED = 1 << 10  # bytes


class Requeued(Struct, frozen=True, kw_only=True):
    """What a job that was requeued had reached, over all its starts."""

    start: int  # of the job, which has written this, counted from 0
    best_step: int
    without_new_step: int  # generations in a row

    def count_at(self, start: int) -> int:
        """Return how many generations in a row had made no new step before this start of the job.

        What an earlier start has left was not in a row with this one: Slurm has requeued the job itself in between.
        """
        return self.without_new_step if self.start == start - 1 else 0


def requeued_file(state_folder: str, job: str, program: str) -> str:
    """Return the path of the file for a program of a job: a batch script may have several."""
    name = sha256(f"{job}\0{program}".encode(errors="surrogateescape")).hexdigest()[:16]
    return f"{state_folder}/ddplaunch/requeued/{name}.json"


def read_requeued(path: str) -> Requeued | None:
    """Return what was kept; None if there is nothing that can be read."""
    with suppress(OSError, msgspec.DecodeError), open_regular(path) as file:
        if os.fstat(file.fileno()).st_uid == os.getuid():
            return msgspec.json.decode(file.read(_LARGEST_REQUEUED), type=Requeued)
    return None


def keep_requeued(path: str, requeued: Requeued) -> None:
    """Keep this for the next start, if that is possible, and remove what is old. Nothing is done in a folder of another user."""
    above, own = os.path.split(path)
    with suppress(OSError):
        make_all(above)
        folder = os.open(above, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if os.fstat(folder).st_uid != os.getuid():
                return
            with replaced(path, 0o600) as file:
                file.write(msgspec.json.encode(requeued))
            for name in os.listdir(folder):
                with suppress(OSError):  # it is gone, or a folder
                    is_old = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime < time.time() - REQUEUED_KEPT
                    if is_old and name != own:
                        os.unlink(name, dir_fd=folder)
        finally:
            os.close(folder)
