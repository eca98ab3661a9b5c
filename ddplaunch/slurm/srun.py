"""How a step of agents is started: srun first, and what is needed to speak to them while it works. Decides nothing."""

from __future__ import annotations

import os
from collections.abc import Mapping

from ddplaunch.process.start import Child, StartError, Stdio, handled_signals, start
from ddplaunch.record import record
from ddplaunch.slurm.requeue import SlurmRequeue


@record(kw_only=True)
class StepJob:
    """All that the loop needs to know."""

    argv: tuple[str, ...]  # srun and what each task runs
    env: Mapping[str, str]  # of the step, with the job's token
    host: str  # of node 0
    ports: tuple[int, ...]  # where the coordinator listens
    token: str
    name: str  # what the agents know the job by besides
    signals: frozenset[int]
    stops: frozenset[int]
    sent_again: frozenset[int]  # of which a second one means no hurry
    silence: float  # seconds after which a silent coordinator counts as lost
    grace_period: float  # seconds
    open_files: tuple[int, int]  # RLIMIT_NOFILE (soft, hard) of srun
    notices: frozenset[int]
    requeue: SlurmRequeue
    is_quiet: bool = False


def start_step(job: StepJob) -> Child | StartError:
    """Start srun, which starts the agents."""
    nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)  # the keys stay with the shell
    try:
        return start(job.argv, job.env, Stdio(nothing, 1, 2), handled=handled_signals(), open_files=job.open_files)
    except StartError as error:
        return error
    finally:
        os.close(nothing)
