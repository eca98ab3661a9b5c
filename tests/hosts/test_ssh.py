"""One command starts a job on all hosts over a real ssh, as the user's own configuration has it, and shows what they show."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.conftest import lines_of, until
from tests.hosts import over_ssh
from tests.hosts.bed import SBIN
from tests.hosts.job import HostsJob
from tests.hosts.over_ssh import HOSTS, LOGIN, NODES
from tests.hosts.terminal import on_host
from tests.process.terminal import CTRL_C, Lasting, Screen

SECRET = "a word that is nobody else's business"
PORT = 2222


@pytest.fixture(scope="module")
def three_hosts(make_bed):
    """Its hosts are harder to reach than most: each takes its own name for 127.0.1.1, as on Debian."""
    return make_bed(HOSTS, own_name_on_loopback=True)


@pytest.fixture
def ssh_config(bed) -> Iterator[Path]:
    """The user's own, on all hosts."""
    path = bed.home / ".ssh" / "config"
    yield path
    path.unlink(missing_ok=True)


def places(job, number):
    """The variables of each worker."""
    return [json.loads(place)["variables"] for place in job.signs("place", number)]


# --- who runs where


@pytest.mark.parametrize("host", [LOGIN, "node0"])
def test_a_job_runs_on_the_hosts_in_their_order_wherever_it_is_typed(job, program, host):
    over_ssh.start(job, program("place"), nodes="node0,node1:3,node2", host=host)
    result = job.wait(host=host).expect(0)
    found = places(job, 5)
    names = ("GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    assert [tuple(int(place[name]) for name in names) for place in found] == [
        (0, 0, 1),
        (1, 0, 3),
        (1, 1, 3),
        (1, 2, 3),
        (2, 0, 1),
    ]
    assert {(place["WORLD_SIZE"], place["MASTER_ADDR"], place["GLOO_SOCKET_IFNAME"]) for place in found} == {
        ("5", "node0", "eth0")
    }
    assert ": 5 workers on 3 nodes, gloo (no accelerator)\n" in result.err
    assert f"ddplaunch: logs in {job.folder}\n" in result.err


# --- what they show


def test_each_node_keeps_the_logs_of_its_ranks_beside_the_record_of_the_whole_run(job, program):
    over_ssh.start(job, "--nproc-per-node", 2, program("writes"), "both")
    assert job.wait(host=LOGIN).status == 0
    for number, node in enumerate(NODES):
        folder = job.folder_of(node)
        assert sorted(path.name for path in folder.glob("rank-*.out")) == [
            f"rank-{rank}.out" for rank in (2 * number, 2 * number + 1)
        ]
        assert (folder / f"rank-{2 * number}.err").read_text() == f"err of {2 * number}\n"
        assert job.summary_of(node)["status"] == 0
    kept = {path.name for path in job.folder.iterdir()} - {"log-times"}
    assert kept == {"node-0", "node-1", "node-2", "plan.json", "events.jsonl", "summary.json"}
    summary = json.loads((job.folder / "summary.json").read_text())
    assert (summary["status"], [worker["rank"] for worker in summary["workers"]]) == (0, list(range(6)))


def test_the_first_failure_gives_the_status_and_the_report_names_its_host_as_it_was_typed(job, program):
    nodes = ",".join(job.bed.address(node) for node in NODES)
    over_ssh.start(job, "--nproc-per-node", 2, program("behave"), "5=raises", nodes=nodes)
    result = job.wait(host=LOGIN).expect(1)
    address = job.bed.address("node2")
    assert f"error: rank 5 on {address} failed: ValueError: boom of rank 5   (exit status 1, after " in result.err
    assert re.search(
        rf"rank 5 +{re.escape(address)} +local rank 1 +pid \d+ +cpu\n +logs .*node-2/rank-5\.err", result.err
    )
    assert result.err.count("error: ") == 1


def test_rows_of_live_stand_below_what_all_hosts_write_and_the_terminal_is_left_as_it_was(job, program):
    argv = ("--live", "--hosts", ",".join(NODES), "--nproc-per-node", 1, program("tells"), 0)
    terminal = Lasting(job, *argv, columns=100, **on_host(job, LOGIN))
    screen = Screen(terminal, 100)

    def has_rows(rows):
        return len(rows) > 1 and "step 10 of 40 (25%)" in rows[-2] and rows[-1].startswith("all 3: running, step 10")

    shown = screen.until(has_rows)
    assert sorted(row for row in shown if "stdin" in row) == [f"[{rank}] stdin has ''" for rank in range(3)]
    assert not terminal.cooks()
    terminal.press("t")
    shown = screen.until(lambda rows: has_rows(rows) and any("signs.py" in row for row in rows))
    assert [sum(node in row and "10/40" in row for row in shown) for node in NODES] == [1, 1, 1], shown
    terminal.press(CTRL_C)
    shown = screen.at_end()
    assert "stopped by SIGINT" in shown[-1]
    assert not any(row.startswith("all 3") for row in shown)
    assert terminal.child.exitstatus == 130


# --- what nobody else is to see


def test_no_secret_and_no_variable_stands_in_a_command_line_anywhere_and_workers_do_not_see_the_token(job, program):
    env = {"DDPLAUNCH_TOKEN": "t0ken-of-the-user", "LEARNING": SECRET}
    over_ssh.start(job, "--nproc-per-node", 2, program("behave"), "all=done_when_told", env=env)
    job.signs("ready", 6)
    bed = job.bed
    on_nodes = [process for node in NODES for process in (*bed.processes(node), *bed.daemons(node))]
    everywhere = [*on_nodes, *bed.processes(LOGIN)]
    assert len(everywhere) >= 6 + 3 * 3 + 2 + 3  # workers, relays and agents and sshds, front and loop, clients
    tokens = re.compile(r"t0ken-of-the-user|[0-9a-f]{64}")  # the user's, or one that was made up
    for process in everywhere:
        assert not tokens.search(process.command), process
        assert SECRET not in process.command, process
    for process in on_nodes:
        environ = Path(f"/proc/{process.pid}/environ").read_text()
        assert not tokens.search(environ), process
        assert "DDPLAUNCH_TOKEN" not in environ, process
    workers = [worker for node in NODES for worker in over_ssh.workers(bed, node)]
    assert len(workers) == 6
    for worker in workers:
        assert f"LEARNING={SECRET}\0" in Path(f"/proc/{worker.pid}/environ").read_text()
    job.put("go")
    assert job.wait(host=LOGIN).status == 0


# --- the user's ssh


def test_aliases_ports_and_jump_hosts_of_the_users_configuration_count(job, ssh_config, program):
    """The hosts themselves know nothing of these names; one of them is out of reach for whoever types the command."""
    bed = job.bed
    ssh_config.write_text(
        f"Host gpu-a\n HostName node0\n Port {PORT}\n HostKeyAlias node0\n"
        "Host gpu-b\n HostName node1\n ProxyJump node2\n"
        f"Host gpu-c\n HostName {bed.address('node2')}\n"
    )
    sshd = [shutil.which("sshd", path=SBIN), "-D", "-p", PORT, "-o", "PidFile=none"]
    route = ["ip", "route", "add", "prohibit", f"{bed.address('node1')}/32"]
    with ExitStack() as stack:
        stack.enter_context(bed.start("node0", sshd, stderr=subprocess.DEVNULL))
        until(lambda: any(listener.port == PORT for listener in bed.listeners("node0")), "the second sshd to listen")
        assert bed.run(LOGIN, route).returncode == 0
        stack.callback(bed.run, LOGIN, ["ip", "route", "del", *route[3:]])
        assert bed.run(LOGIN, ["ssh", "node1", "true"]).returncode == 255
        over_ssh.start(job, program("meets"), nodes="gpu-a,gpu-b")
        job.wait(host=LOGIN).expect(0)
        over_ssh.start(job, program("place"), nodes="gpu-b,root@gpu-c:2,gpu-a")
        job.wait(host=LOGIN).expect(0)
        assert {place["MASTER_ADDR"] for place in places(job, 4)} == {bed.address("node1")}


def test_hosts_behind_tunnels_that_end_on_their_loopback_meet_where_they_reach_each_other(job, ssh_config, program):
    ssh_config.write_text(
        "".join(
            f"Host gpu{number}\n ProxyCommand ssh -W localhost:22 node{number}\n HostKeyAlias node{number}\n"
            for number in range(2)
        )
    )
    over_ssh.start(job, program("meets"), nodes="gpu0,gpu1")
    job.wait(host=LOGIN).expect(0)


def test_a_host_that_is_called_by_a_loopback_address_is_reached_from_the_others_at_another(
    job, bed, ssh_config, program
):
    ssh_config.write_text("Host 127.0.0.1\n HostKeyAlias node0\n")
    over_ssh.start(job, program("place"), nodes="127.0.0.1:1,node1:1", host="node0")
    job.wait(host="node0").expect(0)
    assert {place["MASTER_ADDR"] for place in places(job, 2)} == {bed.address("node0")}


# --- real work


def test_a_job_runs_to_its_end_over_a_slow_link_that_loses_packets(job, program):
    job.bed.lag("node1", 100, loss_percent=5)
    over_ssh.start(job, "--nproc-per-node", 2, program("writes"), "letters", 300)
    result = job.wait(host=LOGIN).expect(0)
    for rank in range(6):
        expected = [f"<{rank}:{number}:{'abcdefghij' * (number % 7)}>" for number in range(300)]
        assert lines_of(result.out, f"[{rank}] ") == expected
    assert len(result.out.splitlines()) == 6 * 300
    assert "lost" not in result.err
    print(f"a slow link: {result.seconds:.1f} s")


def test_eight_hosts_at_once(make_bed, tmp_path, program):
    hosts = [f"node{number}" for number in range(8)]
    job = HostsJob(tmp_path, bed=make_bed(hosts))
    over_ssh.start(job, program("writes"), "both", nodes="node[0-7]", host="node0")
    result = job.wait(host="node0").expect(0)
    assert sorted(result.out.splitlines()) == [f"[{rank}] out of {rank}" for rank in range(8)]
    print(f"8 hosts: {result.seconds:.1f} s")
    job.nothing_left()
