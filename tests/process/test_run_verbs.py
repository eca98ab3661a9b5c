"""`ddplaunch ps` and `stop`: what they say of running jobs and do to them, and one clear error for all else."""

import json
import os
import re
import signal
import subprocess
from contextlib import ExitStack, suppress
from subprocess import PIPE

import pytest

from ddplaunch.cli import main
from ddplaunch.record import run_socket
from ddplaunch.record.folders import short
from ddplaunch.record.run_socket import SocketPath
from ddplaunch.system.process import tree
from ddplaunch.tools.runs import find
from tests.conftest import Job, Result, until
from tests.nodes import ENOUGH
from tests.process.terminal import agent_of, stat, stopped


@pytest.fixture
def verb(job, monkeypatch, capsys):
    """Call a verb as in a shell of the user of this job."""
    monkeypatch.setenv("XDG_STATE_HOME", job.env["XDG_STATE_HOME"])

    def call(*words: str) -> Result:
        status = main.main(words)
        out, err = capsys.readouterr()
        return Result(status, out, err, 0.0)

    return call


def socket_of(job: Job) -> str:
    """The name of the run of this job, when it has a socket."""
    until((job.folder / run_socket.NAME).exists, "a socket")
    return job.folder.name


def test_the_logs_of_a_run_that_was_killed_say_so_below_what_they_hold(job, program, verb):
    job.behave()
    name = socket_of(job)
    agent = agent_of(job.process.pid)
    job.process.kill()
    os.kill(agent, signal.SIGKILL)
    job.wait()
    until(lambda: not job.left(), "all to be gone")
    shown = verb("logs", name).err.splitlines()
    assert shown[0].endswith("; was killed, or its record ends early")
    assert shown[-1] == f"ddplaunch: {short(name)} was killed, or its record ends early; its logs end here"


def test_the_folder_of_log_dir_leads_to_the_newest_run_in_it(job, program, verb):
    logs = job.home / "logs"
    for name in ("first", "second"):
        job.run("--run-id", name, "--log-dir", logs, "--no-python", "true").expect(0)
    (newest,) = logs.glob("second_*")
    said = verb("logs", "-n", "3", str(logs))
    assert said.err == (
        f"error: {logs} is no folder of a run, but holds 2 runs\n\nhint: type `ddplaunch logs {newest} -n 3`\n"
    )
    assert said.status == 2
    assert verb("logs", str(newest), "-n", "3").status == 0


def test_what_runs_is_shown_with_its_workers_and_stopped_by_name(job, program, verb, tmp_path):
    job.behave()
    name = socket_of(job)
    following = subprocess.Popen(job.argv("logs", "-f", "-r", "1", name), env=job.env, stdout=PIPE, stderr=PIPE)
    other = Job(tmp_path / "other")
    other.home.mkdir()
    other.start("--run-id", f"{name}-other", "--log-dir", other.home / "logs", program("behave"))
    other.sign("ready-0")
    until(lambda: len([p for p in find.socket_paths(job.env) if name in p.path]) == 2, "the socket of the other")

    shown = verb("ps").out
    assert f"{short(name)}: running, 2 workers" in shown
    assert "behave.py" in shown
    assert all(str(pid) in shown for pid in job.pids().values())
    (alone,) = json.loads(verb("ps", "--json", f"{name}-other").out)
    assert alone["run_id"] == f"{name}-other"
    runs = {run["run_id"]: run for run in json.loads(verb("ps", "--json").out)}
    assert [worker["pid"] for worker in runs[name]["workers"]] == [job.pids()[0], job.pids()[1]]
    [folder] = (other.home / "logs").iterdir()
    assert runs[f"{name}-other"]["folder"] == str(folder)

    ambiguous = verb("stop", name[:-1])
    assert ambiguous.status == 2
    listed = ambiguous.err.splitlines()
    assert listed[0] == f"error: {name[:-1]} may be any of 2 jobs that run here:"
    for shown in (short(name), f"{name}-other"):
        assert any(re.fullmatch(rf"  {shown} +behave.py  running for .*", line) for line in listed), listed
    assert "did you mean" in verb("stop", f"{name}x").err
    assert verb("stacks", short(name)).err.startswith(f"ddplaunch: stacks of {short(name)}, behave.py, running for ")
    assert verb("stacks", name[-8:]).err.startswith(f"ddplaunch: stacks of {short(name)}, ")
    assert "ddplaunch ps" in verb("stop", "/nowhere").err
    (tmp_path / "empty").mkdir()
    assert "no job runs in" in verb("stop", str(tmp_path / "empty")).err

    stopped = verb("stop", str(folder))
    assert stopped.status == 0
    assert "has ended with status 130" in stopped.err
    assert "ddplaunch: asked to stop from another shell\n" in other.wait().expect(130).err
    os.kill(job.pids()[0], signal.SIGSTOP)  # it takes no signal before it goes on
    until(lambda: "suspended" in verb("ps").out, "the worker to be shown as suspended")
    assert "has ended with status 130" in verb("stop", name).err
    assert job.wait().status == 130
    out, err = following.communicate(timeout=60)  # it ends with the run
    assert out == (job.folder / "rank-1.out").read_bytes() + (job.folder / "rank-1.err").read_bytes() != b""
    heading, ended = err.decode().splitlines()
    assert heading.startswith(f"ddplaunch: logs of {short(name)}, behave.py, running for ")
    assert ended == f"ddplaunch: {short(name)} has ended with status 130"
    gone = verb("stop", name)
    assert (gone.status, "has ended" in gone.err) == (2, True)
    for each in (job, other):
        each.nothing_left()


def test_a_run_whose_agent_does_not_run_is_named_and_does_not_hold_up_the_others(job, program, verb):
    job.start("--nproc-per-node", 1, program("behave"))
    worker = int(job.sign("ready-0"))
    name = socket_of(job)
    agent = int(stat(worker)[1])
    os.kill(agent, signal.SIGSTOP)
    until(lambda: stopped([agent]), "the agent to stop")
    pid = json.loads((job.folder / "plan.json").read_text())["agent_pid"]
    assert (
        f"{short(name)}: does not answer: its agent is stopped, which SIGCONT ends (behave.py, pid {pid})"
        in verb("ps").out
    )
    silent = verb("stop", name)
    assert "does not answer" in silent.err
    assert silent.status == 122
    with ExitStack() as waiting:
        with suppress(BlockingIOError):
            while True:
                waiting.enter_context(SocketPath(str(job.folder), run_socket.NAME).connect())
        assert f"{short(name)}: does not answer" in verb("ps").out
        assert verb("stop", name).status == 122
    os.kill(agent, signal.SIGCONT)
    assert job.wait().status == 130  # what was asked for is done when it can be


def test_a_job_that_is_suspended_is_shown_so_all_of_it_or_its_workers_alone(job, program, verb):
    job.start("--nproc-per-node", 1, program("behave"))
    worker = int(job.sign("ready-0"))
    name = socket_of(job)
    os.kill(worker, signal.SIGSTOP)
    until(lambda: stopped([worker]), "the worker to stop")
    assert "rank 0: suspended" in verb("stacks", name).out
    everything = [job.process.pid, *(process.pid for process in tree.descendants(job.process.pid))]
    for pid in everything:  # as `scontrol suspend` does
        os.kill(pid, signal.SIGSTOP)
    until(lambda: stopped(everything), "all to stop")
    assert f"{name[-4:]}: is suspended" in verb("ps").out
    assert "is suspended" in verb("stacks", name).err
    for pid in everything:
        os.kill(pid, signal.SIGCONT)
    verb("stop", name)
    assert job.wait().status == 130


@pytest.mark.parametrize("every", [False, True], ids=["by name", "all"])
def test_several_jobs_are_stopped_side_by_side(job, program, verb, tmp_path, monkeypatch, every):
    monkeypatch.setattr(run_socket, "runtime_folder", lambda _uid: str(tmp_path / "none"))  # of other tests, too
    job.behave()
    name = socket_of(job)
    command = job.argv("--run-id", "other", "--nproc-per-node", 1, program("behave"), "all=default")
    with subprocess.Popen(command, env=job.env, stdout=PIPE, stderr=PIPE) as other:
        until((job.folder.parent / "other" / run_socket.NAME).exists, "the socket of the other")
        stopped = verb("stop", *(["--all"] if every else [name, "other", name]))
        assert b"asked to stop from another shell" in other.communicate(timeout=60)[1]
    assert stopped.status == 0
    lines = stopped.err.splitlines()
    assert [line.split()[1] for line in lines[:2]] == ["stopping", "stopping"]  # none is waited for before
    assert [" has ended with status 130, " in line for line in lines] == [False, False, True, True]
    assert job.wait().status == 130
    assert verb("stop", "--all", name).status == 2


def test_a_job_that_waits_for_its_nodes_is_shown_and_can_be_stopped(nodes, verb, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", nodes.env["XDG_STATE_HOME"])
    nodes.node(*nodes.static(2, 0), "--run-id", f"waits-{nodes.port}", "-m", "this")
    shown = until(lambda: found if f"waits-{nodes.port}" in (found := verb("ps").out) else "", "the job")
    assert f"waits-{nodes.port}: waits for its nodes" in shown
    assert "has ended with status 130" in verb("stop", f"waits-{nodes.port}").err
    assert nodes.statuses() == [130]


def test_a_stop_ends_an_elastic_job_as_a_whole_where_ctrl_c_is_ignored(nodes, program, verb, monkeypatch):
    """As after nohup; SIGTERM alone would have node 0 leave. A second one kills."""
    monkeypatch.setenv("XDG_STATE_HOME", nodes.env["XDG_STATE_HOME"])
    name = f"background-{nodes.port}"
    args = ("--run-id", name, "--nproc-per-node", 1, "--grace-period", "60s", program("behave"), "all=stubborn")
    for place in range(2):
        ignores = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)}
        nodes.node(*nodes.static("1:2", place), *args, **ignores)
    for rank in range(2):
        nodes.sign(f"ready-{rank}", ENOUGH)
    with subprocess.Popen([*nodes.command, "stop", name], env=nodes.env, stderr=PIPE) as first:
        for rank in range(2):
            nodes.sign(f"got-{rank}", ENOUGH)
        assert "has ended with status 143" in verb("stop", name).err
        assert b"has ended with status 143" in first.stderr.read()
    assert nodes.statuses() == [143, 143]


def test_a_stop_says_so_if_node_0_is_lost_before_the_end(nodes, program, verb, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", nodes.env["XDG_STATE_HOME"])
    name = f"lost-{nodes.port}"
    args = ("--run-id", name, "--nproc-per-node", 1, "--grace-period", "60s", program("behave"), "all=stubborn")
    first, _ = [nodes.node(*nodes.static("1:2", place), *args) for place in range(2)]
    for rank in range(2):
        nodes.sign(f"ready-{rank}", ENOUGH)
    with subprocess.Popen([*nodes.command, "stop", name], env=nodes.env, stderr=PIPE) as asked:
        for rank in range(2):
            nodes.sign(f"got-{rank}", ENOUGH)
        os.kill(first.agent, signal.SIGKILL)
        line = f"who coordinates {name} was lost before its end. Its other nodes stop their workers"
        assert line in asked.stderr.read().decode()
        assert asked.wait() == 122
    assert nodes.statuses() == [122, 130]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_a_folder_of_sockets_that_others_may_use_is_named(job):
    folder = run_socket.runtime_folder(os.getuid())
    os.makedirs(folder, 0o700, exist_ok=True)
    (job.home / "nothing.py").touch()
    mounts = f'mount -t tmpfs -o mode=755 none {folder} && exec "$@"'
    elsewhere = ["unshare", "--mount", "--propagation", "private", "sh", "-c", mounts, "sh"]

    def run(*words: object) -> subprocess.CompletedProcess[str]:
        command = [*elsewhere, *job.argv(*words)]
        return subprocess.run(command, env=job.env, cwd=job.home, capture_output=True, text=True, check=False)

    started = run("--nproc-per-node", 2, "--log-dir", "logs", "nothing.py")
    assert started.returncode == 0
    assert f"do not reach this run: {folder} belongs to another user, or others may write to it" in started.stderr
    asked = run("stop", "nosuch")
    assert (asked.returncode, asked.stderr.partition(":")[0]) == (2, "error")
    assert f"{folder} belongs to another user, or others may write to it" in asked.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a Linux device")
def test_logs_that_cannot_be_written_to_a_full_disk_are_no_bug(job, program):
    job.run("--nproc-per-node", 2, program("writes"), "then_exits", 100_000)
    with open("/dev/full", "w") as full:
        result = job.run("logs", job.folder, stdout=full)
    assert result.status == 1
    assert result.err.splitlines()[1:] == ["error: cannot write to stdout: no space left on device"]
