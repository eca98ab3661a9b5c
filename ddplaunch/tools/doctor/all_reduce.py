"""A real job of two workers on this machine: they meet, use a GPU if there is one, and time all_reduce."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping

import msgspec
from msgspec import Struct

from ddplaunch.system.exitcodes import TIMEOUT
from ddplaunch.system.own_files import worker_program
from ddplaunch.system.process.command import Ended, run
from ddplaunch.system.words import duration, size
from ddplaunch.tools.doctor import Check, Finding, Subject, Verdict, broken, slow

_JOB_TIMEOUT = 7.5  # seconds for the job: with the start of ddplaunch and the end of the workers it stays below 10
_DEADLINE = 9.0  # seconds for the check
_ENOUGH = 3.0  # seconds for a group of two that has met: an all_reduce that takes longer hangs
# of two workers on one machine: loopback gives GB/s, PCI and NVLink more
_SLOW_GLOO, _SLOW_NCCL = 50 << 20, 1 << 30  # bytes per second
_SLOW_LATENCY = 0.02  # seconds for an all_reduce of one number: a busy machine or a bad kernel setting
# a job of its own: none of another launcher's ranks, and none of the options that are set for the user's jobs
_BEGINNINGS_OF_OTHERS = ("PET_", "DDPLAUNCH_", "TORCHELASTIC_", "OMPI_", "PMI_", "PMIX_", "SLURM_")
_NAMES_OF_OTHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Step(Struct, frozen=True, kw_only=True):
    """A line of the worker: what it has done."""

    at: str  # "imported", "gpu", "joined", "gloo", "nccl", "end", or "no torch"
    seconds: float = 0.0  # since the worker began
    latency: float = 0.0  # seconds
    bandwidth: float = 0.0  # bytes per second
    version: str = ""  # of NCCL


class Trial(Struct, frozen=True, kw_only=True):
    """How the job ended."""

    status: int | None  # of ddplaunch; None: it did not end in time
    steps: tuple[Step, ...] = ()
    err: str = ""  # what ddplaunch and the workers wrote to stderr


def read(subject: Subject) -> Trial:
    """Run the job with the workers' interpreter and variables; it writes no log and no run folder."""
    script = worker_program("all_reduce.py")
    env = {  # without what other launchers, or the options of the user's jobs, have set
        name: value
        for name, value in subject.env.items()
        if not name.startswith(_BEGINNINGS_OF_OTHERS) and name not in _NAMES_OF_OTHERS
    }
    words = ["--cluster", "local", "--nproc-per-node", "2", "--python", subject.python, "--output", "raw", "-q"]
    # torch is imported once, and both workers are forked from there: on two cores two imports take twice as long
    once = ["--start-method", "forkserver", "--preload", "torch.distributed"]
    limits = ["--timeout", f"{_JOB_TIMEOUT:g}s", "--grace-period", "0.5s", "--log-dir", "/dev/null"]
    # this ends before the deadline of the check, so that the check can tell how far the job came
    return parse(run([sys.executable, "-P", "-m", "ddplaunch", *words, *once, *limits, script], env, _DEADLINE - 0.3))


def parse(ended: Ended) -> Trial:
    """Read the lines of rank 0; a library may print others."""
    return Trial(status=ended.status, steps=tuple(_steps(ended.out)), err=ended.err)


def _steps(out: str) -> Iterator[Step]:
    for line in out.splitlines():
        try:
            yield msgspec.json.decode(line, type=Step)
        except (msgspec.MsgspecError, RecursionError, UnicodeError):
            continue


def judge(trial: Trial) -> Verdict:
    """Judge the job: whether it ended well, and how fast it was."""
    steps: Mapping[str, Step] = {step.at: step for step in trial.steps}  # what rank 0 has done, by name
    last = trial.steps[-1].at if trial.steps else "started"
    facts = "; ".join(_speed(steps[name]) for name in ("gloo", "nccl") if name in steps)
    if "no torch" in steps or "No module named 'torch'" in trial.err:
        return Verdict("there is no torch")  # which the check of the interpreter says
    is_without_gpu = "gpu" not in steps  # then NCCL is not measured, and gloo is the last
    was_measured = last in ("end", "nccl") or (last == "gloo" and is_without_gpu)
    was_late = trial.status in (TIMEOUT, None)  # ddplaunch has stopped the job, or did not end itself
    if was_measured and (was_late or trial.status == 0):  # on a busy machine the ends of the workers take long, too
        return Verdict(facts, tuple(_speed_findings(steps)))
    if was_late:
        came_so_far_after = max((step.seconds for step in trial.steps), default=0.0)
        return Verdict(facts or "not measured", (_late(last, came_so_far_after),))
    finding = broken(
        f"a job of two workers fails on this machine {_WHAT_IT_DOES_AFTER[last]}",
        _report(trial.err) or f"exit status {trial.status}",
    )
    return Verdict(facts or "not measured", (finding,))


# where a job is that has done this step last
_WHAT_IT_DOES_AFTER = {
    "started": "while it imports torch",
    "imported": "as its workers use their device or meet",
    "gpu": "as its workers meet",
    "joined": "in all_reduce over gloo",
    "gloo": "in all_reduce over NCCL",
    "nccl": "as it ends",
    "end": "as it ends",
}


def _late(last: str, seconds: float) -> Finding:
    """Judge a job that did not end: workers that have met and then wait hang, an import is slow."""
    hangs = last in ("joined", "gloo") and seconds < _JOB_TIMEOUT - _ENOUGH
    return Finding(
        severity="broken" if hangs else "slow",
        title=f"a job of two workers {'hangs' if hangs else f'did not end in {_JOB_TIMEOUT:g} s'} {_WHAT_IT_DOES_AFTER[last]}",
        evidence=f"its workers had come so far after {duration(seconds)}" if seconds else "",
        hint="if the machine is busy (`uptime`), try again: `ddplaunch doctor --only all-reduce`",
    )


def _report(err: str) -> str:
    """Return the error and the hint of ddplaunch's report, else the end of stderr."""
    lines = err.strip().splitlines()
    at = next((at for at, line in enumerate(lines) if line.startswith("error:")), max(len(lines) - 5, 0))
    return "\n".join(line.strip() for line in lines[at : at + 12] if line.strip())


def _speed(step: Step) -> str:
    version = f" {step.version}" if step.version else ""
    return f"{step.at}{version} {size(int(step.bandwidth))}/s, {step.latency * 1e6:.0f} µs"


def _speed_findings(steps: Mapping[str, Step]) -> Iterator[Finding]:
    """Yield over which backends the two workers are slow."""
    for name, least in (("gloo", _SLOW_GLOO), ("nccl", _SLOW_NCCL)):
        step = steps.get(name)
        if step is None:
            continue
        if step.bandwidth < least or step.latency > _SLOW_LATENCY:
            yield slow(
                f"two workers of this machine exchange {size(int(step.bandwidth))}/s over {name}, which is little",
                f"an all_reduce of one number takes {duration(step.latency)}",
                "if the machine is busy (`uptime`), try again: `ddplaunch doctor --only all-reduce`"
                + ("\n`NCCL_DEBUG=INFO ddplaunch train.py` shows which way NCCL takes" if name == "nccl" else ""),
            )


CHECKS = (Check(id="all-reduce", examine=lambda subject: judge(read(subject)), within=_DEADLINE),)
