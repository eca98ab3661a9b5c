"""Nodes that do not come, that come too late or to the wrong place, and who may come at all."""

import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from signal import SIGINT

import pytest

from ddplaunch.tools.runs import find
from tests.conftest import PROGRAMS, until
from tests.nodes import Nodes, several

SOON = ("--rdzv-timeout", "1s")


# --- who does not come


def test_who_is_missing_is_said_while_it_is_waited_for_and_at_the_end(nodes, program):
    started = [nodes.node(*nodes.static(4, place), "--rdzv-timeout", "5s", program("place")) for place in (0, 2)]
    assert nodes.statuses() == [121, 121]
    host = socket.gethostname()
    waited = f"ddplaunch: 2 of 4 nodes joined ({host}, {host}) after 3 s of 5 s; on node 1 run: ddplaunch "
    assert waited in started[0].err
    assert " --node-rank=1 " in started[0].err
    assert "; likewise on node 3\n" in started[0].err
    for node in started:
        what = f"2 of 4 nodes joined ({host}, {host}); missing: node 1, node 3"
        assert f"error: the rendezvous timed out: {what}\n" in node.err
        assert "\nhint: is ddplaunch running there, with the same address and token? Type `--node-rank`" in node.err
        assert node.err.count("error: ") == 1


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (("--env=A=v4lue",), " --env=A=v4lue "),
        (("--env-file=train.env",), " --env-file=... "),
        (("--env-file=train.env", "--env=B=typed"), " --env=B=typed "),
    ],
)
def test_what_is_shown_to_be_typed_holds_no_variable_of_a_file(nodes, program, given, shown):
    (nodes.home / "train.env").write_text("A=v4lue\n")
    node = nodes.node(*nodes.static(2, 0), *given, program("place"))
    node.says(shown)
    node.process.send_signal(SIGINT)
    assert nodes.statuses() == [130]
    assert node.err.count("v4lue") == shown.count("v4lue")


def test_a_name_that_leads_nowhere_is_said_at_node_0_as_well(nodes, program):
    """The others say so at their ends only, which the user of node 0 may not see."""
    argv = ("--nnodes", 2, "--nproc-per-node", 1, "--node-rank", 0, "--master-addr")
    node = nodes.node(*argv, "nowhere.invalid", program("place"))
    node.says("warning: the other nodes look for this one as nowhere.invalid, which cannot be looked up here: ")
    node.process.send_signal(SIGINT)
    assert nodes.statuses() == [130]


def test_a_node_that_gives_up_tells_node_0_why(nodes, program):
    """Its own words may not be seen, as under `srun --pty`."""
    first = nodes.node(*nodes.static(2, 0), "-m", "this")
    nodes.answers(1)
    second = nodes.node(*nodes.static(2, 1), "--debug-on-error", program("behave"))
    reason = "--debug-on-error needs a terminal for its worker, but stdin or stdout is none"
    first.says(f"ddplaunch: node 1 ({socket.gethostname()}) does not take part: {reason}\n")
    assert nodes.ends(second)[0].err.startswith(f"error: {reason}\n")
    nodes.node(*nodes.static(2, 1), "-m", "this")  # the user has typed what is right
    assert nodes.statuses() == [0, 2, 0]


def test_a_node_that_lacks_the_script_tells_node_0_once_its_own_error_is_printed(nodes, program):
    first = nodes.node(*nodes.static(2, 0), program("place"))
    nodes.answers(1)
    second = nodes.node(*nodes.static(2, 1), "/nowhere/train.py")
    first.says(f"ddplaunch: node 1 ({socket.gethostname()}) does not take part: /nowhere/train.py does not exist\n")
    assert nodes.ends(second)[0].err.startswith("error: /nowhere/train.py does not exist\n")
    nodes.node(*nodes.static(2, 1), program("place"))
    assert nodes.statuses() == [0, 2, 0]


def test_ctrl_c_before_all_nodes_are_there_names_no_time(nodes, program):
    started = [nodes.node(*nodes.static(3, place), program("place")) for place in (0, 1)]
    started[0].says("2 of 3 nodes joined")
    started[0].process.send_signal(SIGINT)
    assert nodes.statuses() == [130, 130]
    assert started[0].err.splitlines()[1:] == ["ddplaunch: stopped by SIGINT (Ctrl-C) before the workers were started"]


def test_ctrl_c_before_node_0_is_there_is_answered_too(nodes, program):
    node = nodes.node(*nodes.static(2, 1), program("place"))
    node.says("looking for node 0")
    node.process.send_signal(SIGINT)
    assert nodes.statuses() == [130]
    assert node.err.endswith("ddplaunch: stopped by SIGINT (Ctrl-C) before the workers were started\n")


def test_who_is_here_is_said_where_nodes_are_not_numbered(nodes, program):
    node = nodes.node(*nodes.c10d("2:3"), *SOON, program("place"))
    assert nodes.statuses() == [121]
    assert f"1 of 2 nodes joined ({socket.gethostname()}); missing: 1 more" in node.err


def test_a_coordinator_that_is_never_there_is_given_up(nodes, program):
    node = nodes.node(*nodes.static(2, 1), *SOON, program("place"))
    assert nodes.statuses() == [121]
    ports = f"ports {nodes.port + 1} to {nodes.port + 8}"
    assert node.err.startswith(f"error: node 0 was not reached within 1 s at 127.0.0.1, {ports} (127.0.0.1:")
    assert "connection refused" in node.err
    assert "hint: is ddplaunch running on node 0" in node.err


def test_a_name_that_nobody_knows_is_told_in_the_end(nodes, program):
    address = "no-such-host.invalid"
    node = nodes.node("--nnodes", 2, "--node-rank", 1, "--master-addr", address, *SOON, program("place"))
    assert nodes.statuses() == [121]
    assert f"{address}: " in node.err


def test_workers_that_are_waited_for_leave_no_folder(nodes, program):
    nodes.node(*nodes.static(2, 0), *SOON, program("place"))
    assert nodes.statuses() == [121]
    assert not (nodes.home / "state" / "ddplaunch").exists()


# --- who cannot take part


@pytest.fixture(scope="module")
def going(tmp_path_factory) -> Iterator[Nodes]:
    """A job of 2 nodes that runs, and that no test may disturb."""
    for nodes in several(tmp_path_factory.mktemp("going")):
        started = nodes.static_nodes(2, PROGRAMS / "behave.py", "all=done_when_told")
        nodes.signs("ready", 2)
        yield nodes
        (nodes.home / "signs" / "go").touch()
        assert nodes.statuses(*started) == [0, 0]
        nodes.nothing_left()


def test_a_node_too_many_is_refused_in_the_coordinators_words(nodes, program):
    started = [nodes.node(*nodes.c10d(2), program("behave"), "all=done_when_told") for _ in range(2)]
    nodes.signs("ready", 2)
    late = nodes.node(*nodes.c10d(2), program("behave"), "all=done_when_told")
    assert nodes.statuses(late) == [2]
    host = socket.gethostname()
    refusal, _, hint = late.err.partition("\n\n")
    assert refusal == f"error: node 0 refused this node: the job has its 2 nodes already: {host}, {host}"
    assert hint.splitlines()[0] == (
        "hint: for more nodes type a greater `--nnodes` on each; for another job, another port on each of its nodes"
    )
    # node 0 may say so after the refused node has ended
    until(lambda: any("refused" in node.err for node in started), "what node 0 says of that")
    assert sum(node.err.count("refused") for node in started) == 1
    (nodes.home / "signs" / "go").touch()
    assert nodes.statuses(*started) == [0, 0]


def test_a_second_node_of_one_rank_is_refused(program, going):
    again = going.node(*going.static(2, 1), program("behave"), "all=done_when_told")
    assert going.statuses(again) == [2]
    assert f"refused this node: node rank 1 is taken by {socket.gethostname()}\n" in again.err
    until(lambda: ": node rank 1 is taken by " in going.started[0].err, "what node 0 says of that")
    assert going.started[0].err.count(": node rank 1 is taken by ") == 1


def test_a_second_node_0_is_told_that_there_is_one(nodes, program):
    first = nodes.node(*nodes.static(2, 0), program("place"))
    nodes.answers(1)
    again = nodes.node(*nodes.static(2, 0), program("place"))
    assert nodes.statuses(again) == [2]
    assert "error: node rank 0 is taken: another ddplaunch on this host is the coordinator of this job\n" in again.err
    assert nodes.statuses(first, nodes.node(*nodes.static(2, 1), program("place"))) == [0, 0]


def test_a_node_rank_out_of_range_is_refused_even_if_this_node_expected_more_of_them(program, going):
    wrong = going.node(*going.static(4, 3), program("place"))
    assert going.statuses(wrong) == [2]
    assert "refused this node: node rank 3: the job has 2 nodes, node ranks 0 to 1\n" in wrong.err


def test_a_node_rank_that_cannot_be_is_an_error_before_anybody_is_asked(nodes, program):
    node = nodes.node(*nodes.static(2, 2), program("place"))
    assert nodes.statuses() == [2]
    assert "--node-rank 2" in node.err


# --- tokens


def token(place: int) -> dict[str, str]:
    return {"DDPLAUNCH_TOKEN": f"a secret of node {place}"}


def test_nodes_with_one_token_meet_and_it_is_shown_to_nobody(nodes, program):
    secret = token(0)["DDPLAUNCH_TOKEN"].encode()
    waits = (program("behave"), "all=done_when_told")
    reader, writer = os.pipe()  # as bash makes one of <(pass show token)
    with open(writer, "wb") as file:
        file.write(secret + b"\n")
    nodes.node(*nodes.static(2, 0), *waits, env=token(0))
    nodes.node(*nodes.static(2, 1), "--token-file", f"/dev/fd/{reader}", *waits, pass_fds=[reader])
    os.close(reader)
    for pid in map(int, nodes.signs("ready", 2)):
        assert secret not in Path(f"/proc/{pid}/environ").read_bytes()
    for pid in nodes.left():
        assert secret not in Path(f"/proc/{pid}/cmdline").read_bytes()
    (nodes.home / "signs" / "go").touch()
    assert nodes.statuses() == [0, 0]
    for place in range(2):
        assert "no token" not in (nodes.folder_of(place) / "plan.json").read_text()
    written = [path for path in nodes.home.rglob("*") if path.is_file()]
    assert len(written) > 6
    assert not [path for path in written if secret in path.read_bytes()]


def test_a_node_with_another_token_is_told_so_and_the_job_does_not_mind(nodes, program):
    first = nodes.node(*nodes.static(2, 0), program("place"), env=token(0))
    nodes.answers(1)
    stranger = nodes.node(*nodes.static(2, 1), "--rdzv-timeout", "3s", program("place"), env=token(1))
    assert nodes.statuses(stranger) == [121]
    assert "(127.0.0.1:" in stranger.err
    assert "wrong token, or another job)" in stranger.err
    second = nodes.node(*nodes.static(2, 1), program("place"), env=token(0))
    assert nodes.statuses(first, second) == [0, 0]
    refusals = [line for line in first.err.splitlines() if "refused" in line]
    assert refusals == ["ddplaunch: refused a connection from 127.0.0.1: wrong token, or another job"]


def test_tasks_of_one_launcher_on_one_host_make_themselves_a_token(nodes, program):
    job = {"PMIX_NAMESPACE": nodes.mark, "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    for rank in "01":
        env = {**job, "OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_LOCAL_RANK": rank}
        nodes.node(program("place"), env=env)
    assert nodes.statuses() == [0, 0]
    assert "token" not in nodes.started[0].err
    (file,) = (nodes.home / "state" / "ddplaunch" / "tokens").iterdir()
    secret = file.read_text()
    assert secret not in "".join(f"{nodes.place(rank)}" for rank in range(2))
    written = [path for path in nodes.home.rglob("*") if path.is_file() and path != file]
    assert not [path for path in written if secret.encode() in path.read_bytes()]


def test_a_token_that_is_easy_to_learn_is_warned_of(nodes, program):
    (nodes.home / "token").write_text("abc")
    (nodes.home / "token").chmod(0o644)
    for place in range(2):
        nodes.node(*nodes.static(2, place), "--token-file", nodes.home / "token", program("place"))
    assert nodes.statuses() == [0, 0]
    for node in nodes.started:
        assert node.err.startswith("ddplaunch: warning: the token has 3 characters, and may be guessed")
        assert node.err.splitlines()[1].endswith(f"chmod 600 {nodes.home / 'token'}")


# --- who listens where


def listening(pid: int) -> list[str]:
    """The addresses where a process listens (proc_net_tcp in the kernel's documentation), numeric with the port in hex."""
    own = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # it has been closed meanwhile
            link = os.readlink(fd)
            if link.startswith("socket:["):
                own.add(link[8:-1])
    lines = [
        line.split() for family in ("tcp", "tcp6") for line in Path(f"/proc/net/{family}").read_text().splitlines()
    ]
    return [words[1] for words in lines if words[9] in own and words[3] == "0A"]


def processes_of(nodes: Nodes) -> list[int]:
    found = nodes.left()
    assert len(found) >= 2
    return found


def test_on_one_node_nothing_listens(nodes, program):
    nodes.node("--nproc-per-node", 2, program("behave"), "all=done_when_told")
    nodes.signs("ready", 2)
    assert not any(map(listening, processes_of(nodes)))
    (nodes.home / "signs" / "go").touch()
    assert nodes.statuses() == [0]


def test_only_the_coordinator_listens_and_only_at_the_address_it_was_given(going):
    coordinator = going.started[0].agent
    assert listening(coordinator) == [f"0100007F:{going.port + 1:04X}"]
    assert not [pid for pid in processes_of(going) if pid != coordinator and listening(pid)]


def test_a_name_may_mean_any_address_of_the_coordinator(nodes, program):
    for _ in range(2):
        nodes.node(*nodes.c10d(2), program("behave"), "all=done_when_told")
    nodes.signs("ready", 2)
    (address,) = [where for pid in processes_of(nodes) for where in listening(pid)]
    assert address.endswith(f":{nodes.port:04X}")
    assert int(address.partition(":")[0], 16) == 0
    (nodes.home / "signs" / "go").touch()
    assert nodes.statuses() == [0, 0]


def test_without_control_nodes_do_not_talk(nodes, program):
    for place in range(2):
        nodes.node(
            *nodes.static(2, place), "--no-control", "--nproc-per-node", 2, program("behave"), "all=done_when_told"
        )
    nodes.signs("ready", 4)
    assert not [pid for pid in processes_of(nodes) if listening(pid)]
    (nodes.home / "signs" / "go").touch()
    assert nodes.statuses() == [0, 0]


def test_without_control_every_node_starts_and_ends_alone(nodes, program):
    node = nodes.node(*nodes.static(2, 1), "--no-control", "--nproc-per-node", 2, program("place"))
    assert nodes.statuses() == [0]
    assert [nodes.place(rank)["GROUP_RANK"] for rank in (2, 3)] == ["1", "1"]
    assert "error" not in node.err


def test_where_every_port_is_taken_node_0_says_so(nodes, program):
    services = [socket.create_server(("127.0.0.1", nodes.port + number)) for number in range(1, 9)]
    node = nodes.node(*nodes.static(2, 0), program("place"))
    assert nodes.statuses(node) == [2]
    for service in services:
        service.close()
    assert f"error: no free port at 127.0.0.1 for the agents: {nodes.port + 1} is taken, " in node.err
    assert node.err.count("error: ") == 1


def test_before_all_have_met_a_rank_is_neither_there_nor_missing(nodes, program):
    nodes.node(*nodes.static(2, 0), "--run-id", nodes.mark, program("place"))
    until(lambda: [place for place in find.socket_paths(nodes.env) if nodes.mark in place.name], "a socket")
    asked = subprocess.run(nodes.argv("stacks", "-r", "0", nodes.mark), env=nodes.env, capture_output=True, check=False)
    assert (asked.returncode, asked.stdout) == (0, f"run {nodes.mark} has no worker now\n".encode())
    assert asked.stderr.startswith(f"ddplaunch: stacks of {nodes.mark}, place.py, ".encode())
    nodes.started[0].process.send_signal(SIGINT)
    assert nodes.statuses() == [130]
