"""A job over ssh ends everywhere, whoever says so and whatever breaks: the typed command, a connection, a host."""

import json
import os
import re
import signal
import time

import pytest

from tests.conftest import until
from tests.hosts import over_ssh
from tests.hosts.job import SOON
from tests.hosts.over_ssh import HOSTS, LOGIN, NODES
from tests.hosts.terminal import on_host
from tests.process import terminal
from tests.process.terminal import CTRL_C, CTRL_Z, ENTER, PROMPT, Shell

SILENCE = 2  # seconds, the heartbeat timeout of these jobs
FAREWELL = 3.0  # seconds that ssh may need longer than SILENCE to find out


@pytest.fixture(scope="module")
def three_hosts(make_bed):
    return make_bed(HOSTS)


@pytest.fixture
def told():
    return ["--nproc-per-node", 2, "--heartbeat-timeout", f"{SILENCE}s"]


@pytest.fixture
def start(job, program, told):
    """Start two workers of behave.py on each node, and wait until all six are ready."""

    def start(*behaviours, flags=(), **options):
        command = over_ssh.start(job, *told, *flags, program("behave"), *behaviours, **options)
        job.signs("ready", 6)
        return command

    return start


def quiet(job, *hosts, since, within):
    """Wait until nothing of the job runs on these hosts, or on any that lives, in time."""
    took = job.seconds_until_quiet(*hosts, since=since)
    print(f"quiet {took:.2f} s after: {', '.join(hosts or job.bed.alive)}")
    assert took < within


def end(job, host=LOGIN):
    """How the command ended."""
    result = job.wait(host=host)
    print(result.err)
    return result


# --- a terminal


@pytest.fixture
def window(job):
    """A terminal in which a shell with job control runs on the login host."""
    window = Shell(job, columns=200, **on_host(job, LOGIN))
    with window.child.process:
        yield window
        window.child.close()


@pytest.fixture
def typed(job, window, program, told):
    """Type the command there, and give the workers when all are ready."""

    def typed(*behaviours, flags=()):
        window.runs("--hosts", ",".join(NODES), *told, *flags, program("behave"), *behaviours)
        job.signs("ready", 6)
        return [worker.pid for node in NODES for worker in over_ssh.workers(job.bed, node)]

    return typed


@pytest.mark.parametrize("flags", [(), ("--nnodes", "2:3")], ids=["fixed size", "elastic"])
def test_in_a_terminal_a_job_can_rest_for_longer_than_the_heartbeat_timeout(job, window, typed, flags):
    workers = typed(flags=flags)
    assert len(workers) == 6
    window.press(CTRL_Z)
    window.sees("Stopped", PROMPT)
    until(lambda: terminal.stopped(workers), "all workers to stop")
    time.sleep(SILENCE + 1)
    window.types("fg")
    until(lambda: terminal.running(workers), "all workers to go on")
    window.press(CTRL_C)
    shown = window.sees("stopped by SIGINT (Ctrl-C)")
    assert re.search(r"\[\d-\d\] (\x1b\[m)?KeyboardInterrupt at ", shown)  # one line of a host's ranks
    window.sees(PROMPT)
    window.press("exit $?" + ENTER)
    assert window.child.wait() == 130


def test_a_terminal_that_is_closed_ends_the_job(job, window, typed):
    typed("all=polite")
    began = time.monotonic()
    window.child.close()
    quiet(job, since=began, within=SOON)
    for got in job.signs("got", 6):
        assert got == "SIGHUP"


# --- what was typed, or what it has started, is killed


def test_the_hosts_end_their_workers_when_what_was_typed_is_killed(job, start):
    start("all=stubborn", flags=("--grace-period", "0.3s"))
    front, _ = over_ssh.front_and_loop(job.bed, LOGIN)
    began = time.monotonic()
    os.kill(front, signal.SIGKILL)
    quiet(job, since=began, within=SOON)
    assert end(job).status == -signal.SIGKILL


@pytest.mark.parametrize(
    ("node", "who"), [("node0", "client"), ("node2", "relay")]
)  # an agent: process/test_simulate.py
def test_what_leads_to_the_workers_of_a_host_is_killed(job, start, node, who):
    number = job.bed.number(node)
    start(f"{2 * number}=setsid_child")
    victim = over_ssh.client(job.bed, LOGIN, node) if who == "client" else over_ssh.relay_and_agent(job.bed, node)[0]
    began = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    quiet(job, since=began, within=SOON)
    result = end(job).expect(122)
    assert node in result.err.partition("\n")[2], "it is named"
    if node == "node2":
        why = "ssh ended with status 255 without a word, as when ddplaunch is killed there"
        assert f"error: node 2 (node2) was lost: {why}\n" in result.err
        assert result.err.splitlines()[-1].startswith("hint: ")
    else:
        assert result.err.count("error: ") == 1


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_a_health_check_that_hangs_on_a_host_ends_with_the_command(job, program, told, signum):
    """A child of it is in a session of its own, and heeds no signal."""
    sign = job.home / "signs" / "hangs"
    check = f"test $(hostname) != node1 || {{ trap '' TERM INT HUP; setsid sleep 1000 & touch {sign}; wait; }}"
    over_ssh.start(job, *told, "--health-check", check, program("behave"))
    job.sign("hangs")
    front, _ = over_ssh.front_and_loop(job.bed, LOGIN)
    began = time.monotonic()
    os.kill(front, signum)
    quiet(job, since=began, within=SOON)
    assert end(job).status in (130, -signal.SIGKILL)


# --- something of it does not run


@pytest.mark.parametrize("node", ["node0", "node2"])
def test_an_agent_that_is_stopped_ends_the_job(job, start, node):
    """Its connection lives, and ssh answers for it."""
    start("all=stubborn", flags=("--grace-period", "5s"))
    _, agent = over_ssh.relay_and_agent(job.bed, node)
    began = time.monotonic()
    os.kill(agent, signal.SIGSTOP)
    quiet(job, since=began, within=2 * SILENCE + SOON)
    result = end(job).expect(122)
    assert f"the agent on {node} " in result.err
    assert "did not respond for 3 s (it is stopped, as by SIGSTOP)" in result.err


@pytest.mark.parametrize("which", ["the dispatcher", "the front of node 0"])
def test_whatever_is_stopped_the_job_ends(job, start, which):
    start("all=polite")
    _, dispatcher = over_ssh.front_and_loop(job.bed, LOGIN)
    front, _ = over_ssh.relay_and_agent(job.bed, "node0")
    began = time.monotonic()
    os.kill(dispatcher if which == "the dispatcher" else front, signal.SIGSTOP)
    quiet(job, since=began, within=2 * SILENCE + SOON)
    end(job).expect(122)
    job.nothing_left()


# --- a host is lost


@pytest.mark.parametrize("rank", [0, 1])
def test_a_spare_takes_the_place_of_a_host_whose_agent_is_killed(job, program, told, rank):
    over_ssh.start(job, "--spares", 1, *told, program("restarts"), "goes_on_until_told")
    job.signs("place-0", 4)
    os.kill(over_ssh.relay_and_agent(job.bed, NODES[rank])[1], signal.SIGKILL)
    places = [json.loads(place) for place in job.signs("place-1", 4)]
    assert [(place["RANK"], place["GROUP_RANK"], place["WORLD_SIZE"]) for place in places] == [
        (str(rank), str(rank // 2), "4") for rank in range(4)
    ]
    job.put("finish")
    result = end(job).expect(0)
    assert f"node {rank} ({NODES[rank]}) is lost: " in result.err
    job.nothing_left()


def test_a_login_host_that_is_cut_off_leaves_no_worker_behind(job, start):
    start()
    began = time.monotonic()
    job.bed.cut(LOGIN)
    quiet(job, *NODES, since=began, within=SILENCE + SOON)
    result = end(job).expect(122)
    assert all(f"node {rank} ({node}) is lost: silent for 2 s\n" in result.err for rank, node in enumerate(NODES))
    job.nothing_left()
    job.bed.join(LOGIN)
    job.bed.run(LOGIN, ["ip", "neigh", "flush", "all"])  # else what it asked in vain makes the next question fail too


@pytest.mark.parametrize("fault", ["cut", "crash"])
def test_a_host_that_is_lost_ends_the_job(job, start, fault):
    start()
    began = time.monotonic()
    getattr(job.bed, fault)("node2")
    quiet(job, since=began, within=SILENCE + SOON)
    result = end(job).expect(122)
    closed = "ssh ended with status 255: Connection to node2 closed by remote host"
    assert f"error: node 2 (node2) was lost: {closed if fault == 'crash' else 'silent for 2 s'}\n" in result.err
    assert result.err.splitlines()[-1].startswith("hint: ")
    assert (job.summary_of("node0")["status"], job.summary_of("node0")["why"]) == (122, "node_lost")
    if fault == "cut":  # what stays there says why
        (ended,) = job.events_of("node2", "job_ended")
        lost = "the coordinator (the command on login) was lost: "
        assert ended["text"] in (
            f"{lost}connection closed",
            f"{lost}connection reset",
            f"{lost}silent for 2 s",
        )  # as front or agent is first


def test_the_first_host_that_is_lost_ends_the_job(job, start):
    start()
    began = time.monotonic()
    job.bed.power_cut("node0")
    quiet(job, "node1", "node2", since=began, within=SILENCE + SOON)
    quiet(job, since=began, within=SILENCE + SOON + FAREWELL)
    result = end(job).expect(122)
    assert result.err.count("error: ") == 1
    assert "error: node 0 (node0) was lost: silent for 2 s\n" in result.err
