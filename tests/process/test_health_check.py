"""`--health-check`: a node that is not fit takes no part, before the first start and before a restart."""

import os
import time
from pathlib import Path
from signal import SIGHUP, SIGINT, SIGKILL, SIGTERM, SIGUSR1

import pytest

from ddplaunch.launcher.job import turn_away
from ddplaunch.launcher.node.health import why_unfit
from ddplaunch.record import bad_nodes
from ddplaunch.record.folders import bad_nodes_file
from tests.conftest import until

BAD = "echo; echo GPU 2 is off the bus; exit 4"


def test_a_node_that_is_not_fit_starts_nothing_and_node_0_names_it(nodes, program):
    args = ("--nproc-per-node", 1, program("restarts"), "stays")
    good = nodes.node(*nodes.static(2, 0), "--health-check", "true", *args)
    bad = nodes.node(*nodes.static(2, 1), "--health-check", BAD, *args)
    assert nodes.statuses(bad) == [122]
    asked = f"is not fit for the job: --health-check {BAD}: exit status 4: GPU 2 is off the bus"
    assert asked in bad.err
    good.says(asked)
    good.process.terminate()
    assert nodes.statuses(good) == [143]
    assert not nodes.has_sign("place-0-0")


SHOULD_MOVE = "no job begins without node 0: make another node the first one"


@pytest.mark.parametrize("nnodes", [3, "1:3", "2 --spares 1"])
def test_nodes_that_look_for_a_node_0_that_is_not_fit_learn_why_and_end_at_once(nodes, program, nnodes):
    nnodes, *spares = str(nnodes).split()
    args = (*spares, program("restarts"), "stays")
    before = nodes.node(*nodes.static(nnodes, 1), *args)
    before.says("looking for node 0")
    bad = nodes.node(*nodes.static(nnodes, 0), "--health-check", BAD, *args)
    bad.says("is not fit for the job")  # the user knows, while it tells the others
    after = nodes.node(*nodes.static(nnodes, 2), *args)
    assert nodes.statuses() == [122, 122, 122]
    asked = f"{os.uname().nodename} is not fit for the job: --health-check {BAD}: exit status 4: GPU 2 is off the bus"
    for node in (before, after):
        assert node.err.endswith(f"error: node 0 does not take part: {asked}\n\nhint: {SHOULD_MOVE}\n")


@pytest.mark.parametrize("nnodes", [2, "1:2"])
def test_where_the_first_node_on_a_host_is_node_0_it_tells_the_others_too(nodes, program, nnodes):
    bad = nodes.node(*nodes.c10d(nnodes), "--health-check", BAD, program("restarts"), "stays")
    bad.says("is not fit for the job")
    other = nodes.node(*nodes.c10d(nnodes), program("restarts"), "stays")
    assert nodes.statuses(bad, other) == [122, 122]
    assert "error: node 0 does not take part: " in other.err
    assert other.err.endswith(f"\n\nhint: {SHOULD_MOVE}\n")


def test_a_node_that_is_not_fit_leaves_the_others_to_a_node_0_on_its_host_that_is(nodes, program):
    args = ("--spares", 1, "--nproc-per-node", 1, program("restarts"), "stays_until_told")
    first = nodes.node(*nodes.c10d(2), *args)
    nodes.answers()
    bad = nodes.node(*nodes.c10d(2), "--health-check", BAD, *args)
    assert nodes.statuses(bad) == [122]
    other = nodes.node(*nodes.c10d(2), *args)
    nodes.place(1, 0)
    (nodes.home / "signs" / "go").touch()
    assert nodes.statuses(first, other) == [0, 0]


def test_when_all_are_unfit_no_node_waits(nodes, program):
    sick = [
        nodes.node(*nodes.static(3, rank), "--health-check", BAD, program("restarts"), "stays") for rank in range(3)
    ]
    assert nodes.statuses(*sick) == [122, 122, 122]
    for node in sick:
        assert node.err.count("is not fit for the job: ") == 1


@pytest.mark.parametrize("signum", [SIGINT, SIGTERM, SIGKILL])
def test_a_node_0_that_waits_to_tell_others_ends_at_a_signal(nodes, program, signum):
    bad = nodes.node(*nodes.static(2, 0), "--health-check", BAD, program("restarts"), "stays")
    bad.says("is not fit for the job")
    began = time.monotonic()
    bad.process.send_signal(signum)
    bad.process.wait()
    assert time.monotonic() - began < turn_away.WITHIN / 2
    nodes.nothing_left(patience=5)


@pytest.mark.parametrize(
    ("nnodes", "place", "hint"),
    [
        (2, 1, "with --spares or --nnodes MIN:MAX a job goes on without a node that is not fit"),
        ("1:2", 1, "the job begins without this node if enough others are fit"),
    ],
)
def test_what_becomes_of_the_job_without_an_unfit_node_is_said(nodes, program, nnodes, place, hint):
    bad = nodes.node(*nodes.static(nnodes, place), "--health-check", BAD, program("restarts"), "stays")
    assert nodes.statuses(bad) == [122]
    assert bad.err.endswith(f"\n\nhint: {hint}\n")


def test_a_job_whose_hosts_are_unfit_all_at_once_says_what_is_wrong(job, program):
    each = 'touch "$DDP_TEST_DIR/checked-$$"; while test $(ls "$DDP_TEST_DIR" | wc -l) -lt 4; do sleep 0.01; done'
    check = f"{each}; {BAD}"
    result = job.run("--simulate", "--nnodes", "1:4", "--health-check", check, program("restarts"), "stays").expect(122)
    assert result.err.count("error: ") == 1, result.err
    assert ": exit status 4: GPU 2 is off the bus\n" in result.err.partition("error: ")[2]


def test_a_node_that_is_unfit_at_a_restart_leaves_and_a_spare_takes_its_place(nodes, program):
    check = f"test ! -e {nodes.home}/bad || {{ {BAD}; }}"
    options = ("--spares", 1, "--max-restarts", 1, "--nproc-per-node", 1)
    args = (*options, program("restarts"), "stays_until_told")
    first = nodes.node(*nodes.c10d("2"), "--node-rank", 0, *args)
    sick = nodes.node(*nodes.c10d("2"), "--node-rank", 1, "--health-check", check, *args)
    pids = [int(nodes.place(rank, 0)["pid"]) for rank in range(2)]
    spare = nodes.node(*nodes.c10d("2"), *args)
    first.says("is a spare")
    (nodes.home / "bad").touch()
    os.kill(pids[1], SIGKILL)
    assert nodes.statuses(sick) == [122]
    first.says("is lost: its health check failed: exit status 4: GPU 2 is off the bus")
    assert f"error: {os.uname().nodename} is not fit for the job: --health-check {check}: exit status 4" in sick.err
    first.says("is node 1 from now on")
    (nodes.home / "signs" / "go").touch()
    assert nodes.statuses(first, spare) == [0, 0]
    (remembered,) = bad_nodes.read(bad_nodes_file(nodes.env), time.time())
    assert (remembered.host, remembered.kind) == (os.uname().nodename, "unfit")
    assert remembered.why == "its health check failed: exit status 4: GPU 2 is off the bus"


def test_nodes_that_are_unfit_are_not_taken_for_nodes_that_go_on_elsewhere(nodes, program):
    check = f"test ! -e {nodes.home}/bad || {{ {BAD}; }}"
    args = ("--max-restarts", 1, "--nproc-per-node", 1, program("restarts"), "stays_until_told")
    first = nodes.node(*nodes.c10d("1:3"), "--node-rank", 0, *args)
    sick = [nodes.node(*nodes.c10d("1:3"), "--node-rank", rank, "--health-check", check, *args) for rank in (1, 2)]
    pids = [int(nodes.place(rank, 0)["pid"]) for rank in range(3)]
    (nodes.home / "bad").touch()
    os.kill(pids[1], SIGKILL)
    assert nodes.statuses(*sick) == [122, 122]
    first.says("start again on 1 node")
    (nodes.home / "signs" / "go").touch()
    assert nodes.statuses(first) == [0]


@pytest.mark.parametrize("nnodes", ["1:3", "2:3"])
def test_node_0_that_is_unfit_at_a_restart_leaves_and_the_others_wait_for_it(nodes, program, nnodes):
    check = f"test ! -e {nodes.home}/bad || {{ {BAD}; }}"
    args = ("--max-restarts", 1, "--nproc-per-node", 1, program("restarts"), "stays_until_told")
    sick = nodes.node(*nodes.c10d(nnodes), "--node-rank", 0, "--health-check", check, *args)
    others = [nodes.node(*nodes.c10d(nnodes), "--node-rank", rank, *args) for rank in (1, 2)]
    pids = [int(nodes.place(rank, 0)["pid"]) for rank in range(3)]
    (nodes.home / "bad").touch()
    os.kill(pids[1], SIGKILL)
    assert nodes.statuses(sick) == [122]
    unfit = f"error: {os.uname().nodename} is not fit for the job: --health-check {check}"
    assert f"{unfit}: exit status 4: GPU 2 is off the bus" in sick.err
    for node in others:
        node.says(
            "is lost: its health check failed: exit status 4: GPU 2 is off the bus; waiting up to 10 min for it to"
        )
    again = nodes.node(*nodes.c10d(nnodes), "--node-rank", 0, "--health-check", check, *args)
    assert nodes.statuses(again) == [122]
    assert all(node.process.poll() is None for node in others)  # they wait for one that is mended
    (nodes.home / "bad").unlink()
    mended = nodes.node(*nodes.c10d(nnodes), "--node-rank", 0, "--health-check", check, *args)
    nodes.place(2, 2)
    (nodes.home / "signs" / "go").touch()
    assert nodes.statuses(mended, *others) == [0, 0, 0]
    (remembered,) = bad_nodes.read(bad_nodes_file(nodes.env), time.time())
    assert (remembered.kind, remembered.host) == ("unfit", os.uname().nodename)


def test_node_0_that_is_unfit_at_a_restart_ends_a_job_that_cannot_go_on_without_it(job):
    check = f"test ! -e {job.home}/bad || {{ {BAD}; }}"
    job.behave("0=default", options=("--health-check", check, "--max-restarts", 1))
    (job.home / "bad").touch()
    os.kill(next(iter(job.pids().values())), SIGKILL)
    result = job.wait(10)
    assert result.status == 122
    assert "could not be started: its health check failed: exit status 4: GPU 2 is off the bus" in result.err


@pytest.mark.parametrize(("signum", "status"), [(SIGINT, 130), (SIGHUP, 129), (SIGKILL, -9)])
def test_a_signal_while_the_check_before_the_start_runs_leaves_nothing_of_it(job, program, signum, status):
    check = "sleep 1000 & setsid sleep 1000 & touch $DDP_TEST_DIR/checks; wait"
    process = job.start("--health-check", check, program("says"))
    job.sign("checks")
    process.send_signal(signum)
    result = job.wait(10)
    assert result.status == status
    assert (signum == SIGKILL) is ("before the workers were started" not in result.err)
    job.nothing_left(patience=5)  # an orphan is killed, and nobody can wait for its end


def test_daemons_of_a_check_do_not_outlive_it(job, program):
    job.start("--health-check", "setsid sleep 1000 & touch $DDP_TEST_DIR/checks", program("attached"), "count")
    job.sign("ready-0")
    assert not [pid for pid in job.left() if Path(f"/proc/{pid}/comm").read_text() == "sleep\n"]
    (job.home / "signs" / "enough").touch()
    job.wait().expect(0)
    job.nothing_left()


def test_a_stop_does_not_wait_for_a_check_that_hangs(job, program):
    check = f"test ! -e {job.home}/hang || {{ touch {job.home}/hangs; exec sleep 1000; }}"
    job.behave("0=default", options=("--health-check", check, "--max-restarts", 1))
    (job.home / "hang").touch()
    os.kill(next(iter(job.pids().values())), SIGKILL)
    until((job.home / "hangs").exists, "the check before the restart")
    job.process.terminate()
    assert job.wait(10).status == 143
    job.nothing_left()


def test_a_check_that_heeds_no_signal_does_not_hold_up_a_stop_that_comes_from_another_node(nodes, program):
    check = f"test ! -e {nodes.home}/hang || {{ trap '' TERM INT; touch {nodes.home}/hangs; sleep 1000; }}"
    args = ("--max-restarts", 1, "--grace-period", "1000s", program("restarts"), "stays")
    first, second = (nodes.node(*nodes.static(2, place), "--health-check", check, *args) for place in (0, 1))
    pid = int(nodes.place(0, 0)["pid"])
    nodes.place(1, 0)
    (nodes.home / "hang").touch()
    os.kill(pid, SIGKILL)
    until((nodes.home / "hangs").exists, "the check before the restart")
    first.process.terminate()
    assert nodes.statuses(first, second) == [143, 143]


@pytest.mark.parametrize("signum", [SIGUSR1, SIGTERM])
def test_a_signal_to_all_processes_of_a_job_says_nothing_of_the_machine(signum):
    """As Slurm sends it before a job's time is up."""
    told = f"kill -{signum.value} $$ $PPID"
    assert why_unfit(told, dict(os.environ)) == ""
