import pytest

from ddplaunch.spec.job import JobSpec, Program, ProgramKind

PROGRAM = Program(kind=ProgramKind.SCRIPT, target="train.py")


@pytest.mark.parametrize(
    ("origin", "written"),
    [
        ("--gpus-per-worker", "--gpus-per-worker 3"),
        ("DDPLAUNCH_GPUS_PER_WORKER", "DDPLAUNCH_GPUS_PER_WORKER=3"),
        ("pyproject.toml", "gpus-per-worker = 3 in pyproject.toml"),
        ("/home/a/ddplaunch.toml", "gpus-per-worker = 3 in /home/a/ddplaunch.toml"),
    ],
)
def test_a_value_is_written_as_it_stands_at_its_origin(origin: str, written: str) -> None:
    spec = JobSpec(program=PROGRAM, gpus_per_worker=3, origins={"gpus_per_worker": origin})
    assert spec.typed("gpus_per_worker", 3) == written


def test_what_was_not_given_comes_from_the_defaults() -> None:
    assert JobSpec(program=PROGRAM).origin("threads") == "default"
