"""The progress bars that trainers draw by themselves move on a terminal, in place."""

from importlib.util import find_spec

import pytest

from tests.process.terminal import watched
from tests.torch.test_drop_in import FORKED, TORCH, needs

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")


@needs("lightning", "rich")
@pytest.mark.usefixtures("light_torch")
def test_lightnings_bar_which_is_richs_moves(job, program):
    watched(job, "--nproc-per-node", 2, *FORKED, "lightning.pytorch", program("bars_of"), "lightning")


@needs("transformers", "accelerate")
@pytest.mark.skipif(TORCH < (2, 6), reason="transformers 5 needs torch 2.6")
def test_the_bar_of_transformers_moves(job, program, monkeypatch):
    monkeypatch.setitem(job.env, "HF_HUB_OFFLINE", "1")
    monkeypatch.setitem(job.env, "HF_HOME", str(job.home / "hub"))
    args = (
        "--nproc-per-node",
        2,
        *FORKED,
        "transformers.trainer",
        program("bars_of"),
        "transformers",
        job.home / "out",
    )
    watched(job, *args)
