"""Several nodes on this machine with --simulate: agents, channel and output as on real hosts."""

import json
import os
import re
import signal
from functools import partial
from pathlib import Path
from signal import SIGCONT, SIGINT, SIGKILL, SIGTERM, SIGTSTP, SIGUSR1

import psutil
import pytest

from tests.conftest import PATIENCE, events_in, insist, until
from tests.process.terminal import CTRL_C, CTRL_Z, Shell, running, stopped

TWO = ("--nnodes", 2, "--nproc-per-node", 2, "--simulate")


@pytest.fixture
def start(job):
    """Start behave.py on two nodes with two workers each, and wait until all are ready."""
    return partial(job.behave, nodes=2)


def events(job, node: int, *names: str) -> list[dict[str, object]]:
    """The events of a node that have been written, all or those of these names."""
    return events_in(job.folder / f"node-{node}", *names)


def processes(job) -> dict[str, list[psutil.Process]]:
    """The processes of ddplaunch itself, by what they do."""
    front = psutil.Process(job.process.pid)
    loop = next(child for child in front.children() if child.children())  # the others write files
    relays = [child for child in loop.children() if child.children()]
    agents = [next(child for child in relay.children() if child.children()) for relay in relays]
    return {"front": [front], "loop": [loop], "relay": relays, "agent": agents}


def test_a_script_and_a_folder_for_logs_whose_names_are_no_text_do_not_lose_a_node(job):
    script = job.home / os.fsdecode(b"x\xff.py")
    script.write_text("raise ValueError('here')\n")
    result = job.run("--nnodes", 2, "--simulate", "--log-dir", job.home / os.fsdecode(b"l\xff"), script).expect(1)
    assert "ValueError: here" in result.err
    assert "lost" not in result.err


def test_what_all_nodes_have_to_do_without_is_said_once(job, program):
    result = job.run("--nnodes", 3, "--simulate", "--no-python", "true", env={"XDG_STATE_HOME": "/proc"}).expect(0)
    assert result.err.count("no logs are kept") == 1
    assert "ddplaunch: warning: no logs are kept: " in result.err


def test_each_node_has_its_ranks_and_a_name_and_finds_rank_0(job, program):
    result = job.run("--nnodes", 3, "--nproc-per-node", 2, "--simulate", program("place")).expect(0)
    places = [json.loads(place)["variables"] for place in job.signs("place", 6)]
    assert [(place["RANK"], place["LOCAL_RANK"], place["GROUP_RANK"]) for place in places] == [
        (str(rank), str(rank % 2), str(rank // 2)) for rank in range(6)
    ]
    assert {(place["WORLD_SIZE"], place["LOCAL_WORLD_SIZE"], place["GROUP_WORLD_SIZE"]) for place in places} == {
        ("6", "2", "3")
    }
    assert {place["MASTER_ADDR"] for place in places} == {"127.0.0.1"}
    assert len({place["MASTER_PORT"] for place in places}) == 1
    assert {place["GLOO_SOCKET_IFNAME"] for place in places} == {"lo"}
    assert "6 workers on 3 nodes" in result.err
    plan = json.loads((job.folder / "node-2" / "plan.json").read_text())
    assert [worker["host"] for worker in plan["workers"]] == ["node-2", "node-2"]


def test_no_worker_of_one_node_sees_the_secret_of_the_job(job, program):
    job.run("--nproc-per-node", 2, program("place"), env={"DDPLAUNCH_TOKEN": "do not tell"}).expect(0)
    for place in job.signs("place", 2):
        assert "DDPLAUNCH_TOKEN" not in place
        assert "do not tell" not in place


def test_the_variables_and_words_of_the_caller_reach_every_node_but_for_the_secret_of_the_job(job, program):
    """Bytes that are no UTF-8 included."""
    odd = os.fsdecode(b"caf\xe9")
    env = {"CALLERS": odd, "DDPLAUNCH_TOKEN": "do not tell"}
    job.run(*TWO, "--env", f"ADDED={odd}", program("place"), "--nnodes", odd, env=env).expect(0)
    for place in job.signs("place", 4):
        variables = json.loads(place)["variables"]
        assert (variables["CALLERS"], variables["ADDED"]) == (odd, odd)
        assert "DDPLAUNCH_TOKEN" not in place
        assert "do not tell" not in place


def test_a_failure_on_any_node_starts_all_again_or_ends_all_and_is_told_once_each_time(job, program):
    result = job.run(*TWO, "--max-restarts", 1, program("behave"), "3=raises").expect(1)
    assert result.err.count("error: ") == 2
    assert result.err.count("error: rank 3 on node-1 failed: ValueError: boom of rank 3") == 2
    assert "the other 3 workers were stopped" in result.err
    for node in range(2):
        assert [event["generation"] for event in events(job, node, "generation_started")] == [0, 1]


def test_equal_lines_of_workers_are_all_shown_though_they_look_like_ours(job):
    script = job.home / "same.py"
    script.write_text("import sys; print('error: the same', file=sys.stderr)")
    result = job.run("--simulate", "--nnodes=2", "--nproc-per-node=1", "--output=raw", script)
    assert result.err.splitlines().count("error: the same") == 2


def test_lines_of_all_nodes_come_whole_and_with_their_ranks(job, program):
    result = job.run(*TWO, program("writes"), "letters", 400).expect(0)
    for rank in range(4):
        lines = [line for line in result.out.splitlines() if line.startswith(f"[{rank}] ")]
        assert [int(line.split(":")[1]) for line in lines] == list(range(400))
    assert all(re.fullmatch(r"\[(\d)\] <\1:\d+:[a-j]*>", line) for line in result.out.splitlines())


def test_pids_are_named_with_their_hosts_and_the_folder_of_the_run_once(job, program):
    result = job.run("--nnodes", 2, "--simulate", "-v", program("behave"), "all=done").expect(0)
    pids = re.findall(r"^ddplaunch: (rank \d on node-\d) is pid \d+$", result.err, re.MULTILINE)
    assert sorted(pids) == ["rank 0 on node-0", "rank 1 on node-1"]
    assert re.findall(r"^ddplaunch: logs in (\S+)$", result.err, re.MULTILINE) == [str(job.folder)]
    assert sorted(path.name for path in job.folder.glob("node-*")) == ["node-0", "node-1"]


def test_a_line_that_is_longer_than_any_message_is_not_torn(job, program):
    result = job.run(*TWO, program("writes"), "long", 300_000)
    assert sorted(result.out.splitlines()) == [f"[{rank}] {str(rank) * 300_000}" for rank in range(4)]


def test_one_simulated_node_is_a_node(job, program):
    """And its only worker is shown as it is."""
    result = job.run("--simulate", program("writes"), "both")
    assert (result.status, result.out) == (0, "out of 0\n")
    assert "err of 0\n" in result.err


def test_nothing_of_ddplaunch_listens_or_connects(job, start):
    process = start("all=polite")
    ours = [each for some in processes(job).values() for each in some]
    assert [connection for each in ours for connection in each.net_connections("tcp") if connection.raddr] == []
    listening = [each for each in ours if any(c.status == psutil.CONN_LISTEN for c in each.net_connections("tcp"))]
    assert listening == []
    process.send_signal(SIGTERM)
    job.wait()


# --- signals


def test_a_stop_signal_reaches_every_worker_of_every_node_once(job, start):
    start("all=polite").send_signal(SIGTERM)
    result = job.wait().expect(143)
    assert [job.got(rank) for rank in range(4)] == [["SIGTERM"]] * 4
    assert result.err.count("stopped by") == 1
    assert not any(events(job, node, "kill_sent") for node in range(2))


def test_a_second_signal_of_the_sender_of_the_first_lets_the_workers_of_all_nodes_save(job, start):
    """As of LSF's bkill and CI runners; the command decides that, and no host for itself."""
    process = start("all=slow")
    process.send_signal(SIGINT)
    for rank in range(4):
        job.sign(f"saving-{rank}")
    process.send_signal(SIGTERM)
    until(lambda: len(events_in(job.folder, "signal_received")) == 2, "the second signal")
    (job.home / "signs" / "saved").touch()
    result = job.wait().expect(130)
    said = f"SIGTERM counts as the same request to stop as SIGINT before it. `kill -QUIT {process.pid}` kills"
    assert result.err.count(said) == 1
    assert not any(events(job, node, "kill_sent") for node in range(2))


def test_the_second_stop_signal_kills_on_all_nodes(job, start):
    process = start("all=stubborn", options=("--grace-period", 600))
    process.send_signal(SIGINT)
    for rank in range(4):
        job.sign(f"got-{rank}")
    insist(process)
    result = job.wait().expect(130)
    assert result.err.count("killing the workers at once") == 1
    assert "ranks 0-3 by SIGKILL" in result.err


def test_a_signal_to_all_processes_of_ddplaunch_at_once_reaches_every_worker_once(job, start):
    process = start("all=polite")
    known = processes(job)
    # the front last: then the hosts learn of it in two ways without haste
    for who in ("loop", "relay", "agent", "front"):
        for each in known[who]:
            each.send_signal(SIGUSR1)
    for rank in range(4):
        until(lambda rank=rank: "SIGUSR1" in job.got(rank), "the signal")
    process.send_signal(SIGTERM)
    assert job.wait().status == 143
    # two that come at once may be one to a worker
    assert [len(events(job, node, "signal_forwarded")) for node in range(2)] == [1, 1]
    assert [job.got(rank) for rank in range(4)] == [["SIGUSR1", "SIGTERM"]] * 4


@pytest.mark.parametrize("order", [("front", "loop"), ("loop", "front")], ids=" before ".join)
def test_a_signal_to_both_processes_that_were_typed_counts_once(job, start, order):
    """Nor are what the coordinator says to a node and what its own relay says two signals."""
    process = start("all=slow", options=("--grace-period", 600))
    known = processes(job)
    for who in order:
        known[who][0].send_signal(SIGTERM)
    for rank in range(4):
        job.sign(f"saving-{rank}")
    (job.home / "signs" / "saved").touch()
    job.process = process
    assert job.wait().status == 143
    assert not any(events(job, node, "kill_sent") for node in range(2))


@pytest.mark.parametrize("moment", [0.05, 0.1, 0.2, 0.3])
def test_a_signal_at_any_moment_of_the_start_ends_the_command_and_leaves_nothing(job, program, moment):
    """No synchronisation is possible here: the moments are spread over the start, and every one must do."""
    import time

    process = job.start("--nnodes", 2, "--simulate", program("behave"))
    time.sleep(moment)
    process.send_signal(SIGTERM)
    assert job.wait().status in (143, -SIGTERM)


def test_a_job_can_be_suspended_for_longer_than_nodes_may_be_silent(job, program):
    import time

    shell = Shell(job)
    shell.runs("--nnodes", 2, "--simulate", "--heartbeat-timeout", "1s", program("behave"), "all=polite")
    pids = [int(pid) for pid in job.signs("ready", 2)]
    shell.press(CTRL_Z)
    until(lambda: stopped(pids), "stopped workers")
    shell.sees("Stopped")
    time.sleep(2)  # nothing is to happen in this time
    shell.types("fg")
    until(lambda: running(pids), "running workers")
    shell.press(CTRL_C)
    shell.sees("stopped by SIGINT")
    shell.leave()


def test_sigtstp_where_nobody_could_let_us_go_on_means_nothing_and_a_user_signal_reaches_every_worker(job, start):
    process = start("all=polite", start_new_session=True)
    process.send_signal(SIGTSTP)
    process.send_signal(SIGUSR1)
    assert [job.sign(f"got-{rank}") for rank in range(4)] == ["SIGUSR1"] * 4
    process.send_signal(SIGCONT)
    process.send_signal(SIGTERM)
    assert job.wait().status == 143


# --- who is killed, what is left


@pytest.mark.parametrize("who", ["front", "loop"])
def test_nothing_is_left_when_what_was_typed_is_killed(job, start, who):
    start("all=stubborn", options=("--grace-period", "0.2"))
    processes(job)[who][0].send_signal(SIGKILL)
    status = job.wait().status
    assert status == (-SIGKILL if who == "front" else 122)
    job.nothing_left(patience=PATIENCE)


@pytest.mark.parametrize("who", ["relay", "agent"])
@pytest.mark.parametrize("node", [0, 1])
def test_nothing_is_left_when_part_of_a_node_is_killed(job, start, who, node):
    start("all=polite")
    processes(job)[who][node].send_signal(SIGKILL)
    result = job.wait().expect(122)
    # "reset" if something was on its way to the agent
    why = "connection (closed|reset)" if who == "agent" else "its agent ended with status 137"
    assert len(re.findall(rf"error: node {node} \(node-{node}\) was lost: {why}\n", result.err)) == 1
    killed = rf"ddplaunch: the agent on node-{node} \(pid \d+\) was killed by SIGKILL; its workers were ended with it\n"
    assert bool(re.search(killed, result.err)) is (who == "agent")
    assert result.err.count("error: ") == 1
    assert result.err.splitlines()[-1].startswith("hint: ")


@pytest.mark.parametrize("nnodes", ["2", "1:2"])
def test_an_agent_that_is_killed_before_the_job_begins_is_not_waited_for(job, program, nnodes):
    checks = f"touch {job.home}/checks-$$; until test -e {job.home}/killed; do sleep 0.05; done"
    job.start("--nnodes", nnodes, "--simulate", "--health-check", checks, program("behave"), "all=done")
    until(lambda: len(list(job.home.glob("checks-*"))) == 2, "the health checks")
    processes(job)["agent"][1].kill()
    if nnodes == "2":
        assert job.wait().expect(122).err.count("error: node-1: lost: its agent ended with status 122\n") == 1
    else:
        (job.home / "killed").touch()
        assert "going on without node-1: lost: its agent ended with status 122\n" in job.wait().expect(0).err


@pytest.mark.parametrize("lost", [1, 0])
def test_an_elastic_job_goes_on_soon_without_a_node_whose_relay_is_killed(job, program, lost):
    """The command sees that nothing of the node is left, and waits for no lease."""
    told = ("--nnodes", "1:2", "--nproc-per-node", 1, "--simulate", "--heartbeat-timeout", 600, "--grace-period", 600)
    job.start(*told, program("restarts"), "goes_on_until_told")
    job.signs("place-0", 2)
    processes(job)["relay"][lost].kill()
    job.sign("place-1-0")
    (job.home / "signs" / "finish").touch()
    job.wait().expect(0)


def test_an_agent_of_node_0_that_hangs_is_named_by_the_one_who_watches_it(job, start):
    """Its relay still answers."""
    start("all=default", options=("--heartbeat-timeout", "1s"))
    processes(job)["agent"][0].send_signal(signal.SIGSTOP)
    result = job.wait().expect(122)
    assert re.search(
        r"the agent on node-0 \(pid \d+\) did not respond for 1\.5 s \(it is stopped, as by SIGSTOP\)\n", result.err
    )


def test_a_node_that_hangs_is_lost_after_the_heartbeat_timeout(job, start):
    start("all=polite", options=("--heartbeat-timeout", "1s"))
    agent = processes(job)["agent"][1]
    relay = processes(job)["relay"][1]
    agent.send_signal(signal.SIGSTOP)
    relay.send_signal(signal.SIGSTOP)
    result = job.wait().expect(122)
    assert "ddplaunch: node 1 (node-1) is lost: silent for 1 s\n" in result.err
    assert result.err.count("error: node 1 (node-1) was lost: silent for 1 s\n") == 1


def test_nobody_who_reads_keeps_a_stopped_job_alive(job, program):
    reader, writer = os.pipe()
    process = job.start(*TWO, program("behave"), "all=chatter", stdout=writer)
    os.close(writer)
    job.signs("ready", 4)
    process.send_signal(SIGTERM)
    result = job.wait()
    os.close(reader)
    assert result.status == 143


def test_a_closed_stdout_stops_nobody(job, program):
    reader, writer = os.pipe()
    os.close(reader)
    process = job.start(*TWO, program("writes"), "letters", 1000, stdout=writer)
    os.close(writer)
    job.process = process
    assert job.wait().status == 0


# --- chaos


@pytest.mark.parametrize(
    ("chaos", "status", "words"),
    [
        ("node:1@100ms", 122, ("chaos: killed all of node-1\n", "error: node 1 (node-1) was lost")),
        (
            "slow:0@0s,hang:1@50ms,kill:2@400ms",
            137,
            (
                "rank 0 runs at half",
                "chaos: stopped rank 1",
                "chaos: killed rank 2\n",
                "error: rank 2 on node-1 failed: killed by SIGKILL",
                "hint: --chaos killed it, as it was asked to\n",
            ),
        ),
    ],
    ids=["a node", "workers"],
)
def test_chaos_breaks_what_it_is_told_to(job, program, chaos, status, words):
    result = job.run(*TWO, "--chaos", chaos, program("behave")).expect(status)
    for text in words:
        assert text in result.err


def test_a_slow_worker_stops_and_goes_on(job, start):
    start("all=polite", options=("--chaos", "slow:3@0s"))
    pid = int(job.sign("ready-3"))
    for _ in range(2):
        until(lambda: stopped([pid]), "a pause")
        until(lambda: running([pid]), "the end of the pause")
    job.process.send_signal(SIGTERM)
    assert job.wait().status == 143


@pytest.mark.parametrize("lost", [1, 0])
def test_an_elastic_job_goes_on_without_a_node_that_is_lost(job, program, lost):
    left = 1 - lost
    words = ("--nnodes", "1:2", "--nproc-per-node", 2, "--simulate", "--chaos", f"node:{lost}@100ms")
    process = job.start(*words, program("behave"), "all=polite")
    until(lambda: Path(job.home / "state").exists() and _generations(job, left) == [0, 1], "a second generation")
    sizes = json.loads((job.folder / f"node-{left}" / "plan.json").read_text())["world_size"]
    assert sizes == 2
    process.send_signal(SIGTERM)
    result = job.wait().expect(143)
    assert f"ddplaunch: node {lost} (node-{lost}) is lost: " in result.err
    assert "error: " not in result.err


@pytest.mark.parametrize("lost", [1, 0])
def test_ctrl_c_while_workers_are_stopped_for_a_lost_node_is_acknowledged(job, program, lost):
    told = ("--nnodes", "2:3", "--nproc-per-node", 1, "--simulate", "--grace-period", "50s")
    with (job.home / "err").open("wb") as err:
        process = job.start(*told, program("restarts"), "saves_until_told", stderr=err)
    job.signs("place-0", 3)
    processes(job)["agent"][lost].kill()
    for rank in {0, 1, 2} - {lost}:
        job.sign(f"saving-0-{rank}")
    until(lambda: "is lost: " in (job.home / "err").read_text(), "the loss")
    process.send_signal(SIGINT)
    said = re.compile(r"ddplaunch: stopping (1 worker|the workers on 2 nodes), up to 50 s; Ctrl-C again kills\n")
    until(lambda: said.search((job.home / "err").read_text()), "the acknowledgement")
    (job.home / "signs" / "saved").touch()
    assert job.wait().status == 130


@pytest.mark.parametrize("is_stopped", [False, True])
def test_of_two_nodes_the_second_goes_on_once_the_first_is_known_to_have_ended(job, program, is_stopped):
    """It was only silent, and then its connection to the command ended. Before that, Ctrl-C ends the job as ever."""
    # half as many seconds later the command gives the connection of the silent node up, and the job goes on
    silence = 6 if is_stopped else 1
    told = ("--nnodes", "1:2", "--nproc-per-node", 1, "--simulate", "--heartbeat-timeout", f"{silence}s")
    with (job.home / "err").open("wb") as err:
        process = job.start(*told, program("restarts"), "goes_on_until_told", stderr=err)
    job.signs("place-0", 2)
    relay, agent = (processes(job)[who][0] for who in ("relay", "agent"))
    for each in (relay, agent, *agent.children(recursive=True)):
        each.send_signal(signal.SIGSTOP)
    lost = f"node 0 (node-0) is lost: silent for {silence} s\n"
    until(lambda: lost in (job.home / "err").read_text(), "the loss")
    if is_stopped:
        process.send_signal(SIGINT)
    else:
        job.sign("place-1-0")
        (job.home / "signs" / "finish").touch()
    assert job.wait().status == (130 if is_stopped else 0)
    assert job.has_sign("place-1-0") is not is_stopped


def _generations(job, node: int) -> list[object]:
    try:
        return [event["generation"] for event in events(job, node, "generation_started")]
    except (OSError, IndexError):
        return []


# --- what cannot start


def test_what_cannot_run_is_told_once(job):
    (job.home / "pick.py").write_text("")
    result = job.run(*TWO, "--devices", "7", "pick.py").expect(121)
    assert result.err.count("error: ") == 1
    assert "node-0, node-1: " in result.err


def test_an_interpreter_that_is_not_there_is_named(job):
    (job.home / "pick.py").write_text("")
    result = job.run(*TWO, "--remote-python", "/no/python", "pick.py").expect(121)
    assert "/no/python" in result.err


def test_a_debugger_has_no_terminal_on_other_nodes(job):
    (job.home / "pick.py").write_text("")
    result = job.run(*TWO, "--debug", "1", "pick.py").expect(2)
    assert "--debug 1: a worker on another node cannot have this terminal" in result.err


def test_the_end_of_an_agent_is_no_error_where_the_job_goes_on_without_it(job, program):
    told = ("--nnodes", "1:2", "--nproc-per-node", 1, "--simulate")
    job.start(*told, program("restarts"), "goes_on_until_told")
    job.signs("place-0", 2)
    agent = processes(job)["agent"][1]
    agent.send_signal(SIGKILL)
    job.sign("place-1-0")
    (job.home / "signs" / "finish").touch()
    result = job.wait().expect(0)
    assert (
        f"ddplaunch: the agent on node-1 (pid {agent.pid}) was killed by SIGKILL; its workers were ended" in result.err
    )
    assert "error: " not in result.err
