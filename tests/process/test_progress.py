"""`ddplaunch.progress()` in a job: `ps` shows how far it is, and its run folder keeps what each worker said last."""

import json

from ddplaunch.cli import main
from tests.conftest import until
from tests.process.test_run_verbs import socket_of


def test_how_far_a_job_is_stands_in_ps_and_in_its_folder(job, program, monkeypatch, capsys):
    monkeypatch.setenv("XDG_STATE_HOME", job.env["XDG_STATE_HOME"])
    job.start("--nproc-per-node", "2", "--max-restarts", "1", program("steps"))
    job.sign("ready-1")
    job.sign("ready-0")
    name = socket_of(job)

    def asked(*options: str):
        main.main(["ps", *options])
        return capsys.readouterr().out

    until(lambda: "42/100" in asked(), "the bar of rank 1")
    shown = asked()
    assert ", step 5 of 1,000 (0%), loss " in shown
    assert "5/1,000" in shown
    [run] = [run for run in json.loads(asked("--json")) if run["run_id"] == name]
    scripted, bar = (worker["progress"] for worker in run["workers"])
    assert (scripted["source"], scripted["step"], scripted["total"], scripted["first_step"]) == ("script", 5, 1000, 1)
    assert list(scripted["metrics"]) == ["loss"]
    assert (bar["source"], bar["step"], bar["total"]) == ("bar", 42, 100)

    (job.home / "signs" / "seen").touch()
    assert job.wait().status == 0
    before, after = (event["progress"] for event in job.events("worker_exited") if event["rank"] == 0)
    assert (before["first_step"], before["step"]) == (1, 5)
    assert (after["first_step"], after["step"]) == (4, 5)
    [of_0, of_1] = json.loads((job.folder / "summary.json").read_text())["workers"]
    assert of_0["progress"]["step"] == 5
    assert of_1["progress"] is None
    job.nothing_left()
