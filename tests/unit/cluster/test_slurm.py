from signal import SIGTERM
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplaunch.plan.cluster import Allocation, Task, endpoints
from ddplaunch.plan.cluster.hostlist import Host
from ddplaunch.plan.cluster.slurm import without_step
from ddplaunch.spec.job import JobSpec, Program, ProgramKind
from ddplaunch.system.errors import LaunchError
from tests.unit.builders import refusal
from tests.unit.environments import captured, found

NODES = ("node1", "node2", "node3")
FIRST_NODE = ("node1", "the first node of step 0 of Slurm job 1")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_task_on_each_node_is_an_agent(rank: int) -> None:
    node = found(captured(f"slurm-node-{rank}"))
    assert (node.cluster, node.nnodes, node.node_rank, node.hosts) == ("slurm", (3, 3), rank, NODES)
    assert (node.endpoint.address, node.endpoint.address_reason) == FIRST_NODE
    assert (node.endpoint.port, node.hosts_to_start_on, node.task, node.notes) == (None, (), None, ())
    assert node.identity == "slurm 1.0"
    assert node.rendezvous is not None
    assert (node.rendezvous.addresses, node.rendezvous.coordinator) == (("node1",), rank == 0)
    assert (node.rendezvous.ports, node.rendezvous.listen) == (tuple(range(20008, 20016)), None)


@pytest.mark.parametrize(
    ("name", "task"),
    [
        (
            "slurm-rank-0",
            Task(rank=0, world_size=12, local_rank=0, local_world_size=4, node_rank=0, nnodes=3, node_cpus=4),
        ),
        (
            "slurm-rank-5",
            Task(rank=5, world_size=12, local_rank=1, local_world_size=4, node_rank=1, nnodes=3, node_cpus=4),
        ),
        (
            "slurm-rank-5-bound",
            Task(rank=5, world_size=12, local_rank=1, local_world_size=4, node_rank=1, nnodes=3, node_cpus=4),
        ),
    ],
)
def test_a_task_for_each_rank_is_one_worker(name: str, task: Task) -> None:
    node = found(captured(name))
    assert (node.task, node.nnodes, node.node_rank, node.hosts) == (task, (3, 3), task.node_rank, NODES)
    assert node.rendezvous is not None
    assert node.rendezvous.coordinator is (task.rank == 0)


IN_A_SHELL = "72 (ddplaunch) R 60 72 60 34816 72 4194304"
THE_COMMAND_OF_A_SCRIPT = "72 (ddplaunch) R 60 60 60 34816 60 4194304"
OF_NO_TERMINAL = "72 (ddplaunch) R 60 72 60 0 -1 4194304"


@pytest.mark.parametrize(
    ("name", "stat", "shell", "is_typed"),
    [
        ("slurm-rank-0", IN_A_SHELL, "bash\0", True),
        ("slurm-node-0", IN_A_SHELL, "-bash\0", True),
        ("slurm-node-0", IN_A_SHELL.replace("ddplaunch", "a) b (c"), "zsh\0-i\0", True),
        ("slurm-node-0", IN_A_SHELL, "bash\0-ic\0ddplaunch train.py\0", False),
        ("slurm-node-0", IN_A_SHELL, "bash\0run.sh\0", False),
        ("slurm-node-0", THE_COMMAND_OF_A_SCRIPT, "bash\0", False),
        ("slurm-node-0", OF_NO_TERMINAL, "bash\0", False),
    ],
)
def test_what_is_typed_in_the_shell_of_a_step_is_no_task_of_it(name, stat, shell, is_typed) -> None:
    env = {**captured(name), "SLURM_PTY_PORT": "40000"}
    typed = found(env, files={"/proc/self/stat": stat, "/proc/60/cmdline": shell})
    assert ([host.address for host in typed.hosts_to_start_on], typed.starter) == (
        (list(NODES), "srun") if is_typed else ([], "")
    )
    assert found(env, files={}).hosts_to_start_on == ()  # /proc hides it


@pytest.mark.parametrize("name", ["slurm-batch", "slurm-salloc", "slurm-node-1", "slurm-rank-5"])
def test_it_is_known_how_often_slurm_has_started_the_job_again(name: str) -> None:
    assert found(captured(name)).requeues == 0
    assert found(captured(name, SLURM_RESTART_COUNT="2")).requeues == 2


def test_the_tasks_of_a_script_count_outside_of_steps_and_what_was_told_within() -> None:
    assert found(captured("slurm-batch", SLURM_NTASKS_PER_NODE="4")).tasks_per_node == 4
    assert found(captured("slurm-salloc")).tasks_per_node == 2
    assert found(captured("slurm-node-0")).tasks_per_node is None
    assert found(captured("slurm-node-0", DDPLAUNCH_TASKS_PER_NODE="4")).tasks_per_node == 4


def test_nodes_may_have_different_numbers_of_tasks() -> None:
    """`srun -N3 -n7` packs the first node."""
    layout = {"SLURM_STEP_NUM_TASKS": "7", "SLURM_STEP_TASKS_PER_NODE": "5,1(x2)"}
    node = found(captured("slurm-rank-5", **layout, SLURM_PROCID="6", SLURM_NODEID="2", SLURM_LOCALID="0"))
    assert node.task == Task(rank=6, world_size=7, local_rank=0, local_world_size=1, node_rank=2, nnodes=3, node_cpus=4)


def test_several_tasks_on_one_node_meet_there() -> None:
    one = {"SLURM_STEP_NODELIST": "node2", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "4"}
    node = found(captured("slurm-rank-5", **one, SLURM_NODEID="0", SLURM_PROCID="1"))
    assert (node.nnodes, node.endpoint.address, node.endpoint.address_reason) == ((1, 1), "127.0.0.1", "a single node")
    assert node.rendezvous is not None
    assert (node.rendezvous.addresses, node.rendezvous.listen) == (("127.0.0.1",), "127.0.0.1")


def test_a_step_on_fewer_nodes_than_the_job_has_counts_its_own() -> None:
    """`srun -N2` in a job of three nodes."""
    two = {"SLURM_STEP_NODELIST": "node[2-3]", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
    node = found(captured("slurm-node-1", **two))
    assert (node.nnodes, node.hosts, node.endpoint.address) == ((2, 2), ("node2", "node3"), "node2")


def test_a_step_of_one_task_is_one_node() -> None:
    """A shell of `srun --pty bash` as well."""
    one = {"SLURM_STEP_NODELIST": "node3", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"}
    node = found(captured("slurm-node-0", **one))
    assert (node.cluster, node.nnodes, node.hosts, node.node_rank) == ("slurm", (1, 1), ("node3",), 0)
    assert (node.endpoint.address, node.rendezvous, node.hosts_to_start_on) == ("127.0.0.1", None, ())


@pytest.mark.parametrize("name", ["slurm-batch", "slurm-salloc"])
def test_an_allocation_is_used_as_a_whole(name: str) -> None:
    hosts = NODES if name == "slurm-batch" else NODES[:2]
    job = found(captured(name), hostname="node1" if name == "slurm-batch" else "ctl")
    assert (job.cluster, job.nnodes, job.hosts) == ("slurm", (len(hosts), len(hosts)), hosts)
    assert (job.starter, job.hosts_to_start_on) == ("srun", tuple(Host(name=host) for host in hosts))
    assert (job.endpoint.address, job.task, job.rendezvous, job.notes) == ("node1", None, None, ())


def test_the_shell_of_an_interactive_allocation_is_no_task() -> None:
    """salloc with LaunchParameters=use_interactive_step: a step with a special number."""
    job = found(captured("slurm-node-0", SLURM_STEP_ID="4294967290", SLURM_STEPID="4294967290"))
    assert (job.starter, job.hosts) == ("srun", NODES)


def test_one_node_of_an_allocation_that_is_this_one_is_started_too() -> None:
    asked = JobSpec(program=Program(kind=ProgramKind.SCRIPT, target="train.py"))
    job = found(captured("slurm-batch", SLURM_RESTART_COUNT="2"), nnodes=(1, 1))
    assert (job.hosts_to_start_on, job.starter, job.is_here, job.endpoint.address) == (
        (Host(name="node1"),),
        "srun",
        True,
        "127.0.0.1",
    )
    assert job.notes == ("node[2-3] of Slurm job 1 is not used: --nnodes asks for fewer",)
    alone = without_step(asked, job)
    assert (alone.hosts, alone.hosts_to_start_on, alone.endpoint.address, alone.nnodes) == (
        ("node1",),
        (),
        "127.0.0.1",
        (1, 1),
    )
    assert (alone.cluster, alone.requeues, alone.sent_again) == ("slurm", 2, frozenset({SIGTERM}))
    assert alone.notes == job.notes


def test_without_a_control_channel_there_is_no_step() -> None:
    assert found(captured("slurm-batch"), nnodes=(1, 1), no_control=True).hosts_to_start_on == ()


def test_the_agent_of_a_step_on_one_node_looks_for_the_command_that_has_started_it() -> None:
    one = {"SLURM_STEP_NODELIST": "node2", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"}
    ours = {"DDPLAUNCH_RDZV_HOST": "login1", "DDPLAUNCH_RDZV_PORT": "20000"}
    node = found(captured("slurm-node-0", **one, **ours, SLURM_NODEID="0", SLURM_PROCID="0"))
    assert (node.nnodes, node.endpoint.address, node.endpoint.address_reason) == ((1, 1), "127.0.0.1", "a single node")
    assert node.rendezvous is not None
    assert node.rendezvous.addresses == ("login1", "10.77.0.12")  # which may know the host by another name
    assert (node.rendezvous.coordinator, node.rendezvous.ports[0], node.has_front) == (False, 20000, True)


def test_one_node_of_an_allocation_that_is_not_this_one_is_started() -> None:
    job = found(captured("slurm-salloc"), hostname="ctl", nnodes=(1, 1))
    assert (job.hosts_to_start_on, job.starter, job.endpoint.address) == ((Host(name="node1"),), "srun", "127.0.0.1")
    assert found(captured("slurm-batch"), include="node2").hosts_to_start_on == (Host(name="node2"),)


def test_some_nodes_of_an_allocation_may_be_used() -> None:
    job = found(captured("slurm-batch"), nnodes=(2, 2))
    assert (job.hosts, job.nnodes) == (("node1", "node2"), (2, 2))
    assert found(captured("slurm-batch"), exclude="node2").hosts == ("node1", "node3")
    assert found(captured("slurm-batch"), nnodes=(2, 4)).nnodes == (2, 3)


# as Slurm 22.05 sets them for `--nodelist=node3 : --nodelist=node[1-2]`
COMPONENTS = {
    "SLURM_HET_SIZE": "2",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "node3",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "node[1-2]",
}
IN_TURN = ("node3", "node1", "node2")


@pytest.mark.parametrize("name", ["slurm-batch", "slurm-salloc"])
def test_all_components_of_a_heterogeneous_job_are_used(name: str) -> None:
    nodes = {"slurm-batch": "node3", "slurm-salloc": ""}[name]
    alone = {"SLURM_JOB_NODELIST": nodes, "SLURM_NODELIST": nodes, "SLURM_JOB_NUM_NODES": nodes and "1"}
    job = found(captured(name, **COMPONENTS, **alone))
    assert (job.hosts, job.endpoint.address, job.nnodes) == (IN_TURN, "node3", (3, 3))


def test_nodes_of_a_step_count_from_component_to_component_though_they_are_listed_by_name() -> None:
    agents = [
        found(captured("slurm-node-0", **COMPONENTS, SLURM_NODEID=f"{node}", SLURM_PROCID=f"{node}"))
        for node in range(3)
    ]
    assert {agent.hosts for agent in agents} == {IN_TURN}
    assert {agent.endpoint.address for agent in agents} == {"node3"}
    assert [agent.rendezvous.coordinator for agent in agents if agent.rendezvous] == [True, False, False]


def test_the_tasks_of_a_heterogeneous_step_count_like_its_nodes() -> None:
    layout = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "1(x2),2"}
    node = found(
        captured("slurm-rank-5", **COMPONENTS, **layout, SLURM_PROCID="1", SLURM_NODEID="0", SLURM_LOCALID="1")
    )
    assert node.task == Task(rank=1, world_size=4, local_rank=1, local_world_size=2, node_rank=0, nnodes=3, node_cpus=4)


def test_a_step_of_one_component_has_its_nodes() -> None:
    two = {"SLURM_STEP_NODELIST": "node[1-2]", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
    assert found(captured("slurm-node-1", **COMPONENTS, **two)).hosts == ("node1", "node2")


def test_older_words_for_components_are_understood() -> None:
    older = {name.replace("HET", "PACK"): value for name, value in COMPONENTS.items()}
    assert found(captured("slurm-batch", **older)).hosts == IN_TURN


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"SLURM_HET_SIZE": "many"}, "SLURM_HET_SIZE=many"),
        ({"SLURM_HET_SIZE": "0"}, "SLURM_HET_SIZE=0"),
        ({"SLURM_HET_SIZE": "4000"}, "SLURM_HET_SIZE=4000"),
        ({"SLURM_HET_SIZE": "3"}, "SLURM_JOB_NODELIST_HET_GROUP_2 is not set"),
        ({"SLURM_JOB_NODELIST_HET_GROUP_1": "node["}, "SLURM_JOB_NODELIST_HET_GROUP_1"),
    ],
)
def test_components_that_cannot_be_read_are_an_error(changes: dict[str, str], words: str) -> None:
    with pytest.raises(LaunchError, match=words):
        found(captured("slurm-batch", **{**COMPONENTS, **changes}))


def test_rank_0_is_looked_for_on_all_nodes_if_tasks_may_be_anywhere() -> None:
    def task(rank: int, node: int) -> Allocation:
        places = {"SLURM_PROCID": f"{rank}", "SLURM_NODEID": f"{node}", "SLURM_LOCALID": "0"}
        return found(captured("slurm-rank-5", SLURM_DISTRIBUTION="arbitrary", **places))

    first, other = task(0, 2), task(4, 0)
    assert (first.endpoint.address, other.endpoint.address) == (None, None)
    assert first.rendezvous is not None
    assert other.rendezvous is not None
    assert (first.rendezvous.coordinator, other.rendezvous.coordinator) == (True, False)
    assert other.rendezvous.addresses == NODES


def test_the_first_node_is_the_coordinator_wherever_task_0_is() -> None:
    node = found(captured("slurm-node-0", SLURM_DISTRIBUTION="arbitrary", SLURM_PROCID="2", SLURM_NODEID="0"))
    assert node.rendezvous is not None
    assert (node.rendezvous.coordinator, node.rendezvous.addresses) == (True, ("node1",))


def test_an_address_that_was_asked_for_is_tried_first() -> None:
    node = found(captured("slurm-node-0"), master_addr="10.1.0.1", master_port=20010)
    assert (node.endpoint.address, node.endpoint.address_reason, node.endpoint.port) == (
        "10.1.0.1",
        "--master-addr",
        20010,
    )
    assert node.rendezvous is not None
    assert (node.rendezvous.addresses, node.rendezvous.listen) == (("10.1.0.1", "node1"), None)
    assert 20010 not in node.rendezvous.ports


def test_an_endpoint_without_a_number_of_nodes_has_no_effect() -> None:
    node = found(captured("slurm-node-0"), rdzv_backend="c10d", rdzv_endpoint="node1:29400")
    assert node.nnodes == (3, 3)
    assert node.notes == ("--rdzv-endpoint node1:29400 has no effect: slurm determines the endpoint",)
    job = found(captured("slurm-batch"), rdzv_endpoint="node1:29400")
    assert job.notes == (
        "--rdzv-endpoint node1:29400 has no effect: ddplaunch chooses the endpoint of agents that it starts",
    )


@pytest.mark.parametrize(
    "asked", [{"nnodes": (3, 3)}, {"nnodes": (2, 4)}, {"node_rank": 1}, {"nproc_per_node": 4}], ids=str
)
def test_flags_may_say_what_slurm_says(asked: dict[str, Any]) -> None:
    node = found(captured("slurm-node-1"), **asked)
    assert (node.cluster, node.node_rank) == ("slurm", 1)
    assert node.nnodes == ((2, 3) if asked.get("nnodes") == (2, 4) else (3, 3))


CONFLICTS = [
    (
        "slurm-node-1",
        {"nnodes": (4, 4)},
        "--nnodes 4, but step 0 of Slurm job 1 has 3 nodes",
        "leave --nnodes out, or start as many: srun --nodes 4 --ntasks-per-node 1 ddplaunch ...",
    ),
    (
        "slurm-node-1",
        {"nnodes": (1, 1)},
        "--nnodes 1, but step 0 of Slurm job 1 has 3 nodes",
        "leave --nnodes out, or start as many: srun --nodes 1 --ntasks-per-node 1 ddplaunch ...",
    ),
    (
        "slurm-node-1",
        {"node_rank": 2},
        "--node-rank 2, but SLURM_NODEID says that this is node 1",
        "leave --node-rank out; or add --master-addr, then only flags count",
    ),
    (
        "slurm-rank-5",
        {"nproc_per_node": 4},
        "--nproc-per-node 4, but step 0 of Slurm job 2 started ddplaunch once for each rank",
        "srun --ntasks-per-node 1, or leave --nproc-per-node out",
    ),
    (
        "slurm-batch",
        {"nnodes": (4, 4)},
        "--nnodes 4, but Slurm job 1 has 3 nodes: node[1-3]",
        "--nnodes 3, or leave it out to use all",
    ),
    (
        "slurm-batch",
        {"node_rank": 0},
        "--node-rank 0: ddplaunch starts all nodes of Slurm job 1 itself, in their order",
        "leave --node-rank out",
    ),
    (
        "slurm-node-0",
        {"include": "node1"},
        "--include node1: step 0 of Slurm job 1 is running already, so there are no hosts to choose from",
        "--hosts or --hostfile lists hosts",
    ),
    ("slurm-batch", {"include": "node4"}, '"node4" in --include: there is no such host', "the hosts are node1, node2, node3"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "asked", "message", "hint"), CONFLICTS, ids=[row[2] for row in CONFLICTS])
def test_a_contradiction_names_both_sides(name: str, asked: dict[str, Any], message: str, hint: str) -> None:
    assert refusal(lambda: found(captured(name), **asked)) == (message, hint)


HOW_TO_IGNORE = "to ignore these variables: --cluster local, or unset them"

DAMAGED = [
    ({"SLURM_NODEID": "x"}, "SLURM_NODEID=x is not a number"),
    ({"SLURM_NODEID": ""}, "SLURM_NODEID is not set, although other variables of the same cluster are"),
    (
        {"SLURM_NODEID": "7"},
        "the variables of step 0 of Slurm job 1 contradict each other: 3 tasks, 1(x3) on 3 nodes, and this is task 1 on node 7",
    ),
    (
        {"SLURM_STEP_NUM_TASKS": "4"},
        "the variables of step 0 of Slurm job 1 contradict each other: 4 tasks, 1(x3) on 3 nodes, and this is task 1 on node 1",
    ),
    (
        {"SLURM_STEP_NODELIST": "", "SLURM_JOB_NODELIST": "", "SLURM_NODELIST": ""},
        "SLURM_STEP_NODELIST is not set, though this is a Slurm job",
    ),
]


@pytest.mark.parametrize(("changes", "message"), DAMAGED, ids=[str(row[0]) for row in DAMAGED])
def test_variables_that_contradict_each_other_are_refused(changes: dict[str, str], message: str) -> None:
    assert refusal(lambda: found(captured("slurm-node-1", **changes))) == (message, HOW_TO_IGNORE)


JOBS = st.integers(1, 2**26)


@given(JOBS, st.integers(0, 1000))
def test_ports_of_a_job_are_none_that_linux_or_torchrun_gives_away(job: int, step: int) -> None:
    ports = endpoints.ports_of(job, step)
    assert len(set(ports)) == 8
    assert min(ports) >= 20000
    assert max(ports) < 29400


@given(JOBS, st.integers(1, 1000))
def test_neighbours_among_jobs_and_steps_have_different_ports(job: int, distance: int) -> None:
    assert not set(endpoints.ports_of(job)) & set(endpoints.ports_of(job + distance))
    assert not set(endpoints.ports_of(job)) & set(endpoints.ports_of(job, distance))


@pytest.mark.parametrize("name", ["slurm-node-0", "slurm-rank-5", "slurm-batch", "slurm-salloc"])
def test_a_second_sigterm_may_be_slurms_own_however_the_job_was_started(name: str) -> None:
    assert found(captured(name)).sent_again == {SIGTERM}


@pytest.mark.parametrize(
    ("changes", "asked", "told"),
    [
        ({"SLURM_NTASKS": "5", "SLURM_JOB_NUM_NODES": "1"}, {}, "--nproc-per-node 5"),
        ({"SLURM_NTASKS": "8"}, {}, "--nproc-per-node 4"),
        ({"SLURM_NTASKS": "8"}, {"nproc_per_node": 1}, None),
        ({"SLURM_NTASKS": "8", "SLURM_NTASKS_PER_NODE": "4"}, {}, None),
        ({"SLURM_NTASKS": "8", "SLURM_GPUS": "8"}, {}, None),
        ({"SLURM_NTASKS": "2"}, {}, None),
    ],
)
def test_a_number_of_tasks_that_does_not_count_workers_is_told(changes, asked, told):
    without = ("SLURM_NTASKS_PER_NODE",) if "SLURM_NTASKS_PER_NODE" not in changes else ()
    job = found({k: v for k, v in captured("slurm-salloc", **changes).items() if k not in without}, **asked)
    assert [note.rpartition("add ")[2] for note in job.notes] == ([told] if told else [])
