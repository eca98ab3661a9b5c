"""Steps, and a rank that comes late to each of them, are found by real recorders of torch without a word in the script."""

import json
from importlib.util import find_spec

import pytest

from ddplaunch.cli import main
from ddplaunch.record.events import SCHEMA
from ddplaunch.system import exitcodes
from tests.conftest import until

pytestmark = [
    pytest.mark.usefixtures("light_torch"),
    pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed"),
]


def test_a_rank_that_the_others_wait_for_is_named_in_ps_in_the_record_and_at_the_end(job, program, monkeypatch, capsys):
    monkeypatch.setenv("XDG_STATE_HOME", job.env["XDG_STATE_HOME"])
    nodes = ("--simulate", "--nnodes", 2, "--nproc-per-node", 2, "--start-method", "forkserver", "--preload", "torch")
    job.start(*nodes, "--straggler-check", "1s", program("torch_late"))

    def shown(*options: str) -> str:
        assert main.main(["ps", *options]) == 0
        return str(capsys.readouterr().out)

    def has_named(run: dict[str, object]) -> bool:
        """On a busy machine another rank may come last for a while, or none make any step."""
        return str(run.get("straggler")).startswith("rank 2 on ") and bool(run.get("steps_per_second"))

    until(lambda: any(map(has_named, json.loads(shown("--json")))), "the straggler")
    until(lambda: "steps/s" in (text := shown()) and "rank 2 on " in text, "the same for people")
    (job.home / "signs" / "enough").touch()
    result = job.wait().expect(0)
    lines = [line for line in result.err.splitlines() if " came last to the collectives in " in line]
    assert "rank 2 on " in lines[-1]
    folder = job.folder  # of the command, which coordinates
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    named = [event for event in events if event["event"] == "straggler"]
    assert named  # another rank first, perhaps: then no word of this one for five minutes
    assert len(lines) == len(named) + 1  # and one at the end
    assert named[0].keys() == {"v", "event", "at", "mono", *SCHEMA["straggler"]}
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["straggler"]["rank"] == 2
    assert summary["straggler"]["seconds"] > 0.02


def test_steps_that_only_the_collectives_show_are_known_and_give_no_restart_back(job, program, monkeypatch, capsys):
    monkeypatch.setenv("XDG_STATE_HOME", job.env["XDG_STATE_HOME"])
    limits = ("--straggler-check", "1s", "--max-restarts", 9, "--max-no-progress", 1)
    figures = job.home / "job.prom"
    job.start("--nproc-per-node", 2, *limits, "--metrics-file", figures, program("torch_late"), 3)

    def shown() -> str:
        assert main.main(["ps"]) == 0
        return str(capsys.readouterr().out)

    until(lambda: ", about step " in shown(), "about how many steps there were")
    (job.home / "signs" / "enough").touch()
    result = job.wait().expect(exitcodes.NO_PROGRESS)
    assert "made no step that ddplaunch knows of (--max-no-progress)" in result.err
    summary = json.loads((job.folder / "summary.json").read_text())
    assert summary["steps"] > 0
    assert summary["restarts"] == 0
    assert [worker["progress"] for worker in summary["workers"]] == [None, None]
    [step] = [line for line in figures.read_text().splitlines() if line.startswith("ddplaunch_step{")]
    assert step.endswith(f',source="collectives"}} {summary["steps"]}')
