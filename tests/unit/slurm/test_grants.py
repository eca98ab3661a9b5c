"""The GPUs that each node was granted, and how srun is asked for them."""

import pytest

from ddplaunch.reach.slurm.scontrol import parse_jobs
from ddplaunch.reach.slurm.srun import are_grants_uncertain, gpu_options, grants_of

UNEVEN = (
    "JobId=14 JobState=RUNNING JobName=train TRES=cpu=3,gres/gpu=6 JOB_GRES=gpu:6 "
    "Nodes=node1 CPU_IDs=0 Mem=0 GRES=gpu:4(IDX:0-3) "
    "Nodes=node[2-3] CPU_IDs=0-1 Mem=4000 GRES=gpu:1(IDX:0) MinCPUsNode=1 TresPerJob=gres:gpu:6\n"
)
TYPED = (
    "JobId=9 JobState=RUNNING "
    "Nodes=a CPU_IDs=0 Mem=0 GRES=gpu:a100:2(IDX:0-1),gpu:v100:1(IDX:2),shard:8(0/8,8/8) Nodes=b CPU_IDs=0 Mem=0 "
    "GRES=gpu:a100:1(IDX:3)\n"
)
NONE = "JobId=9 JobState=RUNNING Nodes=a CPU_IDs=0 Mem=0 GRES= MinCPUsNode=1\n"
OTHER_COMPONENT = "JobId=15 JobState=RUNNING Nodes=node4 CPU_IDs=0 Mem=0 GRES=gpu:2(IDX:0-1)\n"


@pytest.mark.parametrize(
    ("output", "found"),
    [
        (UNEVEN, {"node1": {"": 4}, "node2": {"": 1}, "node3": {"": 1}}),
        (TYPED, {"a": {"a100": 2, "v100": 1}, "b": {"a100": 1}}),
        (NONE, {"a": {}}),
        (UNEVEN + OTHER_COMPONENT, {"node1": {"": 4}, "node2": {"": 1}, "node3": {"": 1}, "node4": {"": 2}}),
        ("scontrol says something else", {}),
    ],
)
def test_each_node_has_a_number_of_its_own(output: str, found: dict[str, dict[str, int]]) -> None:
    assert grants_of(parse_jobs(output)) == found


@pytest.mark.parametrize(
    ("output", "hosts", "expected"),
    [
        (UNEVEN, ["node1", "node2", "node3"], ("--gpus=6",)),
        (UNEVEN, ["node1", "node2"], ("--gpus=5",)),
        (UNEVEN, ["node2", "node3"], ("--overlap", "--gpus-per-node=1")),
        (UNEVEN, ["node1"], ("--overlap", "--gpus-per-node=4")),
        (TYPED, ["a"], ("--overlap", "--gpus-per-node=a100:2,v100:1")),
        (TYPED, ["a", "b"], ("--gpus=a100:3,v100:1",)),
        (NONE, ["a"], ("--overlap",)),
        ("", ["a"], ("--overlap",)),
    ],
)
def test_srun_is_asked_for_what_each_node_has(output: str, hosts: list[str], expected: tuple[str, ...]) -> None:
    assert gpu_options(hosts, grants_of(parse_jobs(output))) == expected


@pytest.mark.parametrize(
    ("names", "uncertain"),
    [
        ("SLURM_GPUS SLURM_JOB_GPUS", True),
        ("SLURM_GPUS_PER_TASK", True),
        ("SLURM_GPUS_HET_GROUP_0", True),
        ("SLURM_JOB_GPUS", True),
        ("SLURM_GPUS_PER_NODE SLURM_JOB_GPUS", False),
        ("SLURM_JOB_ID SLURM_NTASKS", False),
    ],
)
def test_slurm_is_asked_only_where_a_step_may_be_given_less(names: str, uncertain: bool) -> None:
    assert are_grants_uncertain(dict.fromkeys(names.split(), "1")) is uncertain
