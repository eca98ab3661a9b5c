"""A rank that comes late to every step is found by real recorders of torch, on two nodes and without a word in the script."""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest

from ddplaunch.cli import main
from ddplaunch.report.events import SCHEMA
from tests.conftest import until

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")


def test_a_rank_that_the_others_wait_for_is_named_in_ps_in_the_record_and_at_the_end(job, program, monkeypatch, capsys):
    monkeypatch.setenv("XDG_STATE_HOME", job.env["XDG_STATE_HOME"])
    job.start("--simulate", "--nnodes", 2, "--nproc-per-node", 2, "--straggler-check", "1s", program("torch_late"))

    def shown() -> list[dict[str, object]]:
        assert main.main(["ps", "--json"]) == 0
        return [run for run in json.loads(capsys.readouterr().out) if run.get("straggler")]

    (run,) = until(shown, "the straggler")
    assert run["straggler"].startswith("rank 2 on ")
    assert 1 < run["steps_per_second"] < 50
    assert main.main(["ps"]) == 0
    text = capsys.readouterr().out
    assert "steps/s" in text
    assert "rank 2 on " in text
    (job.home / "signs" / "enough").touch()
    result = job.wait()
    assert result.status == 0
    lines = [line for line in result.err.splitlines() if " came last to the collectives in " in line]
    assert len(lines) == 2
    folder = next(job.folder.glob("*/events.jsonl"), job.folder / "events.jsonl").parent
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    (event,) = [event for event in events if event["event"] == "straggler"]
    assert event["rank"] == 2
    assert event.keys() == {"v", "event", "at", "mono", *SCHEMA["straggler"]}
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["straggler"]["rank"] == 2
    assert summary["straggler"]["seconds"] > 0.02
    job.nothing_left()
