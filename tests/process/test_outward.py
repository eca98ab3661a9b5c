"""`--notify` and `--metrics-file` in a job: what programs outside learn of it, and that neither can hold it up or end it."""

import json
import time

import pytest

from tests.conftest import insist, until


def told(job):
    path = job.home / "told"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_a_job_tells_of_its_start_a_restart_and_its_end_in_order(job, program):
    result = job.run("--notify", f"cat >> {job.home}/told", "--max-restarts", 1, program("behave"), "0=exit3").expect(3)
    assert [one["event"] for one in told(job)] == ["job_started", "generation_failed", "job_ended"]
    end = told(job)[-1]
    assert (end["status"], end["why"]) == (3, "failed")
    assert f"error: {end['text']}" in result.err
    assert job.folder.name == end["run_id"]
    job.nothing_left()


def test_of_several_nodes_the_first_tells(job, program):
    options = ("--nnodes", 2, "--simulate", "--notify", f"cat >> {job.home}/told")
    job.run(*options, program("behave"), "all=done").expect(0)
    assert [one["event"] for one in told(job)] == ["job_started", "job_ended"]
    job.nothing_left()


@pytest.mark.parametrize("command", ["/nonexistent", "yes; true", "sleep 1000 & exit 1", "kill -9 $$"])
def test_a_command_that_fails_or_floods_is_named_once_and_the_job_goes_on(job, program, command):
    result = job.run("--notify", command, program("behave"), "all=done").expect(0)
    assert result.err.count("warning: --notify") == 1, result.err
    assert result.seconds < 40
    job.nothing_left()


def test_who_stops_the_job_again_does_not_wait_for_the_command(job, program):
    job.behave(options=("--notify", f"cat >> {job.home}/told; test $(wc -l < {job.home}/told) = 1 || exec sleep 1000"))
    until(lambda: told(job), "the start to be told")
    job.process.terminate()
    until(lambda: told(job)[1:], "the end to be told")
    began = time.monotonic()
    insist(job.process)
    assert job.wait().status == 143
    assert time.monotonic() - began < 9
    job.nothing_left(2)


def test_an_agent_whose_front_was_killed_has_one_limit_for_all_that_its_command_is_to_be_told(job, program):
    hangs = f"cat >> {job.home}/told; exec sleep 1000"
    job.start("--notify", hangs, "--max-restarts", 3, program("behave"), "0=exit3")
    until(lambda: job.events("generation_failed")[2:], "events that wait for the command")
    job.process.kill()
    job.process.wait()
    began = time.monotonic()
    job.nothing_left(60)
    assert time.monotonic() - began < 30
    assert [one["event"] for one in (told(job)[0], told(job)[-1])] == ["job_started", "job_ended"]


def test_the_file_of_figures_says_how_far_the_job_was_and_how_it_ended(job, program):
    path = job.home / "job.prom"
    job.start("--nproc-per-node", 2, "--metrics-file", path, program("steps"))
    job.sign("ready-1")
    until(path.exists, "the figures")
    assert " 1\n" in "".join(line for line in path.read_text().splitlines(True) if "ddplaunch_running{" in line)
    (job.home / "signs" / "seen").touch()
    assert job.wait().status == 3
    values = {line.split("{")[0]: line.split()[-1] for line in path.read_text().splitlines() if line[0] != "#"}
    assert (values["ddplaunch_running"], values["ddplaunch_exit_status"]) == ("0", "3")
    assert (values["ddplaunch_step"], values["ddplaunch_steps"], values["ddplaunch_workers"]) == ("5", "1000", "2")
    assert float(values["ddplaunch_start_timestamp_seconds"]) <= float(
        values["ddplaunch_last_progress_timestamp_seconds"]
    )
    assert [file.name for file in job.home.glob("job.prom*")] == ["job.prom"]
    job.nothing_left()


@pytest.mark.parametrize("nodes", [(), ("--nnodes", 2, "--simulate")], ids=["one node", "two"])
def test_the_last_figures_say_how_far_the_bar_of_a_worker_was_at_its_end(job, program, nodes):
    path = job.home / "job.prom"
    job.start(*nodes, "--metrics-file", path, program("bar_to_its_end"))
    job.sign("ready-0")
    until(path.exists, "the first figures")
    ended_after = time.time()
    (job.home / "signs" / "seen").touch()
    job.wait().expect(0)
    values = {line.split("{")[0]: line.split()[-1] for line in path.read_text().splitlines() if line[0] != "#"}
    assert (values["ddplaunch_running"], values["ddplaunch_step"], values["ddplaunch_steps"]) == ("0", "100", "100")
    assert float(values["ddplaunch_last_progress_timestamp_seconds"]) >= ended_after - 0.1
    job.nothing_left()


def test_figures_that_cannot_be_written_are_named_once(job, program):
    result = job.run("--metrics-file", job.home / "none" / "job.prom", program("behave"), "all=done").expect(0)
    assert result.err.count("could not be written: No such file or directory") == 1
    job.nothing_left()
