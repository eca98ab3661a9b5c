"""What the doctor says of nodes that differ, are lost, or do not find node 0; and which are good."""

import os
from typing import Any

import pytest

from ddplaunch.plan.cluster.hostlist import Host, parse_hostfile
from ddplaunch.reach.diagnose import HostError
from ddplaunch.system.errors import LaunchError
from ddplaunch.tools.doctor import Finding, Report
from ddplaunch.tools.doctor.nodes import Concern, agreement
from ddplaunch.tools.doctor.nodes.agreement import clock_of, faulty_nodes, good_nodes
from ddplaunch.tools.doctor.nodes.examine import write_hosts
from ddplaunch.tools.doctor.nodes.messages import Facts, Met, Shared

NAMES = [f"gpu{node}" for node in range(8)]
FACTS: dict[str, Any] = {
    "host": "x",
    "addresses": ("10.0.0.1",),
    "kernel_port": 4000,
    "ports": (),
    "python": "3.13.1",
    "torch": "2.13.0+cu130",
}


def facts(**of_the_third: object) -> dict[int, Facts]:
    """Four nodes, one of which is different."""
    alike = Facts(**FACTS, nccl=True)
    return {0: alike, 1: alike, 2: Facts(**{**FACTS, "nccl": True, **of_the_third}), 3: alike}


def said(concerns) -> list[tuple[str, str]]:
    return [(one.finding.severity, one.finding.title) for one in concerns]


@pytest.mark.parametrize(
    ("difference", "expected"),
    [
        ({}, []),
        ({"torch": "2.13.1+cu130"}, [("note", "gpu2: another torch than on the other nodes")]),
        ({"torch": "2.12.0+cu130"}, [("broken", "gpu2: another torch than on the other nodes")]),
        ({"torch": "2.13.0+cpu"}, [("broken", "gpu2: another torch than on the other nodes")]),
        ({"torch": "", "nccl": False}, [("broken", "gpu2: the workers' python has no torch")]),
        ({"nccl": False}, [("broken", "gpu2: its torch has no NCCL, that of others has")]),
        ({"python": "3.13.9"}, []),
        ({"python": "3.12.1"}, [("note", "gpu2: another Python than on the other nodes")]),
        ({"folder_problem": "/work: no such file"}, [("broken", "gpu2: /work: no such file")]),
        ({"script_problem": "permission denied"}, [("broken", "gpu2: the script cannot be read: permission denied")]),
    ],
)
def test_a_node_that_differs_is_named_with_the_weight_of_the_difference(difference, expected):
    assert said(agreement.judge_facts(NAMES, facts(**difference))) == expected


def test_another_script_breaks_a_job_and_the_evidence_says_who_has_which():
    scripts = {node: Facts(**FACTS, nccl=True, script_digest="bbb" if node in (1, 2) else "aaa") for node in range(5)}
    (one,) = agreement.judge_facts(NAMES, scripts)
    assert one.finding.title == "gpu[1-2]: another script than on the other nodes"
    assert one.finding.evidence == "aaa on gpu0,gpu[3-4]; bbb on gpu[1-2]"
    assert one.nodes == (1, 2)


@pytest.mark.parametrize(
    ("ahead", "expected"),
    [
        (0.4, []),
        (3.0, [("note", "gpu2: its clock is 3 s ahead of the others")]),
        (-3.0, [("note", "gpu2: its clock is 3 s behind the others")]),
        (400.0, [("broken", "gpu2: its clock is 6 min 40 s ahead of the others")]),
    ],
)
def test_clocks_are_compared_with_what_most_show(ahead, expected):
    """The doctor's own, here 50 s off, is none of theirs."""
    clocks = {node: clock_of(100.0, 150.0 + (ahead if node == 2 else 0), 100.01) for node in range(4)}
    assert said(agreement.judge_clocks(NAMES, clocks)) == expected


def test_a_clock_that_was_asked_over_a_slow_link_is_not_judged_beyond_what_is_known():
    clocks = {0: clock_of(0.0, 0.0, 0.0), 1: clock_of(0.0, 2.0, 3.0)}
    assert said(agreement.judge_clocks(NAMES, clocks)) == []


@pytest.mark.parametrize(
    ("met", "reason"),
    [
        (Met(addresses=("10.0.0.1",), reached="10.0.0.1"), ""),
        (
            Met(error="Name or service not known"),
            "cannot resolve head, the name of node 0: Name or service not known",
        ),
        (Met(addresses=("127.0.1.1",)), "head, the name of node 0, leads to 127.0.1.1 there, which is the node itself"),
        (
            Met(addresses=("10.9.9.9",)),
            "head, the name of node 0, leads to 10.9.9.9 there, which is none of its addresses",
        ),
        (Met(addresses=("10.0.0.1",), error="no answer in 2.5 s"), ""),  # the pairs say so
    ],
)
def test_the_name_of_node_0_has_to_lead_there(met, reason):
    found = said(agreement.judge_names(NAMES, {1: met, 3: met}, facts(), "head", is_needed=True))
    assert found == ([("broken", f"gpu1,gpu3: {reason}")] if reason else [])
    found = said(agreement.judge_names(NAMES, {1: met}, facts(), "head", is_needed=False))
    assert [severity for severity, _ in found] == (["note"] if reason else [])


def test_folders_that_are_not_shared_are_noted():
    seen: dict[int, tuple[bool | None, bool]] = {0: (True, True), 1: (False, True), 2: (None, False)}
    shared = {node: Shared(runs=runs, current=current, name_digits="0" * 16) for node, (runs, current) in seen.items()}
    assert said(agreement.judge_folders(NAMES, shared)) == [
        ("note", "gpu2: the current folder is another one than on gpu0"),
        ("note", "gpu1: the folder of runs is another one than on gpu0"),
    ]
    assert (
        said(
            agreement.judge_folders(
                NAMES, {node: Shared(runs=None, current=None, name_digits="0" * 16) for node in range(2)}
            )
        )
        == []
    )


def test_lost_nodes_with_one_reason_are_named_together_and_the_hint_names_the_first():
    lost = {
        2: HostError("no route to host", "`ssh {host}`", 121),
        1: HostError("no route to host", "`ssh {host}`", 122),
    }
    (one,) = agreement.judge_lost(NAMES, lost, 8)
    assert (one.finding.title, one.finding.hint) == ("gpu[1-2]: no route to host", "`ssh gpu1`")
    assert one.finding.severity == "broken"
    assert said(agreement.judge_lost(NAMES, lost, 6)) == [
        ("note", "gpu[1-2]: no route to host")
    ]  # as with --nnodes 6:8


def test_what_several_machines_have_in_common_is_one_finding():
    def report(*titles: str) -> Report:
        findings = tuple(Finding(check="shm", severity="slow", title=title) for title in titles)
        return Report(ddplaunch="1", host="x", python="p", seconds=1.0, checks=(), findings=findings)

    found = agreement.merged(NAMES, {0: report("small"), 1: report("small", "full", "full"), 2: report("small")})
    assert said(found) == [("slow", "gpu[0-2]: small"), ("slow", "gpu1: full")]


def concern(severity, *nodes: int, blames_link: bool = False) -> Concern:
    return Concern(finding=Finding(check="x", severity=severity, title="x"), nodes=nodes, blames_link=blames_link)


def test_good_nodes_are_those_that_nothing_bad_is_known_of_and_one_end_of_a_bad_link():
    concerns = [concern("broken", 1), concern("note", 2), concern("slow", 3, 4, blames_link=True)]
    assert good_nodes(6, concerns) == [0, 2, 3, 5]
    assert good_nodes(4, [concern("slow", 1, 2, blames_link=True), concern("slow", 2)]) == [0, 1, 3]


def test_a_host_file_is_read_as_it_was_written(tmp_path):
    hosts = (Host(name="ann@a", slots=4), Host(name="b"), Host(name="c", devices=("0", "2")))
    path = tmp_path / "good.txt"
    write_hosts(str(path), hosts)
    assert parse_hostfile(path.read_text(), str(path)) == hosts
    with pytest.raises(LaunchError, match="no node is good"):
        write_hosts(str(path), [])
    with pytest.raises(LaunchError, match="no such file or directory"):
        write_hosts(str(tmp_path / "none" / "good.txt"), hosts)
    assert list(tmp_path.iterdir()) == [path]


def test_a_host_file_takes_the_place_of_no_pipe_or_device(tmp_path):
    os.mkfifo(tmp_path / "good.txt")
    with pytest.raises(LaunchError, match="not a regular file"):
        write_hosts(str(tmp_path / "good.txt"), (Host(name="a"),))
    assert (tmp_path / "good.txt").is_fifo()


def of_network(severity, title, *nodes, blames_link=False):
    return Concern(
        finding=Finding(check="network", severity=severity, title=title), nodes=nodes, blames_link=blames_link
    )


def test_machines_that_are_slow_or_out_of_reach_are_told_from_links_and_from_what_is_installed():
    lost = {
        1: HostError("no route to host"),
        2: HostError("python there has no ddplaunch"),
        3: HostError("it has stopped answering"),
    }
    concerns = [
        of_network("broken", "cut", 1),
        of_network("slow", "slow", 5),
        of_network("slow", "link", 6, 7, blames_link=True),
        of_network("note", "MTU", 0),
        Concern(finding=Finding(check="files", severity="broken", title="another script"), nodes=(4,)),
    ]
    assert faulty_nodes(8, lost, concerns) == {
        1: ("unreachable", "no route to host"),
        3: ("unreachable", "it has stopped answering"),
        5: ("slow", "slow"),
    }
    assert faulty_nodes(7, lost, concerns) == {}
