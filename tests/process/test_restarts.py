"""--max-restarts: what one generation leaves to the next, and how it ends when there is no next one."""

import json
import os
import subprocess
from signal import SIGINT, SIGKILL, SIGTERM

import pytest

from tests.conftest import PATIENCE, PROGRAMS, Job, Result, until


@pytest.fixture
def run(job, program):
    """Run restarts.py with 3 workers, then prove that nothing is left."""

    def run(*behaviour: object, restarts: int = 2, options: tuple[object, ...] = ()):
        result = job.run("--nproc-per-node", 3, "--max-restarts", restarts, *options, program("restarts"), *behaviour)
        job.nothing_left()
        return result

    return run


def places(job, generation: int) -> list[dict[str, str]]:
    """What each rank of a generation found in its environment."""
    return [json.loads(job.sign(f"place-{generation}-{rank}")) for rank in range(3)]


@pytest.fixture(scope="module")
def restarted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Job]:
    """A job of 3 workers that fails twice and then ends well."""
    job = Job(tmp_path_factory.mktemp("restarted"))
    flags = ("--nproc-per-node", 3, "--max-restarts", 2)
    result = job.run(*flags, PROGRAMS / "restarts.py", "fails_until", 2)
    job.nothing_left()
    return result, job


def test_after_a_failure_all_workers_start_again_with_the_same_ranks(restarted):
    result, job = restarted
    assert result.status == 0
    assert result.err.count("starting all workers again") == 2
    assert "3 workers finished" in result.err
    for generation in range(3):
        for rank, place in enumerate(places(job, generation)):
            assert (place["RANK"], place["LOCAL_RANK"], place["WORLD_SIZE"]) == (str(rank), str(rank), "3")
            assert place["TORCHELASTIC_RESTART_COUNT"] == str(generation)
            assert place["TORCHELASTIC_MAX_RESTARTS"] == "2"
    pids = {place["pid"] for generation in range(3) for place in places(job, generation)}
    assert len(pids) == 9


def test_each_generation_reserves_a_port_and_writes_errors_to_files_of_its_own(restarted):
    _, job = restarted
    ports = [{place["MASTER_PORT"] for place in places(job, generation)} for generation in range(3)]
    assert [len(ports_) for ports_ in ports] == [1, 1, 1]
    assert len(set.union(*ports)) > 1  # the kernel may hand one out twice, though it hardly ever does
    files = {place["TORCHELASTIC_ERROR_FILE"] for generation in range(3) for place in places(job, generation)}
    assert len(files) == 9


def test_the_others_of_a_generation_are_gone_before_the_next_one_starts(restarted):
    _, job = restarted
    for generation, end in enumerate(job.events("generation_failed")):
        assert end["generation"] == generation
    alive: set[int] = set()
    for event in job.events("worker_started", "worker_exited", "generation_started"):
        match event["event"]:
            case "generation_started":
                assert not alive
            case "worker_started":
                alive.add(event["pid"])
            case "worker_exited":
                alive.remove(event["pid"])


def test_when_no_restart_is_left_the_last_failure_gives_the_status(run, job):
    result = run("fails_until", 9).expect(12)
    assert [line for line in result.err.splitlines() if line.startswith("error: ")] == [
        line for line in result.err.splitlines() if "rank 1 failed: exit status 1" in line
    ]
    assert result.err.count("rank 1 failed: exit status 1") == 3
    failures = [(event["rank"], event["wait"]) for event in job.events("generation_failed")]
    assert failures == [(1, 0), (1, 1)], "the second one, which died at once, makes the next one wait"
    assert json.loads((job.folder / "summary.json").read_text())["restarts"] == 2


@pytest.mark.parametrize("first_line", ["import torhc", "def main(:"], ids=["a missing module", "a syntax error"])
def test_a_script_whose_first_lines_fail_on_all_ranks_is_not_started_again_and_it_is_said_why(job, first_line):
    (job.home / "train.py").write_text(f"{first_line}\n")
    result = job.run("--nproc-per-node", 3, "--max-restarts", 10, "train.py")
    job.nothing_left()
    assert result.status == 1
    assert "failed at the same import in the first lines of the program" in result.err
    # a rank that takes seconds longer than the others is stopped before
    assert len(job.events("generation_started")) <= 2


def test_what_a_worker_left_behind_is_ended_between_the_generations(run, job):
    assert run("leaves_something", restarts=1).status == 3
    assert json.loads(job.sign("still-there")) == []


def test_a_worker_that_ignores_the_stop_is_killed_before_the_next_generation(job, program):
    result = job.run(
        "--nproc-per-node", 2, "--max-restarts", 1, "--grace-period", "0.2", program("behave"), "0=stubborn", "1=exit3"
    )
    assert result.status == 3
    assert len(job.events("kill_sent")) == 2


def test_workers_that_write_and_die_at_once_can_be_started_again(job):
    """Their pipes end in the very moment in which they do."""
    command = ("--no-python", "/bin/sh", "-c", "echo out; echo err >&2; exit 3")
    result = job.run("--nproc-per-node", 4, "--max-restarts", 2, *command).expect(3)
    assert len(job.events("generation_started")) == 3
    logs = "".join(log.read_text() for log in job.folder.glob("rank-*.out"))
    assert result.out.count("out") == logs.count("out") >= 3


@pytest.fixture
def back_off(job, program):
    """Start a job that fails again and again, and wait until it waits for two seconds."""

    def back_off(**popen):
        process = job.behave("1=exit3", options=("--max-restarts", 9), **popen)
        until(lambda: [event for event in job.events("generation_failed") if event["wait"] >= 2], "a back-off")
        return process

    return back_off


def test_a_signal_while_the_next_generation_is_waited_for_ends_the_job_at_once(job, back_off):
    back_off().send_signal(SIGINT)
    assert job.wait().status == 130
    assert_ended_at_once_after(job, "signal_received")
    assert job.events("job_ended")[0]["why"] == "signalled"


def test_a_killed_front_ends_the_back_off_too(job, back_off):
    process = back_off(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    process.kill()
    process.wait()
    job.nothing_left(patience=PATIENCE)
    assert_ended_at_once_after(job, "front_lost")


def assert_ended_at_once_after(job, name: str) -> None:
    """The end follows this event: the wait is not waited out, for a generation would start after it."""
    events = job.events()
    (cause,) = job.events(name)
    assert not [event for event in events[events.index(cause) :] if event["event"] == "generation_started"]
    assert events[-1]["event"] == "job_ended"


def test_a_stop_by_the_user_is_no_failure_that_starts_workers_again(job):
    process = job.behave("all=default", options=("--max-restarts", 9))
    process.send_signal(SIGTERM)
    assert job.wait().status == 143
    assert len(job.events("generation_started")) == 1


def test_a_worker_that_a_signal_killed_is_started_again_too(job, program):
    job.start("--nproc-per-node", 3, "--max-restarts", 1, program("restarts"), "stays")
    for generation in range(2):
        os.kill(int(places(job, generation)[0]["pid"]), SIGKILL)
    assert job.wait().status == 137
    assert len(job.events("generation_started")) == 2


def test_the_last_words_of_every_generation_are_shown_even_if_no_logs_are_kept(run):
    result = run("ends_mid_line", options=("--log-dir", os.devnull)).expect(0)
    for rank in range(3):
        assert [line for line in result.out.splitlines() if line.startswith(f"[{rank}]")] == [
            f"[{rank}] last words of 0",
            f"[{rank}] last words of 1",
        ]
