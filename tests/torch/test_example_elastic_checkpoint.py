"""The example that may be killed at any time, through the real command: the same weights come out."""

import random
import re
from pathlib import Path

import pytest

from tests.conftest import Job
from tests.torch.example import AFTER_EXCEPTION, EXAMPLES, launched, needs_torch_and_digits, plain

pytestmark = needs_torch_and_digits

EXAMPLE = EXAMPLES / "elastic_checkpoint.py"
SAME = re.compile(r"weights off by \S+ from those in .*undisturbed\.pt")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a run in one process that nothing disturbs."""
    home = tmp_path_factory.mktemp("undisturbed")
    out = plain(EXAMPLE.name, home, "--checkpoint", "undisturbed.pt")
    assert "start 0: 1 workers begin after step 0 of 120" in out
    return home / "undisturbed.pt"


def test_two_nodes_of_which_a_worker_is_killed_at_a_random_moment_end_with_the_same_weights(
    job: Job, undisturbed: Path
) -> None:
    chaos = (
        f"kill:{random.randrange(2)}@{random.randrange(500, 2800)}ms"  # between the start and step 120 at the earliest
    )
    words = ["--nnodes", 2, "--nproc-per-node", 1, "--simulate", "--max-restarts", 1, "--chaos", chaos]
    options = ["--checkpoint", "killed.pt", "--pause", 0.02, "--same-as", undisturbed]
    result = launched(job, *words, EXAMPLE, *options)
    assert result.status == 0, f"{chaos}\n{result.err}"
    assert "ddplaunch: chaos: killed rank" in result.err, chaos
    assert re.search(r"start 1: 2 workers begin after step \d+ of 120", result.out), chaos
    assert SAME.search(result.out), chaos


@pytest.mark.slow
def test_a_run_that_was_ended_within_an_epoch_has_other_weights_until_it_has_gone_on(
    job: Job, undisturbed: Path
) -> None:
    words = [EXAMPLE, "--checkpoint", "ended.pt", "--same-as", undisturbed]
    early = launched(job, *words, "--steps", 50, "--target", 0)
    assert early.status in AFTER_EXCEPTION
    assert re.search(r"RuntimeError: rank 0: a weight is off by \S+ from that in", early.err)

    late = launched(job, "--nproc-per-node", 2, *words)
    assert late.status == 0, late.err
    assert "start 0: 2 workers begin after step 50 of 120" in late.out
    assert SAME.search(late.out)
