"""The step of a job in a Slurm allocation: the command that starts it, and its variables."""

from __future__ import annotations

import pytest

from ddplaunch import secret
from ddplaunch.cluster import Allocation
from ddplaunch.hostlist import Host
from ddplaunch.remote.slurm import argv, environment
from ddplaunch.spec import JobSpec, Program, ProgramKind


def variables(**env: str) -> dict[str, str]:
    return environment(env, token="secret", port=20000)


def test_agents_are_told_the_secret_and_where_to_meet_by_variables_alone() -> None:
    assert variables(HOME="/root") == {"HOME": "/root", "DDPLAUNCH_TOKEN": "secret", "DDPLAUNCH_MEETING_PORT": "20000"}
    assert secret.public(variables(HOME="/root")) == {"HOME": "/root"}


def test_what_srun_would_take_for_tasks_of_the_step_is_left_out() -> None:
    kept = variables(SLURM_NTASKS="12", SLURM_CPUS_PER_TASK="4", SLURM_EXACT="1", SLURM_JOB_ID="7", SLURM_GPUS="4")
    assert [name for name in kept if name.startswith("SLURM")] == ["SLURM_JOB_ID"]


@pytest.mark.parametrize(
    ("env", "each"),
    [
        ({"SLURM_GPUS": "12", "SLURM_GPUS_ON_NODE": "4", "SLURM_JOB_NUM_NODES": "2"}, "4"),
        ({"SLURM_GPUS": "12", "SLURM_JOB_NUM_NODES": "3"}, "4"),
        ({"SLURM_GPUS": "h200:12", "SLURM_JOB_NUM_NODES": "3"}, "h200:4"),
        ({"SLURM_GPUS": "5", "SLURM_JOB_NUM_NODES": "3"}, None),
        ({"SLURM_GPUS": "5"}, None),
        ({"SLURM_GPUS_ON_NODE": "4"}, None),
        ({"SLURM_GPUS_PER_NODE": "2"}, "2"),
    ],
)
def test_a_number_of_gpus_for_all_nodes_becomes_one_for_each(env: dict[str, str], each: str | None) -> None:
    assert variables(**env).get("SLURM_GPUS_PER_NODE") == each


def test_a_step_has_one_agent_on_each_of_the_nodes_in_their_order() -> None:
    hosts = tuple(Host(name=name) for name in ("node1", "node2", "node5"))
    spec = JobSpec(program=Program(kind=ProgramKind.SCRIPT, target="train.py"), nproc_per_node=2)
    place = Allocation(
        cluster="slurm",
        hosts=tuple(host.name for host in hosts),
        address="node1",
        address_reason="the first node",
        port=None,
        port_reason="a free one",
        start=hosts,
    )
    words = argv(spec, place, "/bin/python")
    assert {"--nodes=3", "--ntasks=3", "--ntasks-per-node=1", "--nodelist=node[1-2],node5", "--overlap"} <= set(words)
    assert words[words.index("/bin/python") :][:4] == ("/bin/python", "-P", "-m", "ddplaunch.remote.task")
    assert "--nproc-per-node=2" in words
