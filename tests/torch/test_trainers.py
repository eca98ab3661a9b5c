"""The trainers of lightning and transformers train one model on both ranks, draw bars that move, and say how far they are."""

import json
from functools import partial
from importlib.util import find_spec

import pytest

from ddplaunch.cli import main
from tests.conftest import Job, until
from tests.process.terminal import watched
from tests.torch.test_drop_in import FORKED, TORCH, needs, told

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")

not_before_2_6 = pytest.mark.skipif(TORCH < (2, 6), reason="transformers 5 needs torch 2.6")


@needs("lightning", "rich")
@pytest.mark.usefixtures("light_torch")
def test_lightnings_trains_one_model_on_both_ranks_and_its_bar_which_is_richs_moves_and_tells_how_far_it_is(
    job, program, monkeypatch, capsys
):
    monkeypatch.setenv("XDG_STATE_HOME", job.env["XDG_STATE_HOME"])
    asked = partial(progress_of_rank_0, job, capsys)

    def is_known() -> None:
        told = until(asked, "how far Lightning is")
        assert told["source"] == "bar"
        assert (told["step"], told["total"]) == (15, 30)

    given = ("--nproc-per-node", 2, *FORKED, "lightning.pytorch", program("bars_of"), "lightning")
    watched(job, *given, at_half=is_known)
    first, second = told(job, "facts")
    assert first["environment"] == second["environment"] == "TorchElasticEnvironment"
    assert (first["rank"], second["rank"]) == (0, 1)
    assert first["world_size"] == second["world_size"] == 2
    assert first["steps"] == second["steps"] == 30
    assert first["weights"] == second["weights"]


def progress_of_rank_0(job: Job, capsys: pytest.CaptureFixture[str]) -> dict[str, object] | None:
    """How far `ddplaunch ps` says that rank 0 is; None while it does not know."""
    main.main(["ps", "--json"])
    [run] = [run for run in json.loads(capsys.readouterr().out) if run["run_id"] == job.folder.name]
    progress: dict[str, object] | None = run["workers"][0]["progress"]
    return progress


class OfTransformers:
    """A job in which a Trainer of transformers makes 30 steps and waits after 15."""

    def __init__(self, job, program, monkeypatch, capsys):
        monkeypatch.setenv("XDG_STATE_HOME", job.env["XDG_STATE_HOME"])
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        monkeypatch.setenv("HF_HOME", str(job.home / "hub"))
        self.words = (program("bars_of"), "transformers", job.home / "out")
        self._job, self._capsys = job, capsys

    def is_known(self) -> None:
        """Prove that `ddplaunch ps` knows how far the Trainer is, without a word in the script."""
        told = until(lambda: (now := self._shown()) and now["source"] == "trainer" and now, "what the Trainer says")
        assert (told["total"], told["first_step"]) == (30, 1)
        assert told["step"] in (15, 16)  # the callback that waits for the sign may come before ours

    def _shown(self) -> dict[str, object] | None:
        return progress_of_rank_0(self._job, self._capsys)


@pytest.fixture
def of_transformers(job, program, monkeypatch, capsys):
    return OfTransformers(job, program, monkeypatch, capsys)


@needs("transformers", "accelerate")
@not_before_2_6
def test_that_of_transformers_trains_one_model_on_both_ranks_its_bar_moves_and_its_steps_are_known(
    job, of_transformers
):
    given = ("--nproc-per-node", 2, *FORKED, "transformers.trainer", *of_transformers.words)
    watched(job, *given, at_half=of_transformers.is_known)
    first, second = told(job, "facts")
    assert (first["rank"], second["rank"]) == (0, 1)
    assert first["world_size"] == second["world_size"] == 2
    assert first["mode"] == "DISTRIBUTED"
    assert first["wrapped"] == "DistributedDataParallel"
    assert first["weights"] == second["weights"]
    of_0, of_1 = json.loads((job.folder / "summary.json").read_text())["workers"]
    assert (of_0["progress"]["step"], of_0["progress"]["source"]) == (30, "trainer")
    assert of_1["progress"] is None


@needs("transformers", "accelerate")
@not_before_2_6
def test_its_steps_are_known_in_a_fresh_process_too(job, of_transformers):
    job.start("--nproc-per-node", 1, *of_transformers.words)
    job.sign("half-0")
    of_transformers.is_known()
    (job.home / "signs" / "go").touch()
    job.wait().expect(0)
