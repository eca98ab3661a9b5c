"""Why Slurm ends a job, and which node it has lost; a scontrol of our own stands in for the real one."""

import time
from pathlib import Path

import pytest

from ddplaunch.reach.slurm.job import SlurmQuestions
from ddplaunch.spec.outcome import ClusterEnding
from tests.unit.slurm.test_job import line


def node(name: str, state: str) -> str:
    """What `scontrol show nodes -o` of Slurm 22.05 says of a node, shortened."""
    return f"NodeName={name} Arch=x86_64 OS=Linux 6.1 #1 SMP  State={state} Reason=Not responding [slurm@2026-11-21T20:57:31]\n"


STATES = {"node1": "IDLE+COMPLETING", "node2": "DOWN+NOT_RESPONDING", "node3": "MIXED", "node4": "DOWN*"}
NODES = "".join(node(name, state) for name, state in STATES.items())
GIVEN = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[1-4]"}


def place(tmp_path: Path, job: str, nodes: str = "exit 1", env: dict[str, str] = GIVEN) -> dict[str, str]:
    """Make a place where scontrol says this of the job, and of nodes what a shell command prints; give its variables."""
    (tmp_path / "job").write_text(job)
    (tmp_path / "nodes").write_text(NODES)
    path = tmp_path / "scontrol"
    path.write_text(
        f"#!/bin/sh\nPATH=/bin:/usr/bin; cd {tmp_path}; echo $* >> asked\ncase $2 in job) cat job;; nodes) {nodes};; esac\n"
    )
    path.chmod(0o755)
    return {**env, "PATH": str(tmp_path)}


def test_why_slurm_ends_a_job_has_a_name(tmp_path: Path) -> None:
    walltime = ClusterEnding("out of walltime")
    env = place(tmp_path, line("COMPLETING", "TimeLimit"))
    assert SlurmQuestions(env, 20).why_ending() == walltime
    env = place(tmp_path, line())
    assert SlurmQuestions(env, 20).why_ending() == ClusterEnding()
    assert SlurmQuestions({**env, "SLURM_JOB_END_TIME": str(int(time.time()) + 60)}, 20).why_ending() == ClusterEnding()
    # somebody has given the job more time since it was started
    assert SlurmQuestions({**env, "SLURM_JOB_END_TIME": str(int(time.time()) - 60)}, 20).why_ending() == ClusterEnding()
    nowhere = {**GIVEN, "PATH": "/nowhere"}
    assert SlurmQuestions(nowhere, 20).why_ending() == ClusterEnding()
    assert SlurmQuestions({**nowhere, "SLURM_JOB_END_TIME": str(int(time.time()))}, 20).why_ending() == walltime


@pytest.mark.parametrize(
    ("left", "nodes", "words"),
    [
        ("node[1,3-4]", "exit 1", "node2 was lost (down in Slurm)"),
        ("node1", "cat nodes", "node2,node4 were lost (down in Slurm)"),
        ("node[1-4]", "cat nodes", "node2,node4 were lost (down in Slurm)"),
        ("node[", "cat nodes", "node2,node4 were lost (down in Slurm)"),
        ("node1", "exit 1", "a node of the job was lost"),
        ("(null)", "echo nothing", "a node of the job was lost"),
        ("node1", "head -n 1 nodes", "a node of the job was lost"),
    ],
)
def test_a_node_that_slurm_has_lost_is_named_and_gives_the_status(tmp_path, left, nodes, words):
    job = line("COMPLETING", "NodeDown", NodeList=left, BatchHost="node1")
    assert SlurmQuestions(place(tmp_path, job, nodes), 20).why_ending() == ClusterEnding(words, (122, "node_lost"))


def test_only_those_nodes_are_asked_about_that_the_job_no_longer_has(tmp_path: Path) -> None:
    job = line("COMPLETING", "NodeDown", NodeList="node[1,3]")
    SlurmQuestions(place(tmp_path, job), 20).why_ending()
    assert (tmp_path / "asked").read_text().splitlines() == ["show job -o 7", "show nodes -o node2,node4"]


def test_a_job_that_does_not_know_its_nodes_lost_one_of_them(tmp_path: Path) -> None:
    env = place(tmp_path, line("COMPLETING", "NodeDown", NodeList="node1"), env={"SLURM_JOB_ID": "7"})
    assert SlurmQuestions(env, 20).why_ending().text == "a node of the job was lost"


@pytest.mark.parametrize(
    ("times", "queued"),
    [
        ("BatchFlag=1 SubmitTime=2026-11-21T23:59:00 StartTime=2026-11-22T00:01:00", 120.0),
        ("BatchFlag=1 SubmitTime=2026-11-21T23:59:00 StartTime=Unknown", None),
        ("BatchFlag=0 SubmitTime=2026-11-21T23:59:00 StartTime=2026-11-22T00:01:00", None),
    ],
    ids=["of a batch job", "not known", "of a shell, which may start many jobs"],
)
def test_how_long_the_job_has_waited_in_the_queue(tmp_path: Path, times: str, queued: float | None) -> None:
    assert SlurmQuestions(place(tmp_path, f"JobId=7 JobState=RUNNING {times}"), 20).time_in_queue() == ClusterEnding(
        queued=queued
    )
    assert SlurmQuestions({**GIVEN, "PATH": "/nowhere"}, 20).time_in_queue() == ClusterEnding()
