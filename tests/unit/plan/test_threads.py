import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from ddplaunch.plan.variables import threads
from ddplaunch.spec.job import JobSpec, Program, ProgramKind

SPEC = JobSpec(program=Program(kind=ProgramKind.SCRIPT, target="train.py"))


@pytest.mark.parametrize(
    ("usable", "workers", "value", "reason"),
    [
        (8, 4, 2, "8 usable CPUs / 4 workers"),
        (7, 4, 1, "7 usable CPUs / 4 workers"),
        (2, 4, 1, "2 usable CPUs / 4 workers"),
        (1, 1, 1, "1 usable CPU / 1 worker"),
        (64, 1, 64, "64 usable CPUs / 1 worker"),
    ],
)
def test_workers_share_the_usable_cpus(usable: int, workers: int, value: int, reason: str) -> None:
    assert threads(SPEC, usable, workers, None) == (value, reason)


def test_the_callers_variable_is_left_as_it_is() -> None:
    """It need not be a number: OpenMP takes one for each level of nesting."""
    assert threads(SPEC, 8, 4, "4,2") == (None, "OMP_NUM_THREADS=4,2 was set")


@pytest.mark.parametrize("value", ["", " "])
def test_an_empty_variable_counts_as_not_set(value: str) -> None:
    assert threads(SPEC, 8, 4, value) == (2, "8 usable CPUs / 4 workers")


@pytest.mark.parametrize("env_value", [None, "", "3"])
def test_the_flag_beats_the_variable(env_value: str | None) -> None:
    assert threads(replace(SPEC, threads=5, origins={"threads": "--threads"}), 8, 4, env_value) == (5, "--threads")


@given(usable=st.integers(1, 1024), workers=st.integers(1, 1024))
def test_no_cpu_is_promised_twice(usable: int, workers: int) -> None:
    value, _ = threads(SPEC, usable, workers, None)
    assert value is not None
    assert value >= 1
    assert value == 1 or value * workers <= usable
