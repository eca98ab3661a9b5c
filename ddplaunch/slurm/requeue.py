"""Sends the job back into the queue after a notice, and says why not. `refusal` and `by_hand` are pure."""

from __future__ import annotations

import signal
from collections.abc import Mapping

from ddplaunch import exitcodes
from ddplaunch.record import record
from ddplaunch.slurm.job import PATIENCE, Condition, JobRecord, ask, condition, job_id, restarts
from ddplaunch.slurm.scontrol import Missing, Unknown, scontrol
from ddplaunch.supervise.outcome import Intent


def refusal(job: JobRecord, found: Condition) -> str | None:
    """Say why a job is not to be sent back after all, as what follows on its name in a sentence; None if it is."""
    match found:
        case Condition.REQUEUED:
            return "is sent back into the queue by Slurm itself"
        case Condition.CANCELLED:
            return "was cancelled, and so does not go back into the queue"
        case Condition.OVER:
            return f"has ended ({job.reason}), and does not go back into the queue"
    if not job.is_batch:
        return "cannot go back into the queue: only jobs of sbatch can"
    if not job.may_requeue:
        return "cannot go back into the queue: submit it with `sbatch --requeue`"
    return None


def by_hand(env: Mapping[str, str], signum: int) -> str:
    """Give the line of a batch script that does what we could not do."""
    own = "${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}" if "_" in job_id(env) else "$SLURM_JOB_ID"
    return f"[ $? -ne {exitcodes.of_signal(signum)} ] || scontrol requeue {own}"


@record
class SlurmRequeue:
    """The way of this job into the queue, which it goes `most` times at most, Slurm's own requeues counted."""

    env: Mapping[str, str]
    most: int

    def decide(self, signum: int) -> Intent:
        """Find out whether the job is to go back after the notice `signum`."""
        job, before = job_id(self.env), restarts(self.env)
        notice = signal.Signals(signum).name
        if not job:
            return _stays(job, f"the workers left after {notice}, and nobody starts them again: this is no Slurm job")
        try:
            known = ask(self.env)
        except Missing as error:
            return _stays(
                job,
                f"job {job} should go back into the queue after {notice}, but {error}; "
                f"put this after the command in the batch script: {by_hand(self.env, signum)}",
            )
        except Unknown as error:
            return _stays(job, f"job {job} cannot go back into the queue after {notice}: {error}")
        if why := refusal(known, condition(known, before)):
            return _stays(job, f"job {job} {why}")
        if before >= self.most:
            return _stays(
                job,
                f"job {job} has been started again {before} times, and does not go back into the queue "
                f"after {notice} (--max-requeues {self.most})",
            )
        words = f"job {job} goes back into the queue after {notice} (requeue {before + 1} of at most {self.most})"
        return Intent(job=job, goes=True, words=words)

    def submit(self) -> str | None:
        """Send the job back, which ends all that runs of it; give the reason in a sentence if that cannot be done."""
        job = job_id(self.env)
        try:
            scontrol(self.env, ("requeue", job), PATIENCE)
        except Unknown as error:
            # Slurm ends all processes of a job that it sends back, and may have ended scontrol before its answer
            if ask_restarts(self.env) > restarts(self.env):
                return None
            return f"job {job} could not be sent back into the queue: {error}"
        return None


def _stays(job: str, words: str) -> Intent:
    return Intent(job=job, goes=False, words=words)


def ask_restarts(env: Mapping[str, str]) -> int:
    """Ask how often Slurm starts this job again; 0 if there is no answer."""
    try:
        return ask(env).restarts
    except Unknown:
        return 0
