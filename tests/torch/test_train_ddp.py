"""The example on real digits, through the real command: it learns, resumes, and any number of workers will do."""

import re
from itertools import chain
from pathlib import Path

import pytest

from tests.conftest import Job, Result
from tests.torch.example import EXAMPLES, launched, needs_torch_and_digits, newest, plain, refused, weights

pytestmark = needs_torch_and_digits

EXAMPLE = EXAMPLES / "train_ddp.py"
NOISE = 0.6  # percent: two of the 360 images
ROUNDING = 1e-4  # of a weight; workers add in another order, but a lost optimizer or order of images shows above 1e-2
FINAL = re.compile(r"epoch 12: loss [0-9.]+, accuracy ([0-9.]+)%")


def epochs(text: str) -> list[int]:
    """The epochs that rank 0 says it has trained."""
    return [int(number) for number in re.findall(r"epoch +(\d+): loss", text)]


def accuracy(text: str) -> float:
    """The accuracy that rank 0 gives at the end, in percent."""
    found = FINAL.search(text)
    assert found is not None, text
    return float(found[1])


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A training with two workers that ends after two of its epochs."""
    job = Job(tmp_path_factory.mktemp("interrupted"))
    first = launched(job, "--nproc-per-node", 2, EXAMPLE, "--checkpoints", "digits", "--epochs", 2)
    assert first.status == 0, first.err
    assert epochs(first.out) == [1, 2]
    return job


@pytest.fixture(scope="module")
def resumed(interrupted: Job) -> tuple[Result, Path]:
    """The rest of that training, and the folder of its checkpoints."""
    words = ("--nproc-per-node", 2, EXAMPLE, "--checkpoints", "digits")
    result = launched(interrupted, *words)
    return result, interrupted.home / "digits"


def test_workers_resume_and_learn_the_digits(resumed: tuple[Result, Path]) -> None:
    result, _ = resumed
    assert result.status == 0, result.err
    assert epochs(result.out) == list(range(3, 13))
    assert accuracy(result.out) >= 96.0


def test_nothing_but_the_launcher_writes_to_stderr(resumed: tuple[Result, Path]) -> None:
    result, _ = resumed
    assert [line for line in result.err.splitlines() if not line.startswith("ddplaunch: ")] == []


def test_of_each_start_the_last_two_checkpoints_stay(resumed: tuple[Result, Path]) -> None:
    _, folder = resumed
    names = sorted(path.name.removeprefix("checkpoint-").split("-") for path in folder.iterdir())
    (first, a), (same, b), (second, c), (again, d) = names
    assert (same, again) == (first, second)
    assert int(second) > int(first)
    assert ({a, b}, {c, d}) == ({"1.pt", "2.pt"}, {"11.pt", "12.pt"})


def test_a_start_that_the_job_has_gone_on_without_ends(resumed: tuple[Result, Path], tmp_path: Path) -> None:
    _, folder = resumed
    before = sorted(folder.iterdir())
    said = refused(EXAMPLE.name, tmp_path, "--checkpoints", folder, term=5)
    assert said.startswith("the job has gone on without term 5, or a clock was wrong: there is term ")
    assert sorted(folder.iterdir()) == before


def test_undisturbed_plain_python_gives_the_result_of_the_workers(tmp_path: Path, resumed: tuple[Result, Path]) -> None:
    """However many workers train, interrupted or not."""
    out = plain(EXAMPLE.name, tmp_path, "--checkpoints", "one")
    result, folder = resumed
    assert epochs(out) == list(range(1, 13))
    assert abs(accuracy(out) - accuracy(result.out)) <= NOISE
    one, other = (list(chain(*weights(file))) for file in (newest(tmp_path / "one"), newest(folder)))
    assert max(abs(a - b) for a, b in zip(one, other, strict=True)) < ROUNDING
