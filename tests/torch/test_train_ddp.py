"""The example on real digits, through the real command: it learns, resumes, and any number of workers will do."""

from __future__ import annotations

import re
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.conftest import Job, Result
from tests.torch.example import EXAMPLES, launched, module, needs_torch_and_digits, plain

if TYPE_CHECKING:
    import torch

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


def checkpoint(path: Path) -> dict[str, Any]:
    """What the checkpoint holds."""
    import torch

    state: dict[str, Any] = torch.load(path, weights_only=True)
    return state


def furthest(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The largest difference of two weights that should be the same."""
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    """One whole training with four workers and its checkpoint."""
    job = Job(tmp_path_factory.mktemp("undisturbed"))
    return launched(job, "--nproc-per-node", 4, EXAMPLE, "--checkpoint", "digits.pt"), job.home / "digits.pt"


def test_four_workers_learn_the_digits_and_end_with_the_same_weights(undisturbed: tuple[Result, Path]) -> None:
    result, _ = undisturbed
    assert result.status == 0, result.err
    assert accuracy(result.out) >= 97.0
    assert [FINAL.search(line)[2] for line in result.out.splitlines() if FINAL.search(line)] == ["4"]  # type: ignore[index]
    assert sorted(re.findall(r"^\[(\d)\] rank \1 of 4: gloo on cpu$", result.out, re.MULTILINE)) == ["0", "1", "2", "3"]
    assert epochs(result.out) == list(range(1, 13))


def test_nothing_but_the_launcher_writes_to_stderr(undisturbed: tuple[Result, Path]) -> None:
    result, _ = undisturbed
    assert [line for line in result.err.splitlines() if not line.startswith("ddplaunch: ")] == []


def test_the_checkpoint_has_no_unfinished_file_beside_it(undisturbed: tuple[Result, Path]) -> None:
    _, path = undisturbed
    assert [file.name for file in path.parent.glob("digits.pt*")] == ["digits.pt"]
    assert checkpoint(path)["epochs"] == 12


def test_a_resumed_training_with_loaders_ends_where_an_undisturbed_one_ends(
    job: Job, undisturbed: tuple[Result, Path]
) -> None:
    first = launched(job, "--nproc-per-node", 2, EXAMPLE, "--checkpoint", "digits.pt", "--epochs", 2)
    assert first.status == 1, "two epochs are too few for the target, and the script says so"
    assert re.search(r"accuracy [0-9.]+% is below the target of 97%", first.err)
    assert epochs(first.out) == [1, 2]

    second = launched(job, "--nproc-per-node", 2, EXAMPLE, "--checkpoint", "digits.pt", "--loaders", 1)
    assert second.status == 0, second.err
    assert "resumed after epoch 2 from digits.pt" in second.out
    assert epochs(second.out) == list(range(3, 13))
    result, path = undisturbed
    assert abs(accuracy(second.out) - accuracy(result.out)) <= NOISE
    assert furthest(checkpoint(job.home / "digits.pt")["model"], checkpoint(path)["model"]) < ROUNDING


def test_plain_python_gives_the_result_of_four_workers(tmp_path: Path, undisturbed: tuple[Result, Path]) -> None:
    out = plain(EXAMPLE.name, tmp_path, "--checkpoint", "one.pt")
    result, path = undisturbed
    assert abs(accuracy(out) - accuracy(result.out)) <= NOISE
    assert furthest(checkpoint(tmp_path / "one.pt")["model"], checkpoint(path)["model"]) < ROUNDING


@pytest.mark.ddplaunch(nproc=2)
def test_a_rank_with_other_weights_is_found() -> None:
    example = module(EXAMPLE.name)
    example.join()
    rank = example.dist.get_rank()
    example.torch.manual_seed(0)
    network = example.make_network()
    example.check_same_weights(network)
    if rank == 1:
        network[0].bias.data[3] += 1e-7
    with pytest.raises(RuntimeError, match="rank 1 has other weights than rank 0") if rank == 1 else nullcontext():
        example.check_same_weights(network)
    example.dist.destroy_process_group()


@pytest.mark.ddplaunch(nproc=3)
def test_ranks_with_unequal_parts_count_each_image_once() -> None:
    example = module(EXAMPLE.name)
    example.join()
    example.torch.manual_seed(0)
    network = example.make_network()
    images, labels = (tensor[:100] for tensor in example.load_data()[1].tensors)
    right = (network(images).argmax(dim=1) == labels).sum()
    assert example.accuracy(network, example.TensorDataset(images, labels)) == right / 100
    example.dist.destroy_process_group()


def test_a_checkpoint_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    example = module(EXAMPLE.name)
    network = example.make_network()
    optimizer = example.torch.optim.SGD(network.parameters(), lr=0.1)
    path = tmp_path / "digits.pt"
    example.save(path, 7, network, optimizer)

    with pytest.raises(Exception, match="pickle"):
        example.save(path, lambda: "no pickle takes this", network, optimizer)

    assert example.restore(path, network, optimizer) == 7
