"""`ddplaunch profile`: a running job is profiled as it is, and comes to the same results; what fails in a rank stops nothing."""

import gzip
import json
import re
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

from ddplaunch.cli import main
from ddplaunch.record.folders import short
from tests.conftest import Result

pytestmark = [
    pytest.mark.usefixtures("light_torch"),
    pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed"),
]


# torch numbers the collectives of gloo
IS_RECORDED = find_spec("torch") is None or tuple(map(int, version("torch").split(".")[:2])) >= (2, 13)


@pytest.fixture
def profile(job, monkeypatch, capsys):
    """Profile the job."""
    monkeypatch.setenv("XDG_STATE_HOME", job.env["XDG_STATE_HOME"])

    def call(*words: str) -> Result:
        status = main.main(["profile", short(job.folder.name), *words])
        out, err = capsys.readouterr()
        return Result(status, out, err, 0.0)

    return call


def begin(job, program, how: str, steps: int, *options: object, waits: str = "waits") -> None:
    """Start two ranks that wait near their end until it is enough."""
    job.start("--nproc-per-node", 2, *options, program("torch_profiled"), how, steps, waits)
    job.signs("ready", 2)


def digests(job) -> list[str]:
    (job.home / "signs" / "enough").touch()
    found = re.findall(r"digest (\d+)", job.wait().expect(0).out)
    job.nothing_left()
    return found


def test_a_job_on_two_nodes_is_profiled_into_one_trace_and_comes_to_the_same_losses(job, program, profile, tmp_path):
    begin(job, program, "plain", 80, "--nnodes", 2, "--nproc-per-node", 1, "--simulate", waits="profiled")
    path = tmp_path / "trace.json.gz"
    shown = profile("--steps", "10", "--out", str(path))
    assert shown.status == 0, shown.err
    with_profile = digests(job)
    job.start("--nproc-per-node", 2, program("torch_profiled"), "plain", 80)
    assert digests(job) == with_profile

    assert str(path) in shown.out
    entries = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    names = {entry["args"]["name"] for entry in entries if entry["name"] == "process_name"}
    assert {"rank 0 on node-0", "rank 1 on node-1", "node 0: node-0"} <= names
    assert sum(entry.get("name") == "generation 0" for entry in entries) == 3
    if not IS_RECORDED:
        assert "no collective could be joined, since torch has not numbered them" in shown.out
        return
    assert re.search(r"the others wait for rank 1 for \d+% of the time, \d+ ms of each step", shown.out)
    program_lines = Path(program("torch_profiled")).read_text().splitlines()
    sleeps = next(at for at, text in enumerate(program_lines, 1) if "time.sleep" in text)
    assert f"torch_profiled.py:{sleeps} " in shown.out
    arrows = [entry for entry in entries if entry.get("cat") == "collective"]
    assert len(arrows) >= 10
    ends = {entry["id"]: entry for entry in arrows if entry["ph"] == "f"}
    assert all(entry["ts"] <= ends[entry["id"]]["ts"] for entry in arrows if entry["ph"] == "s")


def test_a_rank_is_profiled_between_two_calls_of_backward_where_it_spends_its_time(job, program, profile):
    begin(job, program, "hook", 60)
    shown = profile("-r", "1", "--steps", "3")
    assert re.search(r"^ +1 +\S+ +([2-9]|[1-4]\d) ", shown.out, re.MULTILINE), shown
    digests(job)


def test_one_step_that_is_asked_for_is_recorded_as_a_whole_by_all_ranks(job, program, profile):
    begin(job, program, "plain", 60)
    shown = profile("--steps", "1")
    assert "profiling 2 ranks for 1 step\n" in shown.err
    # at least one on each rank; more end before a busy machine notices
    assert len(re.findall(r"^ +[01] +\S+ +[1-9] ", shown.out, re.MULTILINE)) == 2, shown
    digests(job)


def test_a_program_that_profiles_itself_is_left_alone(job, program, profile):
    begin(job, program, "profiles", 20)
    assert "each of ranks 0-1 is being profiled by its own program" in profile("--seconds", "1").err
    digests(job)


def test_memory_and_ranks_without_torch_are_told_of(job, program, profile):
    begin(job, program, "plain", 30)
    shown = profile("--seconds", "0.2", "--memory")
    assert "no history of memory: each of ranks 0-1 uses no CUDA" in shown.out
    digests(job)


def test_a_program_that_ends_meanwhile_ends_well(job, program, profile):
    begin(job, program, "plain", 40, waits="profiled")
    (job.home / "signs" / "enough").touch()
    assert "each of ranks 0-1 has ended, or was lost" in profile("--seconds", "60").err
    digests(job)
