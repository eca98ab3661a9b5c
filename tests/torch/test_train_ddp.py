"""The example on real digits, through the real command: it learns, resumes, and any number of workers will do."""

import re
from contextlib import nullcontext
from itertools import chain
from pathlib import Path

import pytest

from tests.conftest import Job, Result
from tests.torch.example import EXAMPLES, launched, module, needs_torch_and_digits, plain, weights

pytestmark = needs_torch_and_digits

EXAMPLE = EXAMPLES / "train_ddp.py"
NOISE = 0.6  # percent: two of the 360 images
ROUNDING = 1e-4  # of a weight; workers add in another order, but a lost optimizer or order of images shows above 1e-2
FINAL = re.compile(r"accuracy ([0-9.]+)% on 360 held-back images, weights equal on all (\d+) ranks")


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
    first = launched(job, "--nproc-per-node", 2, EXAMPLE, "--checkpoint", "digits.pt", "--epochs", 2)
    assert first.status == 1, "two epochs are too few for the target, and the script says so"
    assert re.search(r"accuracy [0-9.]+% is below the target of 97%", first.err)
    assert epochs(first.out) == [1, 2]
    return job


@pytest.fixture(scope="module")
def resumed(interrupted: Job) -> tuple[Result, Path]:
    """The rest of that training, and its checkpoint."""
    words = ("--nproc-per-node", 2, EXAMPLE, "--checkpoint", "digits.pt", "--loaders", 1)
    result = launched(interrupted, *words)
    return result, interrupted.home / "digits.pt"


def test_workers_resume_learn_the_digits_and_end_with_the_same_weights(resumed: tuple[Result, Path]) -> None:
    result, _ = resumed
    assert result.status == 0, result.err
    assert "resumed after epoch 2 from digits.pt" in result.out
    assert epochs(result.out) == list(range(3, 13))
    assert accuracy(result.out) >= 97.0
    assert [FINAL.search(line)[2] for line in result.out.splitlines() if FINAL.search(line)] == ["2"]  # type: ignore[index]
    assert sorted(re.findall(r"^\[(\d)\] rank \1 of 2: gloo on cpu$", result.out, re.MULTILINE)) == ["0", "1"]


def test_nothing_but_the_launcher_writes_to_stderr(resumed: tuple[Result, Path]) -> None:
    result, _ = resumed
    assert [line for line in result.err.splitlines() if not line.startswith("ddplaunch: ")] == []


def test_the_checkpoint_has_no_unfinished_file_beside_it(resumed: tuple[Result, Path]) -> None:
    _, path = resumed
    assert [file.name for file in path.parent.glob("digits.pt*")] == ["digits.pt"]


def test_undisturbed_plain_python_gives_the_result_of_the_workers(tmp_path: Path, resumed: tuple[Result, Path]) -> None:
    """However many workers train, interrupted or not, with processes that load their images or without."""
    out = plain(EXAMPLE.name, tmp_path, "--checkpoint", "one.pt")
    result, path = resumed
    assert epochs(out) == list(range(1, 13))
    assert abs(accuracy(out) - accuracy(result.out)) <= NOISE
    one, other = (list(chain(*weights(file))) for file in (tmp_path / "one.pt", path))
    assert max(abs(a - b) for a, b in zip(one, other, strict=True)) < ROUNDING


@pytest.mark.slow
@pytest.mark.ddplaunch(nproc=2)
def test_other_weights_are_found_and_unequal_parts_count_each_image_once() -> None:
    """In one job, for two ranks that import all this take seconds."""
    example = module(EXAMPLE.name)
    example.join()
    rank = example.dist.get_rank()
    example.torch.manual_seed(0)
    network = example.make_network()

    example.check_same_weights(network)
    images, labels = (tensor[:101] for tensor in example.load_data()[1].tensors)
    right = (network(images).argmax(dim=1) == labels).sum()
    assert example.accuracy(network, example.TensorDataset(images, labels)) == right / 101

    if rank == 1:
        network[0].bias.data[3] += 1e-7
    with pytest.raises(RuntimeError, match="rank 1 has other weights than rank 0") if rank == 1 else nullcontext():
        example.check_same_weights(network)
    example.dist.destroy_process_group()
