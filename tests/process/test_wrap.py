"""`--wrap`: a command around chosen workers, which are in all else as without it."""

import json
import shlex

import pytest

from tests.conftest import until
from tests.process.test_run_verbs import verb  # noqa: F401 - a fixture


@pytest.fixture
def wrapper(job):
    """Write a shell's wrapper, which runs the worker as a child, as a profiler does; return it with what it is to note."""
    script = job.home / "wrapper"
    script.write_text(
        '#!/bin/sh\nnote=$1; shift\necho "$note" >> "$DDP_TEST_DIR/wrapped"\ntrap : TERM INT\n"$@"; exit $?\n'
    )
    script.chmod(0o755)
    return f"{shlex.quote(str(script))} "


def notes(job):
    path = job.home / "signs" / "wrapped"
    return sorted(path.read_text().splitlines()) if path.exists() else []


def test_chosen_ranks_are_wrapped_with_what_is_theirs(job, program, wrapper):
    wrap = wrapper + "'{rank} {local_rank} {node_rank} {{}} {run}'"
    job.run("--nproc-per-node", 3, "--wrap", wrap, "--wrap-ranks", "0,2", program("behave"), "all=done").expect(0)
    assert notes(job) == [f"0 0 0 {{}} {job.folder}", f"2 2 0 {{}} {job.folder}"]
    plan = json.loads((job.folder / "plan.json").read_text())
    assert [bool(worker["wrap"]) for worker in plan["workers"]] == [True, False, True]
    job.nothing_left()


def test_a_failure_its_status_and_its_report_are_as_without(job, program, wrapper):
    result = job.run("--nproc-per-node", 2, "--wrap", wrapper + "x", program("behave"), "1=raises").expect(1)
    assert "error: rank 1 failed: ValueError: boom of rank 1" in result.err
    assert "behave.py:" in result.err
    assert "the other worker was stopped by SIGTERM" in result.err
    job.nothing_left()


def test_each_generation_is_wrapped_and_a_fork_server_is_not_used(job, program, wrapper):
    options = ("--start-method", "forkserver", "--max-restarts", 1, "--wrap", wrapper + "x", "--wrap-ranks", 1)
    job.run("--nproc-per-node", 2, *options, program("behave"), "0=exit3").expect(3)
    [note] = json.loads((job.folder / "plan.json").read_text())["notes"]
    assert note == "--start-method forkserver has no effect: a worker of --wrap is a fresh process"
    assert notes(job) == ["x", "x"]
    job.nothing_left()


def test_the_stacks_of_a_wrapped_worker_are_shown_and_it_is_stopped(job, verb, wrapper):  # noqa: F811
    job.behave(options=("--wrap", wrapper + "x"))
    until(lambda: len(notes(job)) == 2, "both")
    name = job.folder.name  # there may be jobs of other tests, whose sockets are in the runtime folder of the user
    until(lambda: "behave.py:" in verb("stacks", name).out, "the stacks of what the wrapper has started")
    assert verb("stop", name).status == 0
    assert job.wait(10).status == 130
    job.nothing_left()


def test_a_wrapper_that_is_not_there_is_named(job, program):
    result = job.run("--wrap", "nosuch -x", program("behave"), "all=done").expect(127)
    assert "error: rank 0 could not be started: nosuch: No such file or directory" in result.err
    job.nothing_left()
