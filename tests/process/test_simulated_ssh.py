"""Agents on other hosts, with an ssh that is made up: how they are called, what can go wrong, what is left."""

import json
import os
import signal
import sys
from pathlib import Path
from signal import SIGINT, SIGKILL, SIGTERM

import psutil
import pytest

import ddplaunch
from ddplaunch.reach.pipes import CONTROL
from ddplaunch.reach.protocol import STREAM, greeting, pack
from ddplaunch.reach.startup import MAX_STARTING
from tests.conftest import PATIENCE, insist, until

HOSTS = "127.0.0.1,127.0.0.2"
IS_OTHER = (
    "test \"${SSH_CONNECTION#* * }\" != '127.0.0.1 22'"  # than the first of them, as a command of the shell there
)


@pytest.fixture
def ssh(job, program):
    """Have the made-up ssh first in PATH; give the folder where it notes who was called."""
    folder = job.home / "ssh"
    (folder / "bin").mkdir(parents=True)
    command = folder / "bin" / "ssh"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} {program("fake_ssh")} "$@"\n')
    command.chmod(0o755)
    return folder


@pytest.fixture
def env(ssh):
    """The variables of the command."""
    return {
        "PATH": f"{ssh / 'bin'}:{os.environ['PATH']}",
        "FAKE_SSH": str(ssh),
        "FAKE_SSH_PYTHONPATH": str(Path(ddplaunch.__file__).parent.parent),
    }


def start(job, env, *args: object, hosts: str = HOSTS, **popen):
    return job.start("--hosts", hosts, "--nproc-per-node", 2, *args, env=env, **popen)


def pids(ssh: Path, host: str) -> tuple[int, int]:
    """The client that leads to a host, and the shell there."""
    client, shell = (ssh / f"{host}.pids").read_text().split()
    return int(client), int(shell)


def loop_of(process) -> psutil.Process:
    """The child that the connections belong to; others write files."""
    return next(child for child in psutil.Process(process.pid).children() if child.children())


def test_a_job_runs_on_the_hosts_in_their_order(job, env, program):
    start(job, env, program("place"), hosts="127.0.0.1,127.0.0.2,127.0.0.3")
    job.wait().expect(0)
    places = [json.loads(place)["variables"] for place in job.signs("place", 6)]
    assert [place["GROUP_RANK"] for place in places] == ["0", "0", "1", "1", "2", "2"]
    assert {place["MASTER_ADDR"] for place in places} == {"127.0.0.1"}


@pytest.mark.parametrize("nodes", [("--spares", 1), ("--nnodes", "2:3")], ids=["a spare", "MIN:MAX"])
def test_another_host_is_node_0_if_the_first_one_is_not_fit(job, env, program, nodes):
    check = f"{IS_OTHER} || {{ echo GPU 2 is off the bus; exit 4; }}"
    args = ("--hosts", "127.0.0.1,127.0.0.2,127.0.0.3", "--nproc-per-node", 1, *nodes, "--health-check", check)
    job.start(*args, program("place"), env=env)
    result = job.wait().expect(0)
    assert [json.loads(place)["variables"]["MASTER_ADDR"] for place in job.signs("place", 2)] == ["127.0.0.3"] * 2
    assert "going on without 127.0.0.1: " in result.err
    assert ": exit status 4: GPU 2 is off the bus\n" in result.err


def test_another_host_is_node_0_if_the_first_one_is_not_fit_at_a_restart(job, env, program):
    bad = job.home / "bad"
    check = f"{IS_OTHER} || ! test -e {bad}"
    args = ("--nproc-per-node", 1, "--spares", 1, "--max-restarts", 1, "--health-check", check)
    job.start("--hosts", "127.0.0.1,127.0.0.2,127.0.0.3", *args, program("restarts"), "stays_until_told", env=env)
    pids = [int(json.loads(job.sign(f"place-0-{rank}"))["pid"]) for rank in range(2)]
    bad.touch()
    os.kill(pids[1], SIGKILL)
    again = [json.loads(job.sign(f"place-2-{rank}"))["MASTER_ADDR"] for rank in range(2)]
    assert again == ["127.0.0.3", "127.0.0.3"]
    (job.home / "signs" / "go").touch()
    result = job.wait().expect(0)
    assert "127.0.0.1) is lost: its health check failed: exit status 1" in result.err
    assert "127.0.0.3 is node 0 from now on" in result.err


@pytest.mark.parametrize(
    ("hosts", "node_of"), [("127.0.0.1,127.0.0.1", "00"), ("127.0.0.1,127.0.0.1,127.0.0.2", "001")]
)
def test_a_host_runs_a_worker_for_each_time_that_it_is_listed(job, env, program, hosts, node_of):
    job.start("--hosts", hosts, program("place"), env=env)
    job.wait().expect(0)
    places = [json.loads(place)["variables"] for place in job.signs("place", len(node_of))]
    assert "".join(place["GROUP_RANK"] for place in places) == node_of
    assert {place["WORLD_SIZE"] for place in places} == {str(len(node_of))}


def test_variables_of_the_caller_go_along_and_those_of_the_host_stay(job, env, ssh, program):
    typed = {"LEARNING_RATE": "0.1", "HOME": "/home/typed", "SSH_TTY": "/dev/pts/9"}
    job.start("--hosts", "127.0.0.9:1", program("place"), env=env | typed)
    assert job.wait().status == 0
    variables = json.loads(job.sign("place-0"))["variables"]
    assert variables["LEARNING_RATE"] == "0.1"
    assert variables["HOME"] == str(ssh / "home")
    assert variables["USER"] == "ann"
    assert "SSH_TTY" not in variables
    assert variables["SSH_CONNECTION"].endswith("127.0.0.9 22")


def test_nothing_of_the_job_stands_in_a_command_line_of_ssh(job, env, ssh, program):
    start(job, env | {"DDPLAUNCH_TOKEN": "s3cret"}, "--env", "ADDED=v4lue", program("place"))
    assert job.wait().status == 0
    called = (ssh / "127.0.0.2.called").read_text()
    assert "BatchMode=yes" in called
    assert called.splitlines()[-1] == f"exec {sys.executable} -P -m ddplaunch.launcher.start.host"
    for place in job.signs("place", 4):
        assert "DDPLAUNCH_TOKEN" not in place


@pytest.mark.parametrize("where", [("--simulate", "--nnodes=2"), ("--hosts=127.0.0.1,127.0.0.2",), ()])
@pytest.mark.parametrize("written", ["train.env", "ddplaunch.toml"])
def test_a_variable_from_a_file_stands_in_no_command_line_and_in_no_file_of_ours(job, env, program, where, written):
    given, origin = ["--env=TYPED=typed", "--env-file=train.env"], "--env, --env-file"
    (job.home / "train.env").write_text("SECRET=s3cret-v4lue")
    if written == "ddplaunch.toml":
        given, origin = given[:1], "ddplaunch.toml, --env"
        (job.home / written).write_text('[env]\nSECRET = "s3cret-v4lue"')
    result = job.run(*where, *given, "--verbose", "--nproc-per-node=1", program("sees_argv"), env=env).expect(0)
    assert job.signs("seen", 2 if where else 1) == ["s3cret-v4lue"] * (2 if where else 1)
    assert "s3cret" not in result.out + result.err
    kept = {path for path in job.home.rglob("*") if path.is_file()} - {job.home / written, job.home / "train.env"}
    holds = {path for path in kept if b"s3cret" in path.read_bytes()}
    assert holds == {path for path in holds if path.parent.name == "signs"}
    plans = [json.loads(path.read_text()) for path in kept if path.name == "plan.json"]
    # that of the whole run, which lies where the command was typed, names no workers
    assert sorted(len(plan["workers"]) for plan in plans) == ([0, 1, 1] if where else [1])
    for plan in plans:
        for worker in plan["workers"]:
            assert (worker["variables"]["TYPED"], worker["variables"]["SECRET"]) == ("typed", "...")
        assert set(plan["origins"]["env"].split(", ")) == set(origin.split(", "))


@pytest.mark.parametrize("told", ["--hosts=127.0.0.2:1,127.0.0.1:3", "--hostfile=hosts.txt"])
def test_slots_of_a_host_are_its_workers(job, env, program, told):
    (job.home / "hosts.txt").write_text("# three of them\n127.0.0.2 slots=1\n\n127.0.0.3\n127.0.0.1:3\n")
    job.start(told, *["--exclude", "127.0.0.3"] * ("hostfile" in told), program("place"), env=env)
    assert job.wait().status == 0
    places = [json.loads(place)["variables"] for place in job.signs("place", 4)]
    assert [(place["GROUP_RANK"], place["MASTER_ADDR"]) for place in places] == [
        (node_rank, "127.0.0.2") for node_rank in "0111"
    ]


def test_words_of_a_login_are_passed_over(job, env, program):
    start(job, env, program("writes"), "both", hosts="127.0.0.1,chatty")
    result = job.wait().expect(0)
    assert sorted(result.out.splitlines()) == [f"[{rank}] out of {rank}" for rank in range(4)]
    assert "Welcome" not in result.err


def test_the_only_worker_on_another_host_is_shown_as_it_is(job, env, program):
    job.start("--hosts", "127.0.0.9:1", program("writes"), "both", env=env)
    assert job.wait().out == "out of 0\n"


@pytest.mark.slow  # so many processes
def test_more_hosts_than_are_called_at_a_time(job, env, program):
    number = MAX_STARTING + 3
    hosts = ",".join(f"127.0.1.{host}:1" for host in range(1, number + 1))
    job.start("--hosts", hosts, program("writes"), "both", env=env)
    result = job.wait(timeout=120).expect(0)
    assert len(result.out.splitlines()) == number


@pytest.mark.parametrize(
    ("host", "message", "hint"),
    [  # all others: tests/unit/remote/test_diagnose.py
        ("stranger", "its host key is not in known_hosts", "ssh-keyscan stranger"),
        ("old", "ddplaunch there is 0.0.1, here it is", "--remote-python"),
    ],
)
def test_a_host_that_cannot_be_used_is_named_with_the_remedy(job, env, program, host, message, hint):
    start(job, env, program("behave"), hosts=f"127.0.0.1,{host}")
    result = job.wait().expect(121)
    assert f"error: {host}: {message}" in result.err
    assert hint in result.err
    assert result.err.count("error:") == 1


def test_all_hosts_that_cannot_be_used_are_named(job, env, program):
    start(job, env, program("behave"), hosts="127.0.0.1,refusing,silent,locked")
    result = job.wait().expect(121)
    first, *others = (
        "refusing: ssh connection refused",
        "silent: ssh connection timed out",
        "locked: ssh cannot log in",
    )
    assert f"error: {first}\n" in result.err
    assert all(f"\n  {words}" in result.err for words in others)


def test_an_interpreter_that_cannot_be_used_is_named(job, env, program):
    start(job, env, "--remote-python", "/etc/passwd", program("behave"))
    result = job.wait().expect(121)
    assert "error: 127.0.0.1, 127.0.0.2: /etc/passwd cannot be executed there" in result.err
    assert "--remote-python" in result.err


def test_an_interpreter_without_ddplaunch_is_named(job, env, program):
    start(job, env | {"FAKE_SSH_PYTHONPATH": "/nowhere"}, "--remote-python", "/usr/bin/python3", program("behave"))
    result = job.wait().expect(121)
    assert "/usr/bin/python3 there has no ddplaunch" in result.err
    assert "hint: install ddplaunch " in result.err


@pytest.mark.parametrize(
    ("missing", "message", "hint"),
    [
        ("work/train.py", "train.py does not exist", "did you mean `train.py.gone`?"),
        ("work", "{work}: no such file or directory", "ddplaunch runs on each host in the folder where it was typed"),
    ],
    ids=["script", "folder"],
)
def test_what_is_missing_there_is_named(job, env, missing, message, hint):
    work = job.home / "work"
    work.mkdir()
    (work / "train.py").write_text("")
    start(job, env | {"FAKE_SSH_LACKS": str(job.home / missing)}, "train.py", hosts="127.0.0.1,bare", cwd=work)
    result = job.wait().expect(121)
    assert f"bare: {message.format(work=work)}\n" in result.err
    assert f"hint: {hint}\n" in result.err
    assert result.err.count("error:") == 1


def test_without_ssh_that_is_said(job, env, program):
    start(job, env | {"PATH": "/nowhere"}, program("behave"))
    result = job.wait().expect(121)
    assert "ssh cannot be run here" in result.err


def test_a_host_that_was_given_up_is_not_waited_for(job, env, program):
    """The last call is for those who may still come."""
    words = ("--nnodes", "2:3", "--rdzv-conf", "last_call_timeout=600", program("place"))
    start(job, env, *words, hosts="127.0.0.1,refusing,127.0.0.2")
    result = job.wait().expect(0)
    assert "going on without refusing: ssh connection refused" in result.err
    places = [json.loads(place)["variables"] for place in job.signs("place", 4)]
    assert {place["GROUP_WORLD_SIZE"] for place in places} == {"2"}


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (("--spares", 1), "going on without off: no route to host; no spare is left\n"),
        (("--nnodes", "2:3"), "going on without off: no route to host\n"),
    ],
)
def test_a_host_that_is_off_while_the_job_runs_on_the_others_is_named(job, env, ssh, program, options, line):
    options = (*options, "--rdzv-conf", "last_call_timeout=0")
    process = start(job, env, *options, program("restarts"), "stays_until_told", hosts="127.0.0.1,127.0.0.2,off")
    job.signs("place-0", 4)
    (ssh / "off.noticed").touch()
    said = (raw.decode() for raw in process.stderr)
    assert next(each for each in said if "going on without" in each).endswith(line)
    (job.home / "signs" / "go").touch()
    assert "off" not in job.wait().expect(0).err


def test_ctrl_c_while_a_host_does_not_answer_ends_at_once(job, env, ssh, program):
    process = start(job, env, program("behave"), hosts="127.0.0.1,hanging")
    until(lambda: (ssh / "hanging.called").exists() and (ssh / "127.0.0.1.pids").exists(), "a call")
    process.send_signal(SIGINT)
    result = job.wait().expect(130)
    printed = [line for line in result.err.splitlines() if not line.startswith("ddplaunch: waiting for ")]
    assert printed == ["ddplaunch: stopped by SIGINT (Ctrl-C) before the workers were started"]


def test_a_host_that_is_lost_before_all_have_come_is_one_error_whatever_the_agents_say_of_it(job, env, ssh, program):
    said = job.home / "said"
    with said.open("wb") as err:
        start(job, env, program("behave"), hosts="127.0.0.1,127.0.0.2,hanging", stderr=err)
    until(lambda: "2 of 3 nodes joined" in said.read_text(), "two agents")
    os.kill(pids(ssh, "127.0.0.2")[0], SIGKILL)
    job.wait().expect(122)
    assert said.read_text().count("error: ") == 1
    assert "error: 127.0.0.2: lost: ssh ended with status 137" in said.read_text()
    job.nothing_left(patience=PATIENCE)


@pytest.mark.parametrize("who", ["front", "loop"])
def test_the_hosts_end_their_workers_when_what_was_typed_is_killed(job, env, program, who):
    process = start(job, env, "--grace-period", "0.2", program("behave"), "all=stubborn")
    job.signs("ready", 4)
    loop = loop_of(process)
    os.kill(process.pid if who == "front" else loop.pid, SIGKILL)
    assert job.wait().status == (-SIGKILL if who == "front" else 122)
    job.nothing_left(patience=PATIENCE)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2"])
def test_a_connection_that_is_killed_ends_the_job_everywhere(job, env, ssh, program, host):
    start(job, env, program("behave"))
    job.signs("ready", 4)
    os.kill(pids(ssh, host)[0], SIGKILL)
    result = job.wait().expect(122)
    assert result.err.count("error: ") == 1
    node = 0 if host == "127.0.0.1" else 1
    assert f"error: node {node} ({host}) was lost: ssh ended with status 137\n" in result.err
    job.nothing_left(patience=PATIENCE)


def test_a_client_that_hangs_is_given_up_and_its_host_ends_its_workers(job, env, ssh, program):
    start(job, env, "--heartbeat-timeout", "1s", program("behave"))
    job.signs("ready", 4)
    client = pids(ssh, "127.0.0.2")[0]
    os.kill(client, signal.SIGSTOP)
    result = job.wait().expect(122)
    assert "error: node 1 (127.0.0.2) was lost: silent for 1 s\n" in result.err
    assert result.err.splitlines()[-1].startswith("hint: ")
    job.nothing_left(patience=PATIENCE)


def test_a_stop_signal_reaches_every_host(job, env, program):
    process = start(job, env, program("behave"), "all=polite")
    job.signs("ready", 4)
    process.send_signal(SIGTERM)
    assert job.wait().status == 143
    for rank in range(4):
        assert job.sign(f"got-{rank}") == "SIGTERM"


def test_an_only_host_that_is_lost_is_named(job, env, ssh, program):
    job.start("--hosts", "127.0.0.9:2", program("behave"), env=env)
    job.signs("ready", 2)
    os.kill(pids(ssh, "127.0.0.9")[0], SIGKILL)
    result = job.wait().expect(122)
    assert "error: node 0 (127.0.0.9) was lost: ssh ended with status 137\n" in result.err
    job.nothing_left(patience=PATIENCE)


def test_an_only_host_hears_the_second_stop_signal_too(job, env, program):
    process = job.start("--hosts", "127.0.0.9:2", "--grace-period", 600, program("behave"), "all=stubborn", env=env)
    job.signs("ready", 2)
    process.send_signal(SIGINT)
    for rank in range(2):
        job.sign(f"got-{rank}")
    insist(process)
    assert job.wait().status == 130


def test_hosts_that_hear_nothing_end_their_workers(job, env, program):
    """As when the network is gone, and nobody says so."""
    process = start(job, env, "--heartbeat-timeout", "1s", program("behave"))
    workers = [int(pid) for pid in job.signs("ready", 4)]
    loop = loop_of(process)
    loop.send_signal(signal.SIGSTOP)
    until(lambda: not any(psutil.pid_exists(pid) for pid in workers), "the end of the workers")
    loop.send_signal(signal.SIGCONT)
    assert job.wait().status == 122
    job.nothing_left(patience=PATIENCE)


@pytest.mark.parametrize(
    ("tag", "lie", "said"),
    [
        (
            CONTROL,
            b'{"type":"worker","rank":0,"pid":-1}',
            "sent a malformed message (Expected `int` >= 2 - at `$.pid`)",
        ),
        (CONTROL, b'{"type":"ready"' + b"[" * 100_000, "sent a malformed message (JSON is malformed: "),
        (CONTROL, b'{"type":"\xff"}', "sent a malformed message ("),
        (STREAM, b'{"type":"chunk","number":1,"data":"aGVsbG8="}', "sent a piece of a stream that it does not have"),
        (STREAM, b'{"type":"chunk","number":0,"data":"?"}', "sent a malformed piece of a stream ("),
        (STREAM, b'{"type":"chunk","number":0,"data":"aGVsbG8gaGVsbG8="}', "is not ddplaunch"),
    ],
    ids=["pid", "depth", "bytes", "no stream", "malformed piece", "no hello"],
)
def test_a_host_that_reports_what_is_not_its_own_is_refused(job, env, ssh, program, tag, lie, said):
    (ssh / "lies").write_bytes(greeting() + pack(tag, lie))
    start(job, env, program("place"), hosts="127.0.0.1,lying")
    result = job.wait().expect(122)
    assert f"error: lying: lost: {said}" in result.err
    assert "refused a connection" not in result.err
