"""A real Trainer of transformers says how far it is, without a word in the script."""

import json

import pytest

from ddplaunch.cli import main
from tests.conftest import until
from tests.torch.test_drop_in import FORKED, TORCH, needs


@needs("transformers", "accelerate")
@pytest.mark.skipif(TORCH < (2, 6), reason="transformers 5 needs torch 2.6")
@pytest.mark.parametrize("start", [(), FORKED], ids=["fresh", "forked"])
def test_the_steps_of_a_trainer_are_known(job, program, monkeypatch, capsys, start):
    monkeypatch.setenv("XDG_STATE_HOME", job.env["XDG_STATE_HOME"])
    monkeypatch.setitem(job.env, "HF_HUB_OFFLINE", "1")
    monkeypatch.setitem(job.env, "HF_HOME", str(job.home / "hub"))
    preload = (*start, "transformers.trainer") if start else ()
    job.start("--nproc-per-node", 2, *preload, program("bars_of"), "transformers", job.home / "out")
    job.sign("half-0", 120)
    job.sign("half-1", 120)

    def shown() -> dict[str, object] | None:
        main.main(["ps", "--json"])
        [run] = [run for run in json.loads(capsys.readouterr().out) if run["run_id"] == job.folder.name]
        told: dict[str, object] | None = run["workers"][0]["progress"]
        return told

    told = until(lambda: (now := shown()) and now["source"] == "trainer" and now, "what the Trainer says")
    assert (told["total"], told["first_step"]) == (30, 1)
    assert told["step"] in (15, 16)  # the callback that waits for the sign may come before ours
    (job.home / "signs" / "go").touch()
    assert job.wait(120).status == 0
    of_0, of_1 = json.loads((job.folder / "summary.json").read_text())["workers"]
    assert (of_0["progress"]["step"], of_0["progress"]["source"]) == (30, "trainer")
    assert of_1["progress"] is None
    job.nothing_left()
