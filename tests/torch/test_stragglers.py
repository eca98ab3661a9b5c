"""A rank that comes late to every step is found by real recorders of torch, on two nodes and without a word in the script."""

import json
from importlib.util import find_spec

import pytest

from ddplaunch.cli import main
from ddplaunch.runlog.events import SCHEMA
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
    folder = next(job.folder.glob("*/events.jsonl"), job.folder / "events.jsonl").parent
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    named = [event for event in events if event["event"] == "straggler"]
    assert named  # another rank first, perhaps: then no word of this one for five minutes
    assert len(lines) == len(named) + 1  # and one at the end
    assert named[0].keys() == {"v", "event", "at", "mono", *SCHEMA["straggler"]}
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["straggler"]["rank"] == 2
    assert summary["straggler"]["seconds"] > 0.02
