"""DDPLAUNCH_TERM: the same in all workers of a generation, greater in each later one and in each later run."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

import ddplaunch
from tests.conftest import Job, events_in
from tests.nodes import Nodes
from tests.programs import functions

FAILS_ONCE = """
import os, sys, time
generation, rank = (os.environ[name] for name in ("TORCHELASTIC_RESTART_COUNT", "RANK"))
folder = os.environ["DDP_TEST_DIR"]
with open(f"{folder}/term-{generation}-{rank}.part", "w") as file:
    file.write(os.environ.get("DDPLAUNCH_TERM", "none"))
os.rename(file.name, file.name[:-5])
while not all(os.path.exists(f"{folder}/term-{generation}-{one}") for one in range(int(os.environ["WORLD_SIZE"]))):
    time.sleep(0.01)
sys.exit(generation == "0" and rank == "1")
"""


@pytest.fixture
def train(job: Job) -> Path:
    """The script of a job of 4 workers that fails once."""
    script = job.home / "train.py"
    script.write_text(FAILS_ONCE)
    return script


def terms_of_both(job: Job) -> list[int]:
    """Return the terms of both generations, in which all 4 workers agree; forget them."""
    found = [{job.sign(f"term-{generation}-{rank}") for rank in range(4)} for generation in (0, 1)]
    assert [len(terms) for terms in found] == [1, 1], found
    for sign in (job.home / "signs").iterdir():
        sign.unlink()
    return [int(terms.pop()) for terms in found]


def recorded(folder: Path) -> tuple[list[Any], Any]:
    """The terms in events.jsonl and summary.json of a node."""
    started = [event["term"] for event in events_in(folder, "generation_started")]
    return started, json.loads((folder / "summary.json").read_text())["term"]


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_terms_grow_from_start_to_start_and_from_run_to_run(job: Job, train: Path, method: str) -> None:
    before = time.time_ns() // 1_000_000
    terms = []
    for _ in range(2):
        words = ("--nproc-per-node", 4, "--start-method", method, "--preload", "json", "--max-restarts", 1)
        job.run(*words, train).expect(0)
        of_run = terms_of_both(job)
        assert recorded(job.folder) == (of_run, of_run[-1])
        terms += of_run
    assert before <= terms[0] < terms[1] < terms[2] < terms[3]


@pytest.mark.parametrize("nnodes", ["2", "1:2"])
def test_the_workers_of_all_nodes_have_one_term(job: Job, train: Path, nnodes: str) -> None:
    job.run("--nnodes", nnodes, "--nproc-per-node", 2, "--simulate", "--max-restarts", 1, train).expect(0)
    first, second = terms_of_both(job)
    assert second > first >= (time.time_ns() // 1_000_000) - 600_000
    for node in range(2):
        assert recorded(job.folder / f"node-{node}") == ([first, second], second)


def test_nodes_that_were_started_by_hand_have_the_term_of_node_0_also_when_all_are_started_again(nodes: Nodes) -> None:
    train = nodes.home / "train.py"
    train.write_text(FAILS_ONCE)
    terms = []
    for _ in range(2):
        nodes.static_nodes(2, "--nproc-per-node", 2, "--max-restarts", 1, train)
        assert set(nodes.statuses()) == {0}
        terms += terms_of_both(nodes)
    assert terms == sorted(set(terms))


def test_nodes_that_do_not_communicate_have_no_term(nodes: Nodes, program) -> None:
    nodes.node(*nodes.static(2, 1), "--no-control", "--nproc-per-node", 2, program("place"))
    assert nodes.statuses() == [0]
    for rank in (2, 3):
        assert "DDPLAUNCH_TERM" not in json.loads(nodes.sign(f"place-{rank}"))["variables"]
    assert recorded(nodes.folder_of(1)) == ([None], None)


def test_functions_have_a_term_that_grows_from_call_to_call(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(job.home)
    monkeypatch.setenv("XDG_STATE_HOME", str(job.home / "state"))
    first, second = (ddplaunch.launch(functions.variable, ("DDPLAUNCH_TERM",), nproc_per_node=2) for _ in range(2))
    assert len(set(first)) == len(set(second)) == 1
    assert int(first[0]) < int(second[0])


def test_the_ranks_of_a_check_have_one_term(job: Job) -> None:
    (job.home / "train.py").write_text(
        "import os; open('term-' + os.environ['RANK'], 'w').write(os.environ['DDPLAUNCH_TERM'])"
    )
    job.start("check", "--world-size", 4, "--nproc-per-node", 2, "train.py")
    job.wait().expect(0)
    terms = {path.read_text() for path in job.home.glob("term-*")}
    assert len(terms) == 1
    assert int(terms.pop()) > 0
