"""Several nodes begin together: who is where, and on what they agree before any worker runs."""

import json
import os
import re
import socket
from collections.abc import Iterator
from signal import SIGKILL

import pytest

from tests.conftest import PROGRAMS, until
from tests.nodes import Nodes, several
from tests.process.test_run_folder import check


@pytest.fixture
def stranger(nodes) -> Iterator[socket.socket]:
    """A service of somebody else, which takes connections and says nothing."""
    with socket.socket() as service:
        yield service


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Iterator[Nodes]:
    """A job of 2 nodes with 2 workers each that has ended well."""
    for nodes in several(tmp_path_factory.mktemp("finished")):
        nodes.static_nodes(2, "--nproc-per-node", 2, PROGRAMS / "place.py")
        assert nodes.statuses() == [0, 0]
        yield nodes


def test_ranks_count_on_from_node_to_node_whatever_each_of_them_brings(nodes, program):
    for place in (2, 0, 1):  # in whatever order they come
        nodes.node(*nodes.static(3, place), "--nproc-per-node", place + 1, program("place"))
    assert nodes.statuses() == [0, 0, 0]
    places = [nodes.place(rank) for rank in range(6)]
    names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK", "LOCAL_WORLD_SIZE")
    assert [tuple(int(place[name]) for name in names) for place in places] == [
        (0, 0, 0, 0, 1),
        (1, 0, 1, 1, 2),
        (2, 1, 1, 1, 2),
        (3, 0, 2, 2, 3),
        (4, 1, 2, 2, 3),
        (5, 2, 2, 2, 3),
    ]


def test_what_forks_workers_has_imported_before_the_nodes_have_met_and_imports_once(nodes, tmp_path):
    signs = tmp_path / "imports"
    signs.mkdir()
    (tmp_path / "heavy.py").write_text(f"import os\nopen(f'{signs}/{{os.getpid()}}', 'w').close()\n")
    (tmp_path / "train.py").write_text("import heavy\n")
    words = ("--start-method", "forkserver", "--preload", "heavy", "--nproc-per-node", 2, tmp_path / "train.py")
    nodes.node(*nodes.static(2, 1), *words)
    until(lambda: list(signs.iterdir()), "an import on the node that waits")
    nodes.node(*nodes.static(2, 0), *words)
    assert nodes.statuses() == [0, 0]
    assert len(list(signs.iterdir())) == 2


def test_what_all_workers_share_is_the_same_on_all_nodes(finished):
    expected = {
        "WORLD_SIZE": "4",
        "GROUP_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(finished.port),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "DDPLAUNCH_BACKEND": "gloo",
        "DDPLAUNCH_RUN_ID": finished.folder.name,
        "TORCHELASTIC_RUN_ID": finished.folder.name,
    }
    for rank in range(4):
        assert finished.place(rank).items() >= expected.items()


def test_each_node_has_a_folder_of_its_own_in_that_of_the_run(finished):
    for place in range(2):
        folder = finished.folder_of(place)
        plan = json.loads((folder / "plan.json").read_text())
        ranks = [2 * place, 2 * place + 1]
        assert (plan["nnodes"], plan["world_size"]) == (2, 4)
        assert [(worker["rank"], worker["node_rank"]) for worker in plan["workers"]] == [
            (rank, place) for rank in ranks
        ]
        assert {log.name for log in folder.glob("rank-*")} == {f"rank-{r}.{s}" for r in ranks for s in ("out", "err")}
        summary = json.loads((folder / "summary.json").read_text())
        assert summary["status"] == 0
        assert str(folder) in finished.started[place].err
        assert "no token: " in (folder / "plan.json").read_text(), "nobody is kept out without a token"
    assert {path.name for path in finished.folder.iterdir()} == {"node-0", "node-1"}


def test_nodes_that_differ_in_all_they_can_run_as_node_0_was_told_and_are_warned(nodes):
    """In their home, the name of the run, the backend, the number of nodes and the script."""
    for place, backend in enumerate(("gloo", "ucc")):
        script = nodes.home / f"code-{place}" / "train.py"
        script.parent.mkdir()
        script.write_text(
            f"import os; print(os.environ['DDPLAUNCH_RUN_ID'], os.environ['DDPLAUNCH_BACKEND'])  # {place}"
        )
        own = ("--run-id", f"name-{place}", "--backend", backend, script)
        nodes.node(*nodes.static(2 + place, place), *own, env={"XDG_STATE_HOME": str(nodes.home / f"state-{place}")})
    assert nodes.statuses() == [0, 0]
    for place, node in enumerate(nodes.started):
        assert node.out == f"[{place}] name-0 gloo\n"
        assert (nodes.home / f"state-{place}" / "ddplaunch" / "runs" / "name-0" / f"node-{place}").is_dir()
    said = nodes.started[0].err
    assert "gloo (the nodes differ: gloo on" in said
    assert said.count("warning: ") == 2
    assert "warning: the program is not the same on all nodes: train.py (" in said
    assert "warning: --nnodes is not the same on all nodes: 2 on " in said


def test_the_first_node_records_who_joins_and_each_of_them_its_own_workers(finished):
    joined = finished.events_of(0, "node_joined")
    assert [(event["node_rank"], event["workers"]) for event in joined] == [(0, 2), (1, 2)]
    assert {event["host"] for event in joined} == {socket.gethostname()}
    for place in range(2):
        assert {event["rank"] for event in finished.events_of(place, "worker_exited")} == {2 * place, 2 * place + 1}
        assert finished.events_of(place)[-1]["event"] == "job_ended"


def test_the_events_of_several_nodes_are_those_of_the_schema(nodes, program):
    started = nodes.static_nodes(3, program("behave"), "all=done_when_told")
    nodes.signs("ready", 3)
    os.kill(started[2].agent, SIGKILL)
    assert nodes.statuses() == [122, 122, 122]
    written = [event for place in range(2) for event in nodes.events_of(place)]
    for event in written:
        check(event)
    kinds = [event["event"] for event in written]
    assert (kinds.count("node_joined"), kinds.count("node_left")) == (3, 1)
    assert kinds[-1] == "job_ended"


def test_output_is_prefixed_by_the_rank_in_the_whole_job(nodes):
    started = nodes.static_nodes(2, "--nproc-per-node", 2, "--no-python", "/bin/sh", "-c", "echo here is $RANK")
    assert nodes.statuses() == [0, 0]
    for place, node in enumerate(started):
        ranks = (2 * place, 2 * place + 1)
        assert sorted(node.out.splitlines()) == [f"[{rank}] here is {rank}" for rank in ranks]


def test_each_node_closes_with_a_line_about_the_whole_job(finished):
    for place, node in enumerate(finished.started):
        first, *notes, last = node.err.splitlines()
        logs, *notes = notes
        assert logs.startswith("ddplaunch: logs in ")
        assert [note.split(",")[0] for note in notes] == ([] if place else ["ddplaunch: without a token"])
        assert re.match(r"ddplaunch: \S+: 4 workers on 2 nodes, no token, gloo ", first)
        assert last.startswith("ddplaunch: 4 workers on 2 nodes finished in ")


def test_workers_of_several_nodes_talk_over_the_interface_that_the_nodes_do(finished):
    for rank in range(2):
        place = finished.place(rank)
        assert (place["GLOO_SOCKET_IFNAME"], place["NCCL_SOCKET_IFNAME"]) == ("lo", "=lo")


# --- ranks by order of arrival


def test_the_first_to_come_is_node_0_and_the_others_are_numbered(nodes, program):
    nodes.node(*nodes.c10d(3), "--nproc-per-node", 3, program("place"))
    nodes.listens()
    for count in (1, 1):
        nodes.node(*nodes.c10d(3), "--nproc-per-node", count, program("place"))
    assert nodes.statuses() == [0, 0, 0]
    assert [nodes.place(rank)["NODE_RANK"] for rank in range(5)] == ["0", "0", "0", "1", "2"]
    (port,) = {nodes.place(rank)["MASTER_PORT"] for rank in range(5)}
    assert int(port) > 0, "node 0 has reserved one, and all were told"
    events = [event for place in range(3) for event in nodes.events_of(place, "generation_started")]
    assert [event["master_port"] for event in events] == [int(port)] * 3
    assert [node.err.splitlines()[-1].split(" ")[1] for node in nodes.started] == ["5"] * 3


def test_a_node_rank_beside_an_endpoint_is_kept(nodes, program):
    counts = (1, 2, 3)
    for place in (2, 1, 0):
        nodes.node(*nodes.c10d(3), "--node-rank", place, "--nproc-per-node", counts[place], program("place"))
    assert nodes.statuses() == [0, 0, 0]
    assert [nodes.place(rank)["NODE_RANK"] for rank in range(6)] == ["0", "1", "1", "2", "2", "2"]


def test_agents_that_race_for_the_coordinators_place_come_together(nodes):
    for _ in range(3):
        started = [nodes.node(*nodes.c10d(4), "--no-python", "/bin/true") for _ in range(4)]
        assert nodes.statuses(*started) == [0] * 4, [node.err for node in started]


# --- ports that others have


def test_a_taken_port_of_the_channel_is_walked_past(nodes, program, stranger):
    stranger.bind(("", nodes.port + 1))
    stranger.listen()
    nodes.static_nodes(2, program("place"))
    assert nodes.statuses(*nodes.started) == [0, 0]


def test_a_taken_endpoint_is_walked_past(nodes, program, stranger):
    stranger.bind(("", nodes.port))
    stranger.listen()
    for _ in range(2):
        nodes.node(*nodes.c10d(2), program("place"))
    assert nodes.statuses(*nodes.started) == [0, 0]


def test_two_jobs_with_one_endpoint_and_two_names_do_not_meet(nodes):
    for name in ("one", "two"):
        for _ in range(2):
            nodes.node(*nodes.c10d(2), "--rdzv-id", name, "--no-python", "/bin/sh", "-c", f"echo $RANK of {name}")
    assert nodes.statuses() == [0] * 4
    assert sorted(node.out for node in nodes.started) == [
        "[0] 0 of one\n",
        "[0] 0 of two\n",
        "[1] 1 of one\n",
        "[1] 1 of two\n",
    ]


def test_a_taken_master_port_is_one_error_on_node_0(nodes, program, stranger):
    stranger.bind(("", nodes.port))
    stranger.listen()
    node = nodes.node(*nodes.static(2, 0), program("place"))
    assert nodes.statuses(node) == [2]
    assert node.err.startswith(f"error: --master-port {nodes.port} is taken by pid {os.getpid()} (")
    assert node.err.count("error: ") == 1


def test_a_master_port_that_is_taken_while_nodes_are_waited_for_is_one_error_everywhere(nodes, program, stranger):
    nodes.node(*nodes.static(2, 0), program("place"))
    nodes.listens(1)
    stranger.bind(("", nodes.port))
    stranger.listen()
    nodes.node(*nodes.static(2, 1), program("place"))
    assert nodes.statuses(*nodes.started) == [2, 2]
    for node in nodes.started:
        assert f"error: --master-port {nodes.port} is taken by pid {os.getpid()} (" in node.err
        assert node.err.count("error: ") == 1
