"""The socket of a run: it answers while the job goes on, whoever else has connected, and is gone when the job is."""

import fcntl
import json
import os
import random
import signal
import socket
import stat
import threading
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from ddplaunch.launcher.node.clients import MAX_CLIENTS
from ddplaunch.reach.channel.handshake import LIMIT, Decoder, pack
from ddplaunch.record import run_socket
from ddplaunch.record.run_socket import SocketPath
from ddplaunch.record.window import requests
from ddplaunch.record.window.questions import AskStacks, AskStatus, NoAnswer, NodeStatus
from ddplaunch.system.process.child import STACKS_FD
from ddplaunch.system.process.tree import children
from ddplaunch.tools.runs import client, find
from ddplaunch.tools.runs.client import RunReplies
from tests.conftest import Job, until
from tests.process.terminal import stopped


def place_of(job: Job) -> SocketPath:
    """Where the socket of the one job below this home is, as soon as it is there."""
    place: SocketPath = until(lambda: next(iter(own_places(job)), None), "a socket")
    return place


def own_places(job: Job) -> list[SocketPath]:
    """Those below this home; others' are in the folder that all jobs of a user share."""
    return [place for place in find.socket_paths(job.env) if place.folder.startswith(str(job.home))]


def status_of(place: SocketPath, within: float = 10.0) -> RunReplies:
    """Ask this run how it is."""
    [replies] = client.ask_all([place], AskStatus(), within)
    return replies


def late_replies_of(place: SocketPath) -> RunReplies | None:
    """Ask for so short a time that a busy machine may need a second one; None if no node has answered in it."""
    replies = status_of(place, within=0.3)
    has_answered = any(isinstance(node.answer, NodeStatus) for node in replies.nodes)
    return replies if has_answered and len(replies.nodes) == 2 else None


def replies_to(place: SocketPath, data: bytes) -> list[requests.Reply]:
    """Send this, and nothing more; give all that comes back."""
    decoder, found = Decoder(LIMIT), []
    with place.connect() as sock:
        sock.settimeout(30)
        try:
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            while received := sock.recv(1 << 16):
                decoder.feed(received)
        except (BrokenPipeError, ConnectionResetError):  # closed while it was written to
            pass
    while (frame := decoder.take()) is not None:
        found.append(requests.decode_reply(frame))
    return found


def test_it_answers_whatever_others_send_or_do_not_read_and_stops_the_job(job, program):
    job.start("--nproc-per-node", 2, program("behave"))
    pids = {rank: int(pid) for rank, pid in enumerate(job.signs("ready", 2))}
    place = place_of(job)
    assert place == SocketPath(str(job.folder), run_socket.NAME)
    assert stat.S_IMODE(os.stat(place.path).st_mode) == 0o600
    with ExitStack() as stack:
        silent = [stack.enter_context(place.connect()) for _ in range(3)]
        for sock in silent[1:]:  # one says nothing, one the half of it, one does not read what it has asked for
            request = pack(requests.encode(requests.Request(AskStatus())))
            sock.sendall(request[: len(request) // 2] if sock is silent[1] else request)
        numbers = random.Random(1)
        for size in (0, 1, 3, 4, 5, 40, 5000, 200_000):
            garbage = replies_to(place, numbers.randbytes(size))
            assert not garbage or isinstance(garbage[0], requests.RequestRefused)
        for asked in (b"[]", b'{"protocol":99}', b'{"protocol":1,"asked":{"type":"dance"}}', b"{" * 4000):
            [refused] = replies_to(place, pack(asked))
            assert isinstance(refused, requests.RequestRefused)
            assert "ddplaunch" in refused.reason
        found = status_of(place)
        assert found.problem == ""
        assert found.run is not None
        assert (found.run.world_size, found.run.phase, found.run.folder) == (2, "running", str(job.folder))
        [node] = found.nodes
        assert isinstance(node.answer, NodeStatus)
        assert {worker.rank: worker.pid for worker in node.answer.workers} == pids
        assert all(worker.state == "running" and worker.rss for worker in node.answer.workers)
        for _ in range(MAX_CLIENTS):
            stack.enter_context(place.connect())
        assert "too many" in status_of(place).problem
    until(lambda: not status_of(place).problem, "the end of those that were too many")
    with place.connect() as sock:
        sock.settimeout(30)
        run, ended = client.replies_of(sock, requests.StopRun(), 30)
    assert isinstance(run, requests.Run)
    assert isinstance(ended, requests.Done)
    result = job.wait()
    assert ended.status == result.status == 130
    assert own_places(job) == []


def test_of_several_nodes_each_answers_and_one_that_does_not_is_named(job):
    job.behave(options=("--run-id", job.mark), nodes=2)
    [place] = until(lambda: [place for place in find.socket_paths(job.env) if job.mark in place.name], "a socket")
    assert place.folder == run_socket.runtime_folder(os.getuid())
    found = status_of(place)
    assert found.problem == ""
    ranks = {node.node_rank: [worker.rank for worker in node.answer.workers] for node in found.nodes}
    assert ranks == {0: [0, 1], 1: [2, 3]}
    other = next(worker.pid for node in found.nodes for worker in node.answer.workers if worker.rank == 2)
    agent = int(Path(f"/proc/{other}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(agent, signal.SIGSTOP)
    until(lambda: stopped([agent]), "the agent to stop")
    late = until(lambda: late_replies_of(place), "an answer of the one that runs")
    os.kill(agent, signal.SIGCONT)
    assert {node.node_rank: type(node.answer) for node in late.nodes} == {0: NodeStatus, 1: NoAnswer}
    assert "within 0.3 s" in next(node.answer.reason for node in late.nodes if node.node_rank == 1)
    job.process.send_signal(signal.SIGTERM)
    assert job.wait().status == 143
    assert place not in find.socket_paths(job.env)


def test_a_node_whose_workers_have_all_ended_tells_how_they_ended_while_others_run(job):
    job.behave("2=done", "3=done", options=("--run-id", job.mark), nodes=2)
    pids = [int(job.sign(f"ready-{rank}")) for rank in (2, 3)]
    [place] = until(lambda: [place for place in find.socket_paths(job.env) if job.mark in place.name], "a socket")
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "the end of node 1's workers")
    workers = [worker for node in status_of(place).nodes for worker in node.answer.workers]
    found = sorted((worker.rank, worker.state, worker.how) for worker in workers)
    assert found[:2] == [(0, "running", ""), (1, "running", "")]
    assert found[2:] == [(2, "ended", "exit status 0"), (3, "ended", "exit status 0")]
    assert [worker.pid for worker in workers if worker.rank > 1] == pids
    job.process.send_signal(signal.SIGTERM)
    assert job.wait().status == 143


@pytest.mark.parametrize("options", [(), ("--log-dir", "logs")], ids=["in its folder", "elsewhere"])
def test_a_run_that_was_killed_is_not_believed_whatever_it_has_left(job, options):
    job.behave(options=("--run-id", job.mark, *options), workers=1)
    [place] = until(lambda: [place for place in find.socket_paths(job.env) if job.mark in place.path], "a socket")
    job.kill_all()
    job.wait()
    in_its_folder = not options  # where it may be that of a run on another host
    until(lambda: job.left() == [], "the end of all")
    assert client.ask_all([place], AskStatus(), 1.0) == []
    assert in_its_folder or not os.path.exists(place.path)


def test_questions_of_clients_that_hang_up_are_not_gone_on_with(job, program):
    job.start("--nproc-per-node", 1, program("behave"), "all=done_when_told")
    [worker] = job.signs("ready", 1)
    place = place_of(job)
    agent = status_of(place).run.pid
    before = set(children(agent))
    with open(f"/proc/{worker}/fd/{STACKS_FD}", "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # who asks for its stack waits for that
        for _ in range(3):
            with ExitStack() as stack:
                for _ in range(5):
                    sock = stack.enter_context(place.connect())
                    sock.sendall(pack(requests.encode(requests.Request(AskStacks(within=30.0), within=40.0))))
                until(lambda: len(set(children(agent)) - before) == 5, "who is asked")
            until(lambda: set(children(agent)) == before, "the end of who was asked")
    (job.home / "signs" / "go").touch()
    assert job.wait().status == 0


def test_a_recorder_that_tells_no_times_costs_its_node_neither_its_place_nor_its_stacks(job, program):
    job.start("--nnodes", 2, "--nproc-per-node", 1, "--simulate", "--run-id", job.mark, program("behave"))
    pids = [int(pid) for pid in job.signs("ready", 2)]
    [place] = until(lambda: [place for place in find.socket_paths(job.env) if job.mark in place.name], "a socket")
    entry = {"pg_id": 0, "process_group": ["0", ""], "profiling_name": "gloo:all_reduce", "collective_seq_id": 7}
    body = b"HTTP/1.1 200 OK\r\n\r\n" + json.dumps({"entries": [entry]}).encode()
    folders = Path("/dev/shm").glob(f"ddplaunch-errors-{job.mark}-*")
    paths = [folder / "torch" / f"0-{rank}" for folder in folders for rank in range(2)]
    with ExitStack() as stack:
        for path in paths:
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(str(path))
            listener.listen()
            threading.Thread(target=_answer_all, args=(listener, body), daemon=True).start()
        [found] = client.ask_all([place], AskStacks(5.0), 10.0)
    assert found.problem == ""
    samples = [sample for node in found.nodes for sample in node.answer.samples(node.host)]
    assert sorted((sample.rank, sample.pid) for sample in samples) == list(enumerate(pids))
    calls = [call for sample in samples for group in sample.groups or () for call in group.calls]
    assert {(call.number, call.at) for call in calls} == {(7, 0)}
    job.process.send_signal(signal.SIGTERM)
    assert job.wait().status == 143
    job.nothing_left()


def _answer_all(listener: socket.socket, body: bytes) -> None:
    with suppress(OSError):
        while True:
            asked, _ = listener.accept()
            with asked:
                asked.recv(4096)
                asked.sendall(body)
