"""The examples that train with several workers, through the real command: what they compute and print is right."""

import os
import random
import re
import signal
from importlib.metadata import version
from itertools import chain
from pathlib import Path

import pytest

from tests.conftest import Job, until
from tests.torch.example import (
    EXAMPLES,
    LONG,
    QUICK,
    launched,
    module,
    needs_torch_and_digits,
    newest,
    plain,
    refused,
    weights,
)

pytestmark = needs_torch_and_digits

ELASTIC = EXAMPLES / "elastic_checkpoint.py"
IN_SLURM = EXAMPLES / "slurm" / "train.py"


# --- collectives.py


TABLE = """\
broadcast      rank 0  00 01 02 -> 00 01 02
               rank 1  10 11 12 -> 00 01 02
               rank 2  20 21 22 -> 00 01 02
reduce         rank 0  00 01 02 -> 30 33 36
               rank 1  10 11 12 -> ?
               rank 2  20 21 22 -> ?
all_reduce     rank 0  00 01 02 -> 30 33 36
               rank 1  10 11 12 -> 30 33 36
               rank 2  20 21 22 -> 30 33 36
gather         rank 0  00 01 02 -> 00 01 02 10 11 12 20 21 22
               rank 1  10 11 12 -> -
               rank 2  20 21 22 -> -
all_gather     rank 0  00 01 02 -> 00 01 02 10 11 12 20 21 22
               rank 1  10 11 12 -> 00 01 02 10 11 12 20 21 22
               rank 2  20 21 22 -> 00 01 02 10 11 12 20 21 22
scatter        rank 0  00 01 02 -> 00
               rank 1  10 11 12 -> 01
               rank 2  20 21 22 -> 02
reduce_scatter rank 0  00 01 02 -> 30
               rank 1  10 11 12 -> 33
               rank 2  20 21 22 -> 36
all_to_all     rank 0  00 01 02 -> 00 10 20
               rank 1  10 11 12 -> 01 11 21
               rank 2  20 21 22 -> 02 12 22
"""
COLLECTIVES = [row.split()[0] for row in TABLE.splitlines()[::3]]
LACKING = {(2, 4): ["reduce_scatter", "all_to_all"], (2, 9): ["all_to_all"]}  # in gloo of the versions that were tried


def test_three_ranks_hold_what_a_pencil_gives(job: Job) -> None:
    result = launched(job, "--output", "rank0", "--nproc-per-node", 3, EXAMPLES / "collectives.py").expect(0)
    major, minor = version("torch").split(".")[:2]
    lacking = LACKING.get((int(major), int(minor)), [])
    shown = result.out.replace("[0] ", "").splitlines()
    for number, (line, expected) in enumerate(zip(shown, TABLE.splitlines(), strict=True)):
        if COLLECTIVES[number // 3] in lacking:
            assert line.endswith("-> not in this backend")
        elif expected.endswith("?"):  # undefined
            assert line.startswith(expected[:-1])
        else:
            assert line == expected


# --- from_data_parallel.py


@pytest.mark.parametrize(("size", "shares"), [(13, "5, 4, 4"), (2, "1, 1, 0")])
def test_the_weighted_loss_of_unequal_parts_has_the_gradient_of_the_whole_batch(
    job: Job, size: int, shares: str
) -> None:
    example = EXAMPLES / "from_data_parallel.py"
    result = launched(job, "--output", "rank0", "--nproc-per-node", 3, example, "--batch-size", size).expect(0)
    images, whole, means, weighted = result.out.splitlines()
    assert images == f"{size} images, {shares} on each rank"
    loss = whole.removeprefix("DataParallel").strip()
    assert weighted.endswith(f"{loss}, gradient off by 0.0%")
    assert loss not in means


# --- model_parallel.py, memory_and_accumulation.py


def test_two_workers_train_halves_as_one_process_does(job: Job, tmp_path: Path) -> None:
    """The losses are those of a single process, to six digits."""
    result = launched(job, "--nproc-per-node", 2, EXAMPLES / "model_parallel.py", "--epochs", 3).expect(0)
    epochs = re.findall(r"epoch .*", result.out)
    assert len(epochs) == 3
    assert re.findall(r"epoch .*", plain("model_parallel.py", tmp_path, "--epochs", 3)) == epochs
    where = re.findall(r"rank (\d) of 2: lower half on cpu, upper half on cpu", result.out)
    assert sorted(where) == ["0", "1"]


def test_pieces_have_the_loss_of_whole_batches_and_one_rank_loads_for_all(job: Job) -> None:
    example = EXAMPLES / "memory_and_accumulation.py"
    result = launched(job, "--output", "rank0", "--nproc-per-node", 2, example, "--layers", 1).expect(0)
    exchanges = re.findall(r"^(.+?) +(\d+) exchanges of gradients, loss (\S+)$", result.out, re.MULTILINE)
    assert [(name, number) for name, number, _ in exchanges] == [
        ("whole batches", "28"),
        ("4 pieces", "112"),
        ("4 pieces, no_sync", "28"),
    ]
    assert len({loss for *_, loss in exchanges}) == 1
    peaks = re.findall(r"^(every rank loads|one loads, broadcasts) +(\d+) +(\d+)$", result.out, re.MULTILINE)
    (every, *both), (one, first, second) = peaks
    assert (every, one) == ("every rank loads", "one loads, broadcasts")
    assert min(*map(int, both), int(first)) > 18, "half of 36 MiB"
    assert int(second) < 18


# --- parallel_sgd.py


def test_two_workers_have_after_two_rounds_the_weights_that_one_process_computes(job: Job) -> None:
    """The accuracies are those of the same training in one process, one part after the other."""
    words = ("--rounds", 2, "--epochs", 2)
    result = launched(job, "--nproc-per-node", 2, EXAMPLES / "parallel_sgd.py", *words).expect(0)
    assert re.findall(r"round \d: .*", result.out) == alone(rounds=2, epochs=2, workers=2)


def alone(rounds: int, epochs: int, workers: int) -> list[str]:
    """What rank 0 prints, computed in this process."""
    example = module("parallel_sgd.py")
    model = example.make_model()
    weights = example.parameters_to_vector(model.parameters()).detach()
    parts, val_set = example.load_data(workers)
    lines = []
    for round_ in range(rounds):
        trained = [
            example.train_alone(model, weights, part, epochs, seed=1000 * round_ + rank)
            for rank, part in enumerate(parts)
        ]
        weights = example.average(trained, [len(images) for images, _ in parts])
        each = ", ".join(f"{example.accuracy(model, one, val_set):.2%}" for one in trained)
        lines.append(f"round {round_ + 1}: alone {each}; averaged {example.accuracy(model, weights, val_set):.2%}")
    return lines


# --- elastic_checkpoint.py


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The weights of a run in one process that nothing disturbs."""
    home = tmp_path_factory.mktemp("undisturbed")
    out = plain(ELASTIC.name, home, "--checkpoints", "undisturbed")
    assert "start 0: 1 workers begin after step 0 of 120" in out
    return of_elastic(home / "undisturbed")


def of_elastic(folder: Path) -> list[float]:
    """The weights in the newest checkpoint of a folder: of two linear layers, in double precision."""
    return list(chain(*weights(newest(folder), tensors=4, type_="d")))


def test_two_nodes_of_which_a_worker_is_killed_at_a_random_moment_end_with_the_same_weights(job, undisturbed):
    chaos = (
        f"kill:{random.randrange(2)}@{random.randrange(500, 2800)}ms"  # between the start and step 120 at the earliest
    )
    words = ["--nnodes", 2, "--nproc-per-node", 1, "--simulate", "--max-restarts", 1, "--chaos", chaos]
    result = launched(job, *words, ELASTIC, "--checkpoints", "killed", "--pause", 0.02)
    assert result.status == 0, f"{chaos}\n{result.err}"
    assert "ddplaunch: chaos: killed rank" in result.err, chaos
    assert re.search(r"start 1: 2 workers begin after step \d+ of 120", result.out), chaos
    assert of_elastic(job.home / "killed") == pytest.approx(undisturbed, abs=1e-9), chaos


def test_what_a_lost_node_writes_late_is_never_loaded(job: Job, undisturbed: list[float]) -> None:
    """The test writes, as rank 0 of the first start would have if its node had been lost and not killed."""
    folder, printed = job.home / "digits", job.home / "printed"

    def begun_after() -> list[int]:
        return [int(step) for step in re.findall(r": 2 workers begin after step (\d+) of 120", printed.read_text())]

    def terms() -> list[int]:
        return [event["term"] for event in job.events("generation_started")]

    def saved(start: int) -> list[Path]:
        """The checkpoints of a start, of which the first is 1."""
        return list(folder.glob(f"checkpoint-{terms()[start - 1]}-*.pt")) if len(terms()) >= start else []

    def kill_rank_1() -> None:
        os.kill(job.pids()[1], signal.SIGKILL)

    words = ("--nproc-per-node", 2, "--max-restarts", 2, ELASTIC, "--checkpoints", folder, "--pause", 0.03)
    with printed.open("wb") as out:
        job.start(*words, env=QUICK, stdout=out)
        until(lambda: saved(1), "a checkpoint of the first start", LONG)
        kill_rank_1()
        until(lambda: saved(2), "a checkpoint of the second start", LONG)
        save_late(folder, terms()[0], 119)
        kill_rank_1()
        result = job.wait(LONG)
    assert result.status == 0, result.err
    first, second, third = begun_after()
    assert first < second < third < 119
    assert of_elastic(folder) == pytest.approx(undisturbed, abs=1e-9)
    assert {path.name for path in folder.iterdir()} == {f"checkpoint-{terms()[2]}-{step}.pt" for step in (110, 120)}


def save_late(folder: Path, term: int, step: int) -> None:
    """Save weights of another model, which nobody can go on from, as the example does in this term."""
    example = module(ELASTIC.name)
    model = example.nn.Linear(1, 1)
    example.save(folder, term, step, model, example.torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_save_removes_what_is_smaller_but_for_the_last_and_touches_nothing_greater(tmp_path: Path) -> None:
    def names() -> list[str]:
        return sorted(path.name.removeprefix("checkpoint-") for path in tmp_path.iterdir())

    for term, step in ((9, 90), (9, 100), (10, 10)):
        save_late(tmp_path, term, step)
    for term in (9, 10, 11):  # killed while it wrote
        (tmp_path / f"checkpoint-{term}-15.tmp").touch()
    assert names() == ["10-10.pt", "10-15.tmp", "11-15.tmp", "9-100.pt", "9-15.tmp"]
    before = (tmp_path / "checkpoint-10-10.pt").read_bytes()
    save_late(tmp_path, 9, 110)
    assert names() == ["10-10.pt", "10-15.tmp", "11-15.tmp", "9-100.pt", "9-110.pt"]
    assert (tmp_path / "checkpoint-10-10.pt").read_bytes() == before
    save_late(tmp_path, 10, 20)
    assert names() == ["10-10.pt", "10-20.pt", "11-15.tmp"]


def test_a_start_of_a_smaller_term_than_the_newest_checkpoint_ends(tmp_path: Path) -> None:
    save_late(tmp_path / "digits", 1000, 20)
    said = refused(ELASTIC.name, tmp_path, "--checkpoints", "digits", term=999)
    assert said == "the job has gone on without term 999, or a clock was wrong: there is digits/checkpoint-1000-20.pt\n"


# --- slurm/train.py, without Slurm


SHORT = ("--epochs", "4")
END = re.compile(r"epoch  4: accuracy ([0-9.]+)%")


def test_interrupted_and_started_again_it_ends_with_the_same_weights_bit_for_bit(job: Job) -> None:
    """With two workers: of more, DDP adds the gradients in another order after its first step, which a new start repeats."""
    words = ("--nproc-per-node", 2, IN_SLURM, *SHORT, "--checkpoint")
    undisturbed = launched(job, *words, "whole.pt")
    assert undisturbed.status == 0, undisturbed.err

    interrupt(job, after=random.choice((1, 2)))
    result = launched(job, *words, "digits.pt").expect(0)
    assert "resumes before step" in result.out

    assert weights(job.home / "whole.pt") == weights(job.home / "digits.pt")
    assert END.findall(undisturbed.out) == END.findall(result.out) != []
    assert not list(job.home.glob("*.tmp"))


def interrupt(job: Job, after: int) -> None:
    """Start the training, and announce its end in whichever step after this epoch."""
    printed = job.home / "printed"
    words = ("--nproc-per-node", 2, IN_SLURM, "--checkpoint", "digits.pt", *SHORT)
    with printed.open("wb") as out:
        process = job.start(*words, env=QUICK, stdout=out, stderr=out)
        until(lambda: f"epoch {after:2}: accuracy" in printed.read_text(), f"the end of epoch {after}", LONG)
        process.send_signal(signal.SIGUSR1)
        result = job.wait(LONG)
    text = printed.read_text()
    assert result.status == 0, text
    assert len(re.findall(r"^\[0\] saved before step \d+ of epoch \d, to digits.pt$", text, re.MULTILINE)) == 1, text
    assert not END.search(text)
