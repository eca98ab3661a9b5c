"""Jobs are found, asked and ended where they were typed, though each host has a disk of its own; their other hosts say where."""

import json
import os
import signal
import subprocess
import sys

import pytest

from ddplaunch.record.folders import short
from tests.conftest import PATIENCE, until
from tests.hosts import over_ssh
from tests.hosts.over_ssh import HOSTS, LOGIN, NODES
from tests.hosts.terminal import on_host
from tests.process.terminal import CTRL_D, ENTER, Terminal

DDPLAUNCH = f"{os.path.dirname(sys.executable)}/ddplaunch"
PDB = "(Pdb) "
STATE = {"XDG_STATE_HOME": "/srv/state"}


@pytest.fixture(scope="module")
def three_hosts(make_bed):
    """Three nodes, and one where jobs are typed."""
    return make_bed(HOSTS)


@pytest.fixture
def env(job):
    """Where runs are kept on the disk of each host."""
    yield {**job.env, "HOME": str(job.bed.home), **STATE}
    for host in job.bed.alive:
        subprocess.run(["rm", "-rf", job.bed.path(host, STATE["XDG_STATE_HOME"])], check=True)


@pytest.fixture
def ask(job, env):
    """Type a verb on a host, and give what comes of it."""
    return lambda host, *words: job.bed.run(host, job.argv(*words), env=env, cwd=job.home)


@pytest.fixture
def runs(job, program, ask):
    """Start a job of three nodes on the host where it is typed; give its name once it is known there."""

    def runs(*args: object) -> str:
        over_ssh.start(job, "--nproc-per-node", 2, *(args or (program("behave"),)), env=STATE)
        job.signs("ready", 6)
        return str(until(lambda: (json.loads(ask(LOGIN, "ps", "--json").stdout) or [{}])[0].get("run_id"), "the run"))

    return runs


def status_at(ask, host):
    """What `ps --json` says of the one run."""
    [run] = json.loads(ask(host, "ps", "--json").stdout)
    return run


def end(job, ask, host=LOGIN):
    """Have the job end as by Ctrl-C where it was typed."""
    done = ask(host, "stop")
    assert "has ended with status 130" in done.stderr, done.stderr
    assert job.wait(host=LOGIN).status == 130


# --- where it was typed


def test_a_job_is_asked_and_stopped_where_it_was_typed(job, runs, ask):
    run = runs()
    shown = until(lambda: (found := status_at(ask, LOGIN)) and len(found["workers"]) == 6 and found, "all workers")
    assert (shown["host"], shown["name"], shown["world_size"], shown["problem"]) == (LOGIN, short(run), 6, "")
    assert {worker["host"] for worker in shown["workers"]} == set(NODES)
    stacks = ask(LOGIN, "stacks", short(run), "-r", 5)
    assert "rank 5: " in stacks.stdout, stacks
    assert "behave.py" in stacks.stdout
    assert f"there is no rank 9 in {short(run)}" in ask(LOGIN, "stacks", "-r", 9).stderr
    end(job, ask)
    assert ask(LOGIN, "ps").stdout == "none of your jobs runs here\n"
    assert os.listdir(job.bed.path(LOGIN, f"/tmp/ddplaunch-{os.getuid()}")) == []


def test_where_a_host_does_not_answer_a_line_says_so_and_stop_still_ends_the_job(job, runs, ask):
    run = runs()
    _, agent = over_ssh.relay_and_agent(job.bed, "node0")
    os.kill(agent, signal.SIGSTOP)
    try:
        shown = ask(LOGIN, "ps").stdout
        assert shown.startswith(f"{short(run)}: running, 6 workers on 3 nodes, for "), shown
        assert "  node 0 (node0) has not answered within 1 s" in shown
        assert "node 0 (node0) has not answered within 2.5 s" in ask(LOGIN, "stacks").stdout
    finally:
        os.kill(agent, signal.SIGCONT)
    end(job, ask)


def test_typed_on_node_0_it_is_one_run(job, runs, ask, program):
    over_ssh.start(job, program("behave"), host="node0", env=STATE)
    job.signs("ready", 3)
    until(lambda: len(status_at(ask, "node0")["nodes"]) == 3, "the run")
    assert "has ended with status 130" in ask("node0", "stop").stderr
    assert job.wait(host="node0").status == 130


# --- where it runs


def test_the_hosts_say_where_to_ask_and_to_stop(job, runs, ask):
    run = runs()
    name = short(run)
    for host in NODES:
        assert ask(host, "ps").stdout == f"{name}: runs on {LOGIN} (`ssh {LOGIN} {DDPLAUNCH} ps`)\n"
        for words in (("stacks",), ("stacks", name), ("stop", name), ("profile", name, "-r", "0")):
            refused = ask(host, *words)
            assert refused.returncode == 2
            assert f"{name} runs on {LOGIN}" in refused.stderr
            assert f"`ssh {LOGIN} {DDPLAUNCH} {words[0]} {name}" in refused.stderr
    end(job, ask)
    assert all(os.listdir(job.bed.path(host, f"/tmp/ddplaunch-{os.getuid()}")) == [] for host in NODES)


def test_of_a_job_that_was_started_on_each_node_the_others_say_where_to_ask(job, ask, program):
    hosts = NODES[:2]
    for number, host in enumerate(hosts):
        told = ("--nnodes", 2, "--node-rank", number, "--master-addr", "node0")
        job.start(*told, program("behave"), host=host, env=STATE)
    job.signs("ready", 2)
    assert len(status_at(ask, "node0")["nodes"]) == 2
    assert f": runs on node0 (`ssh node0 {DDPLAUNCH} ps`)" in ask("node1", "ps").stdout
    assert "has ended with status 130" in ask("node0", "stop").stderr
    assert [job.wait(host=host).status for host in hosts] == [130, 130]


# --- debuggers


def attach(job, host, env, *words):
    """Type `ddplaunch attach` in a terminal of a host."""
    options = on_host(job, host)
    options["env"] |= {**env, "TERM": "dumb", "NO_COLOR": "1"}
    return Terminal(job, job.argv("attach", *words), **options)


def test_a_debugger_reaches_the_ranks_of_all_nodes(job, runs, env, program):
    runs("--timeout", "1h", program("attached"), *["count"] * 6)
    for rank in (0, 5):
        debugger = attach(job, LOGIN, env, "-r", rank)
        debugger.sees(f"rank {rank} is held", PDB)
        debugger.press("p 40 + __import__('signs').RANK" + ENTER)
        assert f"{40 + rank}" in debugger.sees(PDB)
        debugger.press(CTRL_D)
        debugger.sees(f"rank {rank} goes on")
        assert debugger.status() == 0
    job.put("enough")
    result = job.wait(host=LOGIN).expect(0)
    assert "node 2 (node2) holds a worker in a debugger: --timeout waits until it is left" in result.err


def test_a_node_that_is_paused_keeps_no_debugger_waiting(job, runs, ask, env, program):
    runs("--heartbeat-timeout", "5m", program("behave"))
    _, agent = over_ssh.relay_and_agent(job.bed, "node2")
    os.kill(agent, signal.SIGSTOP)
    try:
        debugger = attach(job, LOGIN, env, "-r", 4)
        debugger.sees("node 2 (node2) does not answer")
        assert debugger.status() == 2
    finally:
        os.kill(agent, signal.SIGCONT)
    end(job, ask)


# --- logs


def test_logs_are_shown_where_the_job_was_typed_though_they_lie_on_its_hosts(job, runs, ask, env, program):
    run = runs(program("says"))
    shown = ask(LOGIN, "logs", short(run))
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.split("\n") == [*(f"[{rank}] before {rank}" for rank in range(6)), ""]
    assert "ddplaunch: ranks 4-5, on node2:" in shown.stderr
    one = ask(LOGIN, "logs", "-r", 3, "--grep", "before")
    assert (one.stdout, one.returncode) == ("before 3\n", 0)
    assert f"there is no rank 9 in {short(run)}: it has ranks 0-5" in ask(LOGIN, "logs", "-r", 9).stderr
    two = ask(LOGIN, "logs", "-r", "1,4")
    assert two.stdout == "[1] before 1\n[4] before 4\n"
    streams = {"env": env, "cwd": job.home, "stdout": subprocess.PIPE}
    with job.bed.start(LOGIN, job.argv("logs", "-f"), **streams) as following:
        said = [following.stdout.readline() for _ in range(6)]
        job.put("go")
        said += following.stdout.readlines()
        assert following.wait(PATIENCE) == 0
    assert sorted(said[:6]) == [b"[%d] before %d\n" % (rank, rank) for rank in range(6)]
    assert sorted(said[6:]) == [b"[%d] after %d\n" % (rank, rank) for rank in range(6)]
    job.wait(host=LOGIN).expect(0)
    ended = ask(LOGIN, "logs", "-r", 3)
    assert f"the logs of {short(run)} are on its hosts: node0, node1, node2\n" in ended.stderr
    there = f"{DDPLAUNCH} logs {short(run)}"
    assert f"hint: `ssh node0 {there}` shows those of node0\n" in ended.stderr
    assert job.bed.run("node0", ["sh", "-c", there], env=env).stdout.splitlines()[-1] == "[1] after 1"


def test_logs_are_found_on_hosts_that_share_a_home_which_is_not_that_where_the_job_was_typed(job, ask, env, program):
    env |= {"XDG_STATE_HOME": "", "HOME": "/srv/state/ann"}
    over_ssh.start(job, "--nproc-per-node", 2, program("says"), env=env)
    job.signs("ready", 6)
    whole = f"{job.bed.home}/.local/state/ddplaunch/runs"
    assert [len(os.listdir(f"{whole}/{run}")) for run in os.listdir(whole)] == [3]
    shown = ask(LOGIN, "logs")
    assert shown.stdout.split("\n") == [*(f"[{rank}] before {rank}" for rank in range(6)), ""], shown
    assert ask(LOGIN, "logs", "-r", 3).stdout == "before 3\n"
    end(job, ask)


def test_logs_are_looked_for_on_the_hosts_that_the_ranks_have_after_one_was_lost(job, runs, ask, program):
    run = runs("--nnodes", "2:3", program("says"))
    job.bed.crash("node0")
    until(
        lambda: {node["host"] for node in status_at(ask, LOGIN)["nodes"]} == {"node1", "node2"}, "a job without node0"
    )
    shown = until(lambda: (found := ask(LOGIN, "logs", short(run), "-r", 0)).stdout and found, "what rank 0 says")
    assert shown.stdout == "before 0\n"
    hosts = {worker["rank"]: worker["host"] for worker in status_at(ask, LOGIN)["workers"]}
    assert f"ddplaunch: rank 0, on {hosts[0]}:" in shown.stderr
    end(job, ask)
