"""The example on real digits, through the real command: it learns, resumes, and any number of workers will do."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.conftest import Job, Result
from tests.torch.example import AFTER_EXCEPTION

if TYPE_CHECKING:
    import torch

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("torch", "sklearn")), reason="needs torch and scikit-learn"
)

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_ddp.py"
LONG = 180.0  # seconds; four imports of torch and scikit-learn on two busy cores
NOISE = 0.6  # percent: two of the 360 images
ROUNDING = 1e-4  # of a weight; workers add in another order, but a lost optimizer or order of images shows above 1e-2
FINAL = re.compile(r"accuracy ([0-9.]+)% on 360 held-back images, weights equal on all (\d+) ranks")


def run(job: Job, workers: int, *words: object) -> Result:
    """Run the command to its end and prove that nothing of it is left."""
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(job.home / "inductor")}  # torch makes it, and keeps it, in TMPDIR if unset
    result = job.run("--nproc-per-node", workers, *words, env=cache, timeout=LONG)
    job.nothing_left()
    return result


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
    return run(job, 4, EXAMPLE, "--checkpoint", "digits.pt"), job.home / "digits.pt"


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
    first = run(job, 2, EXAMPLE, "--checkpoint", "digits.pt", "--epochs", 2)
    assert first.status in AFTER_EXCEPTION, "two epochs are too few for the target, and the script says so"
    assert re.search(r"accuracy [0-9.]+% is below the target of 97%", first.err)
    assert epochs(first.out) == [1, 2]

    second = run(job, 2, EXAMPLE, "--checkpoint", "digits.pt", "--loaders", 1)
    assert second.status == 0, second.err
    assert "resumed after epoch 2 from digits.pt" in second.out
    assert epochs(second.out) == list(range(3, 13))
    result, path = undisturbed
    assert abs(accuracy(second.out) - accuracy(result.out)) <= NOISE
    assert furthest(checkpoint(job.home / "digits.pt")["model"], checkpoint(path)["model"]) < ROUNDING


def test_plain_python_gives_the_result_of_four_workers(tmp_path: Path, undisturbed: tuple[Result, Path]) -> None:
    command = [sys.executable, str(EXAMPLE), "--checkpoint", "one.pt"]
    env = {**Job(tmp_path).env, "OMP_NUM_THREADS": "1"}  # so small a step is no faster with more
    one = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=LONG, check=False)
    assert (one.returncode, one.stderr) == (0, "")
    result, path = undisturbed
    assert abs(accuracy(one.stdout) - accuracy(result.out)) <= NOISE
    assert furthest(checkpoint(tmp_path / "one.pt")["model"], checkpoint(path)["model"]) < ROUNDING


def test_a_rank_with_other_weights_is_found(job: Job) -> None:
    program = job.home / "drifted.py"
    program.write_text(
        f"import sys; sys.path.insert(0, {str(EXAMPLE.parent)!r})\n"
        "import torch, train_ddp\n"
        "device = train_ddp.join()\n"
        "torch.manual_seed(0)\n"
        "network = train_ddp.make_network()\n"
        "if train_ddp.dist.get_rank() == 1:\n"
        "    network[0].bias.data[3] += 1e-7\n"
        "train_ddp.check_same_weights(network)\n"
        "torch.distributed.barrier()\n"
    )
    result = run(job, 2, program)
    assert result.status in AFTER_EXCEPTION
    assert "RuntimeError: rank 1 has other weights than rank 0" in result.err


def test_a_checkpoint_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("train_ddp", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    network = example.make_network()
    optimizer = example.torch.optim.SGD(network.parameters(), lr=0.1)
    path = tmp_path / "digits.pt"
    example.save(path, 7, network, optimizer)

    with pytest.raises(Exception, match="pickle"):
        example.save(path, lambda: "no pickle takes this", network, optimizer)

    assert example.restore(path, network, optimizer) == 7
