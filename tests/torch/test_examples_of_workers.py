"""The examples that train with several workers, through the real command: what they say is right, and what is wrong is found."""

import random
import re
import signal
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.conftest import Job, until
from tests.torch.example import AFTER_EXCEPTION, EXAMPLES, LONG, QUICK, launched, needs_torch_and_digits, plain, weights

pytestmark = needs_torch_and_digits

ELASTIC = EXAMPLES / "elastic_checkpoint.py"
IN_SLURM = EXAMPLES / "slurm" / "train.py"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("example", "words", "said"),
    [
        ("collectives", (), r"9 collectives over gloo: the right result on all 1 ranks\n$"),
        ("from_data_parallel", ("--batch-size", 4), "same outputs, same gradient, same checkpoints"),
        ("model_parallel", ("--epochs", 4, "--target", 0), "those of one process with the uncut network"),
    ],
)
def test_plain_python_is_a_job_of_one(tmp_path: Path, example: str, words: tuple[object, ...], said: str) -> None:
    assert re.search(said, plain(f"{example}.py", tmp_path, *words))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("example", "words", "target"),
    [
        ("hogwild", ("--processes", 1, "--steps", 1), 90),
        ("model_parallel", ("--epochs", 1), 90),
        ("parallel_sgd", ("--rounds", 1, "--epochs", 1), 97),
    ],
)
def test_too_little_training_ends_the_job(job: Job, example: str, words: tuple[object, ...], target: int) -> None:
    result = launched(job, "--nproc-per-node", 1, EXAMPLES / f"{example}.py", *words)
    assert result.status in AFTER_EXCEPTION
    assert re.search(rf"accuracy [\d.]+% is below the target of {target}%", result.err)


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
               rank 1  - -> 01
               rank 2  - -> 02
reduce_scatter rank 0  00 01 02 -> 30
               rank 1  10 11 12 -> 33
               rank 2  20 21 22 -> 36
all_to_all     rank 0  00 01 02 -> 00 10 20
               rank 1  10 11 12 -> 01 11 21
               rank 2  20 21 22 -> 02 12 22
"""
COLLECTIVES = [row.split()[0] for row in TABLE.splitlines()[::3]]
LACKING = {(2, 4): "gloo has no reduce_scatter, all_to_all", (2, 9): "gloo has no all_to_all"}  # of those tried


def test_three_ranks_hold_what_a_pencil_gives(job: Job) -> None:
    result = launched(
        job, "--output", "rank0", "--nproc-per-node", 3, EXAMPLES / "collectives.py", "--late", 0.1
    ).expect(0)
    promised = [
        f"{line.split('->')[0]}-> ?" if line.endswith("(undefined)") else line
        for line in result.out.replace("[0] ", "").splitlines()
    ]
    major, minor = version("torch").split(".")[:2]
    lacks = LACKING.get((int(major), int(minor)), "")
    lacking = lacks.partition(" no ")[2].split(", ") if lacks else []
    rows = [row for number, row in enumerate(TABLE.splitlines()) if COLLECTIVES[number // 3] not in lacking]
    said = [lacks] if lacks else []
    done = f"{9 - len(lacking)} collectives over gloo: the right result on all 3 ranks"
    assert promised == [*rows, *said, done]


# --- from_data_parallel.py


SAME_OUTPUTS = "same outputs, same gradient, same checkpoints"


def test_unequal_shares_need_weights_and_outputs_and_checkpoints_are_the_same(job: Job) -> None:
    result = launched(job, "--output", "rank0", "--nproc-per-node", 3, EXAMPLES / "from_data_parallel.py").expect(0)
    calls, shares, whole, means, weighted, names, last = result.out.splitlines()
    assert calls == "DataParallel: fewer than two GPUs, so it calls the module and no more"
    assert shares.startswith("shares 5 5 3, outputs differ by ")
    right = whole.removeprefix("DataParallel").strip()
    assert weighted.endswith(f"{right}, gradient off by 0.0%")
    assert right not in means
    assert names == "names in a checkpoint: module.0.weight from a wrapper, 0.weight from its .module"
    assert last == f"DataParallel and DDP on 3 workers: {SAME_OUTPUTS}"


@pytest.mark.slow
def test_a_worker_without_an_image_takes_part(job: Job) -> None:
    result = launched(job, "--nproc-per-node", 3, EXAMPLES / "from_data_parallel.py", "--batch-size", 2).expect(0)
    assert "shares 1 1 0, " in result.out
    assert SAME_OUTPUTS in result.out


# --- model_parallel.py


SAME_AS_UNCUT = re.compile(r"weights off by \S+ from those of one process with the uncut network")


def test_two_workers_train_the_weights_of_one_process(job: Job) -> None:
    result = launched(job, "--nproc-per-node", 2, EXAMPLES / "model_parallel.py", "--epochs", 4, "--target", 80).expect(
        0
    )
    assert SAME_AS_UNCUT.search(result.out)
    where = re.findall(r"rank (\d) of 2: gloo, lower half on cpu, upper half on cpu", result.out)
    assert sorted(where) == ["0", "1"]


@pytest.mark.slow
def test_a_worker_that_is_told_something_else_is_found(job: Job) -> None:
    program = job.home / "unequal.py"
    program.write_text(
        "import os, runpy, sys\n"
        "sys.argv = ['', '--epochs', '1', '--learning-rate', '0.05' if os.environ['RANK'] == '0' else '0.06']\n"
        f"runpy.run_path({str(EXAMPLES / 'model_parallel.py')!r}, run_name='__main__')\n"
    )
    result = launched(job, "--nproc-per-node", 2, program)
    assert result.status in AFTER_EXCEPTION
    assert re.search(r"RuntimeError: rank \d: a weight is off by \S+ from that of one process", result.err)


# --- memory_and_accumulation.py


def test_pieces_give_the_weights_of_whole_batches_and_one_rank_loads_for_all(job: Job) -> None:
    result = launched(
        job,
        "--output",
        "rank0",
        "--nproc-per-node",
        2,
        EXAMPLES / "memory_and_accumulation.py",
        "--layers",
        1,
        "--loaders",
        1,
    ).expect(0)
    exchanges = re.findall(r"^  (.+?) +(\d+) exchanges", result.out, re.MULTILINE)
    assert exchanges == [("whole batches", "28"), ("4 pieces", "112"), ("4 pieces, no_sync", "28")]
    peaks = re.findall(r"^  (every rank loads|one loads, broadcasts) +(\d+) +(\d+)$", result.out, re.MULTILINE)
    assert [name for name, *_ in peaks] == ["every rank loads", "one loads, broadcasts"]
    assert result.out.splitlines()[-1] == "same weights in all ways on 2 ranks"


# --- parallel_sgd.py


SAME_BIT_FOR_BIT = re.compile(
    r"accuracy ([\d.]+)% on 360 held-back images; one process gives the same weights, bit for bit"
)


def test_two_workers_learn_in_two_rounds_what_one_process_learns(job: Job) -> None:
    result = launched(
        job, "--nproc-per-node", 2, EXAMPLES / "parallel_sgd.py", "--rounds", 2, "--epochs", 2, "--target", 80
    ).expect(0)
    assert re.findall(r"round (\d): alone [\d.]+%, [\d.]+%; averaged", result.out) == ["1", "2"]
    final = SAME_BIT_FOR_BIT.search(result.out)
    assert final is not None, result.out
    assert float(final[1]) >= 80


# --- elastic_checkpoint.py


SAME_AS_UNDISTURBED = re.compile(r"weights off by \S+ from those in .*undisturbed\.pt")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a run in one process that nothing disturbs."""
    home = tmp_path_factory.mktemp("undisturbed")
    out = plain(ELASTIC.name, home, "--checkpoint", "undisturbed.pt")
    assert "start 0: 1 workers begin after step 0 of 120" in out
    return home / "undisturbed.pt"


def test_two_nodes_of_which_a_worker_is_killed_at_a_random_moment_end_with_the_same_weights(job, undisturbed):
    chaos = (
        f"kill:{random.randrange(2)}@{random.randrange(500, 2800)}ms"  # between the start and step 120 at the earliest
    )
    words = ["--nnodes", 2, "--nproc-per-node", 1, "--simulate", "--max-restarts", 1, "--chaos", chaos]
    options = ["--checkpoint", "killed.pt", "--pause", 0.02, "--same-as", undisturbed]
    result = launched(job, *words, ELASTIC, *options)
    assert result.status == 0, f"{chaos}\n{result.err}"
    assert "ddplaunch: chaos: killed rank" in result.err, chaos
    assert re.search(r"start 1: 2 workers begin after step \d+ of 120", result.out), chaos
    assert SAME_AS_UNDISTURBED.search(result.out), chaos


@pytest.mark.slow
def test_a_run_that_was_ended_within_an_epoch_has_other_weights_until_it_has_gone_on(job, undisturbed):
    words = [ELASTIC, "--checkpoint", "ended.pt", "--same-as", undisturbed]
    early = launched(job, *words, "--steps", 50, "--target", 0)
    assert early.status in AFTER_EXCEPTION
    assert re.search(r"RuntimeError: rank 0: a weight is off by \S+ from that in", early.err)

    late = launched(job, "--nproc-per-node", 2, *words)
    assert late.status == 0, late.err
    assert "start 0: 2 workers begin after step 50 of 120" in late.out
    assert SAME_AS_UNDISTURBED.search(late.out)


# --- slurm/train.py, without Slurm


SHORT = ("--epochs", "4", "--target", "80")
END = re.compile(r"accuracy ([0-9.]+)%, weights equal on all 2 ranks")


def test_interrupted_and_started_again_it_ends_with_the_same_weights_bit_for_bit(job: Job) -> None:
    """With two workers: of more, DDP adds the gradients in another order after its first step, which a new start repeats."""
    words = ("--nproc-per-node", 2, IN_SLURM, *SHORT, "--checkpoint")
    undisturbed = launched(job, *words, "whole.pt")
    assert undisturbed.status == 0, undisturbed.err

    interrupt(job, after=random.choice((1, 2)))
    result = launched(job, *words, "digits.pt").expect(0)
    assert "goes on before step" in result.out

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
