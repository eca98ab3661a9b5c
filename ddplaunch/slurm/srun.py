"""Starts srun for a step of agents; holds what the watcher needs to know about the step. Decides nothing."""

from __future__ import annotations

import os
from collections.abc import Mapping

from ddplaunch.process.start import Child, StartError, Stdio, handled_signals, start
from ddplaunch.record import record
from ddplaunch.slurm.requeue import SlurmRequeue


@record(kw_only=True)
class StepJob:
    """All that the watcher needs to know."""

    argv: tuple[str, ...]  # srun and the command of each task
    env: Mapping[str, str]  # of the step, with the job's token
    host: str  # of node 0
    ports: tuple[int, ...]  # where the coordinator listens
    token: str
    name: str  # of the job, as the agents know it
    signals: frozenset[int]
    stops: frozenset[int]
    sent_again: frozenset[int]  # that may come more than once without escalating
    heartbeat_timeout: float  # seconds without a message after which the coordinator is lost
    grace_period: float  # seconds
    open_files: tuple[int, int]  # RLIMIT_NOFILE (soft, hard) of srun
    notices: frozenset[int]
    requeue: SlurmRequeue
    is_quiet: bool = False


def start_step(job: StepJob) -> Child | StartError:
    """Start srun, which starts the agents."""
    devnull = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)  # keyboard input is for the shell
    try:
        return start(job.argv, job.env, Stdio(devnull, 1, 2), handled=handled_signals(), open_files=job.open_files)
    except StartError as error:
        return error
    finally:
        os.close(devnull)
