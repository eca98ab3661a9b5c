"""How many threads a worker's OpenMP may start. Pure."""

from __future__ import annotations


def threads(usable: int, workers: int, *, asked: int | None, env_value: str | None) -> tuple[int | None, str]:
    """Give OMP_NUM_THREADS for each worker and the reason in words; None: leave the variable as it is.

    `usable` is the number of CPUs that the workers of this node share, `asked` the value of --threads,
    `env_value` what OMP_NUM_THREADS holds before ddplaunch sets anything. --threads beats the variable. An empty
    variable counts as not set, as it does for OpenMP, which would then start a thread on every CPU in every worker.
    """
    if asked is not None:
        return asked, "--threads"
    if env_value and not env_value.isspace():
        return None, f"OMP_NUM_THREADS={env_value} was set"
    return max(1, usable // workers), f"{_count(usable, 'usable CPU')} / {_count(workers, 'worker')}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
