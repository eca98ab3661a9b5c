"""A worker has failed for good, and its interpreter still ends: the others are stopped meanwhile, and it keeps its own end."""

from tests.conftest import until


def ends(job) -> dict[int, tuple[str, int | None]]:
    """How each worker has ended, and the signal by which ddplaunch had asked it to, by rank."""
    return {event["rank"]: (event["how"], event["stopped_with"]) for event in job.events("worker_exited")}


def test_the_others_are_stopped_while_the_interpreter_of_the_first_one_ends(job):
    job.behave("0=polite", "1=raises_and_ends_late")
    result = job.wait().expect(1)
    assert job.got(0) == ["SIGTERM"]
    assert ends(job) == {0: ("exit status 0", 15), 1: ("exit status 1", None)}
    assert "error: rank 1 failed: ValueError: boom of rank 1   (exit status 1, " in result.err
    job.nothing_left()


def test_the_workers_of_other_nodes_are_stopped_meanwhile_too(job):
    job.behave("0=polite", "1=raises_and_ends_late", workers=1, nodes=2)
    result = job.wait().expect(1)
    assert job.got(0) == ["SIGTERM"]
    assert "error: rank 1 on node-1 failed: ValueError: boom of rank 1   (exit status 1, " in result.err
    job.nothing_left()


def test_an_interpreter_that_does_not_end_is_stopped_too(job):
    job.behave("1=raises_and_never_ends", options=("--grace-period", "0.5"))
    result = job.wait().expect(1)
    assert "ddplaunch: rank 1 has raised ValueError and does not end: its interpreter hangs\n" in result.err
    assert "error: rank 1 failed: ValueError: boom of rank 1   (" in result.err
    assert ends(job) == {0: ("killed by SIGTERM", 15), 1: ("killed by SIGTERM", 15)}
    job.nothing_left()


def test_an_interpreter_that_does_not_end_is_stopped_where_no_other_worker_runs(job):
    job.behave("0=raises_and_never_ends", workers=1)
    result = job.wait().expect(1)
    assert "ddplaunch: rank 0 has raised ValueError and does not end: its interpreter hangs\n" in result.err
    assert ends(job) == {0: ("killed by SIGTERM", 15)}
    job.nothing_left()


def test_a_worker_that_its_hook_ends_has_the_status_of_that(job):
    job.behave("1=raises_and_leaves_by_its_hook")
    result = job.wait().expect(7)
    assert "error: rank 1 failed: ValueError: boom of rank 1   (exit status 7, " in result.err
    job.nothing_left()


def test_a_worker_that_ends_with_0_after_all_stops_nobody(job):
    job.behave("0=done_when_told", "1=raises_and_leaves_well")
    until(lambda: job.events("worker_exited"), "the end of the worker that has raised")
    (job.home / "signs" / "go").touch()
    job.wait().expect(0)
    assert ends(job) == {0: ("exit status 0", None), 1: ("exit status 0", None)}
    job.nothing_left()


def test_all_start_again_after_it(job):
    job.behave("0=polite", "1=raises_and_ends_late", options=("--max-restarts", 1))
    assert job.wait().expect(1).err.count("boom of rank 1\n") >= 2
    assert [event["stopped_with"] for event in job.events("worker_exited") if event["rank"] == 1] == [None, None]
    job.nothing_left()
