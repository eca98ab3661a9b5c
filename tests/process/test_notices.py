"""`--notice-file`, `--notice-command` and `--stop-file`: notices without a signal. What looks for them ends with the job."""

import os
import signal

import pytest

from tests.conftest import until


def test_a_file_that_appears_gives_the_workers_the_notice_and_they_save_and_leave(job, program):
    path = job.home / "notice"
    job.start("--nproc-per-node", 2, "--notice-file", path, program("leaves"))
    job.signs("ready", 2)
    path.touch()
    result = job.wait().expect(138)
    assert "2 workers left after SIGUSR1" in result.err, "and have not finished"
    assert job.signs("got", 2) == ["SIGUSR1", "SIGUSR1"]
    assert f"ddplaunch: --notice-file {path}: SIGUSR1 to the workers\n" in result.err
    assert [event["text"] for event in job.events("notice")] == [f"--notice-file {path}"]
    job.nothing_left()


def test_a_signal_that_is_no_notice_stays_none(job, program):
    job.start("--nproc-per-node", 1, "--notice-file", job.home / "notice", program("leaves"))
    job.signs("ready", 1)
    job.process.send_signal(signal.SIGUSR1)
    assert "1 worker finished" in job.wait().expect(0).err


def test_a_worker_that_the_notice_kills_has_left_as_well(job, program):
    """It may have saved, and be about to exit: each agent looks for the file by itself."""
    path = job.home / "notice"
    job.start("--nproc-per-node", 2, "--notice-file", path, program("leaves"), "1=dies")
    job.signs("ready", 2)
    path.touch()
    assert "2 workers left after SIGUSR1" in job.wait().expect(138).err
    job.nothing_left()


def test_a_file_that_was_there_before_is_no_notice_until_it_changes(job, program):
    path = job.home / "notice"
    path.touch()
    job.start(
        "--nproc-per-node",
        1,
        "--notice-file",
        path,
        "--requeue-on",
        "USR2",
        "--forward-signals",
        "USR2",
        program("behave"),
        "0=polite",
    )
    job.sign("ready-0")
    assert job.got(0) == []
    path.write_text("now")
    until(lambda: job.got(0) == ["SIGUSR2"], "the first signal of --requeue-on")
    job.process.terminate()
    job.wait()
    job.nothing_left()


def test_a_command_that_succeeds_gives_the_notice_and_one_that_hangs_ends_with_the_job(job, program):
    command = f"test -e {job.home}/notice || exec sleep 1000"
    job.start("--nproc-per-node", 1, "--notice-command", command, program("leaves"))
    job.sign("ready-0")
    (job.home / "notice").touch()
    job.wait().expect(138)
    assert job.sign("got-0") == "SIGUSR1"
    assert "warning" not in job.run("--notice-command", "sleep 1000", program("behave"), "all=done").expect(0).err
    job.nothing_left()


@pytest.mark.parametrize("option", [("--notice-command", "/nonexistent"), ("--notice-file", "name" * 99)])
def test_what_can_give_no_notice_is_named_once_and_the_job_goes_on(job, program, option):
    job.behave("0=polite", workers=1, options=option)
    warning = next(line for line in job.process.stderr if b"warning" in line).decode()
    assert warning.startswith(f"ddplaunch: warning: {option[0]} {option[1]}: ")
    assert warning.endswith(". ddplaunch tries again\n")
    job.process.terminate()
    assert "warning" not in job.wait().err
    job.nothing_left()


def test_an_error_of_the_disk_that_passes_is_named_once_and_the_file_is_looked_at_again(job, program):
    path = job.home / "notice"
    path.symlink_to(path)
    job.start("--nproc-per-node", 1, "--notice-file", path, program("leaves"))
    warning = next(line for line in job.process.stderr if b"warning" in line).decode()
    assert "too many levels of symbolic links. ddplaunch tries again" in warning
    job.sign("ready-0")
    (job.home / "new").touch()
    (job.home / "new").replace(path)
    assert "warning" not in job.wait().expect(138).err
    job.nothing_left()


@pytest.mark.parametrize("option", ["--notice-file", "--stop-file"])
def test_a_folder_in_place_of_the_file_is_one_error_before_the_start(job, program, option):
    for nodes in ((), ("--nnodes", 2, "--simulate")):
        err = job.run(*nodes, option, job.home, program("behave")).err
        assert err.count("error") == 1
        assert (
            f"{option} {job.home} is a folder\n\nhint: name a file in it: `{option} {job.home}/{option[2:-5]}`" in err
        )


@pytest.mark.parametrize("option", ["--notice-file", "--stop-file"])
def test_a_folder_that_is_not_there_is_named_and_waited_for(job, program, option):
    path = job.home / "later" / "notice"
    job.start("--nproc-per-node", 1, option, path, program("leaves"))
    warning = next(line for line in job.process.stderr if b"warning" in line).decode()
    assert warning == f"ddplaunch: warning: {option} {path}: there is no folder {path.parent} yet\n"
    job.sign("ready-0")
    path.parent.mkdir()
    path.touch()
    job.wait().expect(138 if option == "--notice-file" else 143)
    job.nothing_left()


def test_a_stop_file_stops_all_nodes_of_a_job_that_nobody_reaches(job, program):
    path = job.home / "stop"
    job.behave(nodes=2, workers=1, options=("--stop-file", path))
    path.touch()
    assert job.wait().expect(143).err.count(f"--stop-file {path}: SIGTERM to the workers\n") == 1
    job.nothing_left()


def test_a_stop_file_stops_a_job_for_good_that_its_signal_would_requeue(job, program):
    path = job.home / "stop"
    job.start("--nproc-per-node", 1, "--requeue-on", "TERM,USR1", "--stop-file", path, program("leaves"))
    job.sign("ready-0")
    path.touch()
    err = job.wait().expect(143).err
    assert job.sign("got-0") == "SIGTERM"
    assert "ddplaunch: stopped by SIGTERM after" in err
    assert "requeue" not in err
    job.nothing_left()


def test_a_node_of_an_elastic_job_leaves_after_its_notice_and_the_others_go_on(nodes, program):
    last_call = ("--rdzv-conf", "last_call_timeout=60")
    args = ("--nproc-per-node", 1, *last_call, program("restarts"), "stays_until_told")
    files = [nodes.home / f"notice-{place}" for place in range(2)]
    started = [
        nodes.node(*nodes.c10d("1:2"), "--node-rank", place, "--notice-file", files[place], *args) for place in range(2)
    ]
    for rank in range(2):
        nodes.place(rank, 0)
    files[1].touch()
    assert nodes.statuses(started[1]) == [143]
    named = f"ddplaunch: --notice-file {files[1]}: SIGTERM to the workers on {os.uname().nodename}\n"
    assert [named in node.err for node in started] == [False, True]
    assert nodes.place(0, 1)["WORLD_SIZE"] == "1"
    (nodes.home / "signs" / "go").touch()
    assert nodes.statuses(started[0]) == [0]


def test_a_stop_file_stops_an_elastic_job_as_a_whole(nodes, program):
    """Its SIGTERM alone would have node 0 leave the job, which goes on."""
    path = nodes.home / "stop"
    args = ("--stop-file", path, "--nproc-per-node", 1, program("restarts"), "stays_until_told")
    started = [nodes.node(*nodes.static("1:3", place), *args) for place in range(3)]
    for rank in range(3):
        nodes.place(rank, 0)
    path.touch()
    assert nodes.statuses() == [143] * 3
    assert "".join(node.err for node in started).count(f"--stop-file {path}: SIGTERM") == 1
