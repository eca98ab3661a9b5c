"""Requeues the job after a notice, or says why not. `refusal` and `manual_requeue` are pure."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

from msgspec import Struct

from ddplaunch import exitcodes
from ddplaunch.slurm.job import ANSWER_TIMEOUT, JobRecord, JobStatus, job_id, query_job, restarts, status_of
from ddplaunch.slurm.scontrol import ScontrolError, ScontrolMissing, Unreachable, scontrol
from ddplaunch.supervise.outcome import Intent

_Reply = TypeVar("_Reply")


RETRY_AFTER = 0.5  # seconds from one attempt without a reply to the next

_UNANSWERED = "Slurm's answer was not waited for"


def refusal(job: JobRecord, found: JobStatus) -> str | None:
    """Say why a job is not requeued, as follows on its name in a sentence; None if it is."""
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
    """Requeues this job `max_requeues` times at most; Slurm's own requeues count."""

    env: Mapping[str, str]
    max_requeues: int
    retry_for: float  # seconds for which slurmctld is asked again if it does not reply: the grace period

    def decide(self, signum: int) -> Intent:
        """Decide whether the job is requeued after the notice `signum`."""
        job, notice = job_id(self.env), signal.Signals(signum).name
        reason = self._reason_against(job, notice)
        number = restarts(self.env) + 1
        text = reason or f"job {job} is requeued after {notice} (requeue {number} of at most {self.max_requeues})"
        return Intent(job=job, requeues=reason is None, text=text)

    def _reason_against(self, job: str, notice: str) -> str | None:
        if not job:
            return f"the job is not requeued after {notice}: not inside a Slurm job (SLURM_JOB_ID is not set)"
        before = restarts(self.env)
        try:
            known = self._retry(lambda: query_job(self.env))
        except ScontrolMissing as error:
            line = manual_requeue(self.env, signal.Signals[notice])
            return (
                f"job {job} should be requeued after {notice}, but {error}; "
                f"put this after the command in the batch script: {line}"
            )
        except ScontrolError as error:
            return f"job {job} cannot be requeued after {notice}: {error}"
        if why := refusal(known, status_of(known, before)):
            return f"job {job} {why}"
        if before >= self.max_requeues:
            limit = f"(--max-requeues {self.max_requeues})"
            return f"job {job} has been requeued {before} times, and is not requeued after {notice} {limit}"
        return None

    def submit(self) -> str | None:
        """Requeue the job, which ends all its processes; give the reason in a sentence if that fails."""
        job = job_id(self.env)
        try:
            self._retry(lambda: scontrol(self.env, ("requeue", job), ANSWER_TIMEOUT))
        except ScontrolError as error:
            # Slurm ends all processes of a job that it requeues, and may have ended scontrol before its reply
            if query_restarts(self.env) > restarts(self.env):
                return None
            return f"job {job} could not be requeued: {error}"
        return None

    def undecided(self, signum: int) -> Intent:
        """Return what `decide` comes to where Slurm is not waited for."""
        job, notice = job_id(self.env), signal.Signals(signum).name
        return Intent(job=job, requeues=False, text=f"job {job} is not requeued after {notice}: {_UNANSWERED}")

    @property
    def unsent(self) -> str | None:
        """What `submit` gives then."""
        return f"job {job_id(self.env)} may not be requeued: {_UNANSWERED}"

    def _retry(self, ask: Callable[[], _Reply]) -> _Reply:
        """Ask slurmctld, which may be restarted just now, until it replies, for `retry_for` seconds.

        Raises:
            ScontrolError: it does not reply, or refuses.
        """
        until = time.monotonic() + self.retry_for
        while True:
            try:
                return ask()
            except Unreachable:
                if time.monotonic() + RETRY_AFTER >= until:
                    raise
            time.sleep(RETRY_AFTER)


def query_restarts(env: Mapping[str, str]) -> int:
    """Query how often Slurm has restarted this job; 0 if there is no reply."""
    try:
        return query_job(env).restarts
    except ScontrolError:
        return 0
