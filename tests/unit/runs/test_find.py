"""Which runs are found, which of them is meant, and how they are shown; runs of other hosts are told from those of this one."""

import fcntl
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from ddplaunch.record import run_socket
from ddplaunch.record.run_socket import SocketPath
from ddplaunch.record.window import requests
from ddplaunch.record.window.questions import NoAnswer, NodeStatus, WorkerStatus
from ddplaunch.record.window.requests import NodeReply, Run
from ddplaunch.system.console.tables import Look, written
from ddplaunch.system.errors import LaunchError
from ddplaunch.system.fields import Malformed
from ddplaunch.tools import profile
from ddplaunch.tools.page import verb as page
from ddplaunch.tools.runs import choice, find, ps
from ddplaunch.tools.runs.client import RunReplies

WORKER = WorkerStatus(0, 0, 7, "cuda:0", "running", "", 100.0, 95.0, 3 << 30, 61.0)
RUN = Run(
    run_id="run",
    host="gpu01",
    pid=5,
    folder="/runs/run",
    command="train.py",
    phase="running",
    seconds=100.0,
    world_size=3,
    nnodes=2,
    generation=1,
    restarts=1,
    max_restarts=3,
    ddplaunch="0.1.0",
)


DDPLAUNCH = f"{os.path.dirname(sys.executable)}/ddplaunch"


@pytest.fixture
def env(tmp_path, monkeypatch) -> dict[str, str]:
    """Of a user of whom nothing runs here."""
    monkeypatch.setattr(run_socket, "runtime_folder", lambda _uid: str(tmp_path / "none"))
    return {"XDG_STATE_HOME": str(tmp_path)}


def folder(tmp_path: Path, name: str, host: str) -> Path:
    """The folder of a run on this host."""
    path = tmp_path / "ddplaunch/runs" / name
    path.mkdir(parents=True)
    (path / "events.jsonl").write_text(json.dumps({"event": "job_started", "host": host}) + "\n")
    return path


def test_a_run_of_another_host_is_named_as_long_as_it_goes_on_there(tmp_path, env):
    with (folder(tmp_path, "far", "gpu07") / "events.jsonl").open() as held:
        folder(tmp_path, "over", "gpu08")
        fcntl.flock(held, fcntl.LOCK_EX)
        assert [(run.run_id, run.host) for run in find.look(env).there] == [("far", "gpu07")]
        assert ps.show(env, as_json=False) == f"far: runs on gpu07 (`ssh gpu07 {DDPLAUNCH} ps`)"
        assert json.loads(ps.show(env, as_json=True))[0]["host"] == "gpu07"
        for named in (None, "far", "fa"):
            with pytest.raises(LaunchError) as raised:
                choice.choose_running(env, named, "stop")
            assert "far runs on gpu07" in raised.value.message
            assert raised.value.hint == f"`ssh gpu07 {DDPLAUNCH} stop far`"
    assert ps.show(env, as_json=False) == "none of your jobs runs here"
    with pytest.raises(LaunchError, match="far has ended"):
        choice.choose_running(env, "far", "stop")
    with pytest.raises(LaunchError, match="none of your jobs runs here"):
        choice.choose_running(env, None, "stop")


def test_the_whole_name_of_a_run_on_another_host_is_that_run_and_no_other_whose_name_begins_so(
    tmp_path, env, monkeypatch
):
    here = RunReplies(SocketPath("/runs/far-2", "socket"), replace(RUN, run_id="far-2", folder="/runs/far-2"))
    monkeypatch.setattr(find, "ask_all", lambda *_: [here])
    assert choice.choose_running(env, "fa", "stop").run_id == "far-2"
    with (folder(tmp_path, "far", "gpu07") / "events.jsonl").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(LaunchError, match="far runs on gpu07"):
            choice.choose_running(env, "far", "stop")


def test_what_to_type_for_a_run_on_another_host_starts_by_itself_there_with_the_options_that_were_typed(tmp_path, env):
    path = folder(tmp_path, "far", "gpu07")
    with (path / "events.jsonl").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with_terminal = (
            "ssh -t gpu07",
            "srun --overlap --jobid 84 -N1 -n1 -w gpu07 --pty",
            "srun --overlap --jobid 84 --het-group=1 -N1 -n1 -w gpu07 --pty",
            "kubectl exec -it gpu07 --",
        )
        without = [before.replace(" -it", "").replace(" -t", "").removesuffix(" --pty") for before in with_terminal]
        plans = ("{}", '{"srun_job": "84"}', '{"srun_job": "84+1"}', '{"cluster": "kubernetes"}')
        for verb, lines in (("stacks", without), ("attach", with_terminal), ("top", with_terminal)):
            for plan, before in zip(plans, lines, strict=True):
                (path / "plan.json").write_text(plan)
                with pytest.raises(LaunchError) as raised:
                    choice.choose_running(env, None, verb, "-r", "1")
                assert raised.value.hint == f"`{before} {DDPLAUNCH} {verb} far -r 1`"


@pytest.mark.parametrize(
    ("host", "pod"),
    [
        ("train-0.train.ns.svc", "train-0"),
        ("train-0", "train-0"),
        ("10.1.2.3", '"$(kubectl get pods -o name --field-selector status.podIP=10.1.2.3)"'),
        ("fd00::3", '"$(kubectl get pods -o name --field-selector status.podIP=fd00::3)"'),
    ],
)
def test_in_a_pod_the_line_to_type_leads_to_another_pod_by_kubectl(tmp_path, env, host, pod):
    env = {**env, "KUBERNETES_SERVICE_HOST": "10.96.0.1"}
    with (folder(tmp_path, "far", host) / "events.jsonl").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert ps.show(env, as_json=False) == f"far: runs on {host} (`kubectl exec {pod} -- {DDPLAUNCH} ps`)"


KUBECTL = """#!/bin/sh
case "$*" in
    'get pods -o jsonpath={.items[?(@.spec.hostname=="train-0")].metadata.name} --field-selector status.phase=Running')
        echo train-0-x7k2p ;;
    *) echo "$@" ;;
esac
"""


@pytest.mark.parametrize("host", ["train-0.train.ns.svc", "train-0"])
def test_in_a_pod_of_an_indexed_job_the_line_to_type_has_the_name_of_the_other_pod_looked_up(tmp_path, env, host):
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(KUBECTL)
    kubectl.chmod(0o755)
    env = {**env, "KUBERNETES_SERVICE_HOST": "10.96.0.1", "JOB_COMPLETION_INDEX": "1"}
    with (folder(tmp_path, "far", host) / "events.jsonl").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        hint = ps.show(env, as_json=False)
    typed = re.search(r"\(`(.*)`\)", hint)
    assert typed is not None, hint
    path = f"{tmp_path}:{os.environ['PATH']}"
    ran = subprocess.run(["sh", "-c", typed[1]], env={"PATH": path}, capture_output=True, text=True, check=True)
    assert ran.stdout == f"exec train-0-x7k2p -- {DDPLAUNCH} ps\n"


def test_the_options_of_a_verb_stand_in_what_to_type_on_another_host(tmp_path, env):
    wish = profile.wanted("2", "5", memory=True)
    with (folder(tmp_path, "far", "gpu07") / "events.jsonl").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        for show, words in (
            (lambda: profile.show(env, None, "0-1", wish, "a b.gz"),
             "profile far -r 0-1 --seconds 2 --steps 5 --memory --out 'a b.gz'"),
            (lambda: profile.show(env, "far", None, profile.wanted("2", None, memory=False), None), "profile far --seconds 2"),
            (lambda: ps.show(env, "far", as_json=True), "ps far --json"),
        ):  # fmt: skip
            with pytest.raises(LaunchError) as raised:
                show()
            assert raised.value.hint == f"`ssh gpu07 {DDPLAUNCH} {words}`"


def test_the_options_of_a_verb_stand_in_the_example_that_names_one_of_several_runs(tmp_path, env):
    for name in ("far-1", "far-2"):
        folder(tmp_path, name, "gpu07")
    with pytest.raises(LaunchError) as raised:
        page.write(env, "far", out="a b.html", trace_file=None, opens=True)
    assert raised.value.hint is not None
    assert raised.value.hint.endswith(" --out 'a b.html' --open`")


@pytest.mark.parametrize("job", [7, "$(id)", None, [], "8\n9", "8+", "8+1;id", "+1"])
def test_an_id_in_slurm_that_is_none_goes_on_no_command_line(tmp_path, env, job):
    path = folder(tmp_path, "far", "gpu07")
    (path / "plan.json").write_text(json.dumps({"srun_job": job}))
    with (path / "events.jsonl").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert [run.srun_job for run in find.look(env).there] == [""]


@pytest.mark.parametrize("content", [b"", b"\xff\n", b"[]\n", b"{}\n", b'{"host": "x"' + b" " * 100_000])
def test_a_damaged_file_of_events_hides_that_run_only(tmp_path, env, content):
    file = folder(tmp_path, "odd", "gpu07") / "events.jsonl"
    file.write_bytes(content)
    with file.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert find.look(env).there == []


def test_all_ranks_are_shown_in_their_order_and_a_node_that_did_not_answer_is_named():
    ended = WorkerStatus(2, 0, 9, "cuda:0", "ended", "exit status 1", 5.0, 1.0, 0, None)
    waiting = WorkerStatus(1, 1, 0, "cuda:1", "waiting", "", 0.0, 0.0, 0, None)
    spare = replace(waiting, rank=0)  # as it would be if its node were the only one
    nodes = (
        NodeReply(node_rank=None, host="gpu04", answer=NodeStatus((spare,))),
        NodeReply(node_rank=1, host="gpu02", answer=NodeStatus((ended,))),
        NodeReply(node_rank=2, host="gpu03", answer=NoAnswer("has not answered within 1 s")),
        NodeReply(node_rank=0, host="gpu01", answer=NodeStatus((WORKER, waiting))),
    )
    assert written([ps.render(RunReplies(SocketPath("/runs/run", "socket"), RUN, nodes, ""))], Look()) == (
        "run: running, 3 workers on 2 nodes, for 1 min 40 s, restart 1 of 3: train.py\n"
        "  rank  host   pid  device  state          cpu  memory      quiet\n"
        "  0     gpu01    7  cuda:0  running        95%   3 GiB  1 min 1 s\n"
        "  1     gpu01       cuda:1  waiting\n"
        "  2     gpu02    9  cuda:0  exit status 1\n"
        "  node 2 (gpu03) has not answered within 1 s"
    )
    known = RunReplies(SocketPath("/runs/run", "socket"), RUN, nodes, "")
    assert [worker.rank for _, worker in known.workers] == [0, 1, 2]


@pytest.mark.parametrize("pace", ["1e-320", "-1.0", "0", "1e300", "1e999", "NaN"])
def test_a_pace_that_is_none_is_refused_as_malformed(pace):
    payload = requests.encode(replace(RUN, steps_per_second=2.0)).replace(b":2.0", f":{pace}".encode())
    with pytest.raises(Malformed):
        requests.decode_reply(payload)


@pytest.mark.parametrize("text", ["\n  0  gpu01  forged", "\x1b[2J", "\r", "\u2028", "\x85"])
@pytest.mark.parametrize("pace", [1e-9, 1e9])
def test_whatever_a_run_says_it_takes_the_lines_of_one_run(text, pace):
    odd = replace(RUN, run_id=f"a{text}b", command=f"a.py{text}", straggler=f"rank 1{text}", steps_per_second=pace)
    worker = WorkerStatus(0, 0, 7, "cpu", "running", "", 1e-320, 1e12, 0, 0.0)
    replies = RunReplies(
        SocketPath(f"/runs/run{text}", "socket"), odd, (NodeReply(0, "gpu01", NodeStatus((worker,))),), text
    )
    shown = written([ps.render(replies)], Look())
    assert len(shown.splitlines()) == 5  # the run, the header, its worker, the straggler, the problem
    assert all(char.isprintable() for char in shown.replace("\n", ""))
    assert json.loads(json.dumps(ps._data(replies), allow_nan=False))


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ((1, 2), ["node 1 (host1) is lost", "node 2 (host2) is lost"]),
        (range(1, 1001), ["each of nodes 1-1000 is lost"]),
        ((None,) * 7, ["each of hostNone, hostNone, hostNone, hostNone, hostNone and 2 more is lost"]),
    ],
    ids=["few", "many", "before all have met"],
)
def test_many_nodes_that_have_not_answered_for_one_reason_are_named_in_one_line(ranks, said):
    nodes = [NodeReply(node_rank=rank, host=f"host{rank}", answer=NoAnswer("is lost")) for rank in ranks]
    other = NodeReply(node_rank=2000, host="far", answer=NoAnswer("does not know"))
    assert find.silent([*nodes, other]) == [*said, "node 2000 (far) does not know"]


@pytest.mark.parametrize(
    ("place", "name"),
    [(SocketPath("/runs/a.b", "socket"), "a.b"), (SocketPath("/tmp/ddplaunch-0", "a.b.0123abcd"), "a.b")],
)
def test_a_run_that_does_not_answer_has_the_name_of_its_place(place, name):
    assert written([ps.render(RunReplies(place, None, (), "does not answer"))], Look()) == f"{name}: does not answer"


@pytest.mark.parametrize("typed", ["train.py:main", "train.py", "main"])
def test_a_function_is_found_by_its_file_and_by_its_name(typed):
    run = find.Known(run_id="k7qx", script="train.py:main")
    assert choice.best_matches(typed, [run, find.Known(run_id="other", script="other.py")]) == [run]


def test_a_job_that_stands_still_is_not_said_to_run():
    idle = replace(RUN, idle_for=159.0, idle_why="rank 1 has not reached all_reduce")
    shown = written([ps.render(RunReplies(SocketPath("/runs/run", "socket"), idle))], Look())
    assert shown.startswith("run: stands still for 2 min 39 s, 3 workers on 2 nodes")
    assert "\n  rank 1 has not reached all_reduce" in shown
    stopping = replace(idle, phase="stopping")
    assert "stands" not in written([ps.render(RunReplies(SocketPath("/runs/run", "socket"), stopping))], Look())
