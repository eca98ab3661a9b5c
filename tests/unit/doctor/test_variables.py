"""Which variables are a finding, and where: no value is shown of a variable that is not known to be harmless."""

import pytest

from ddplaunch.tools.doctor.variables import Surroundings, judge
from tests import verdicts


def found(has_accelerators: bool = False, **env: str) -> list[tuple[str, str]]:
    return verdicts.found(judge(Surroundings(env=env, has_accelerators=has_accelerators, cpus=4)))


def test_a_quiet_shell_has_no_finding():
    assert found(HOME="/home/ada", NCCL_DEBUG="INFO", OMP_NUM_THREADS="4", TORCH_DISTRIBUTED_DEBUG="OFF") == []


@pytest.mark.parametrize("name", ["RANK", "MASTER_ADDR", "OMPI_COMM_WORLD_RANK"])
def test_variables_of_another_launcher_are_noted_unless_it_may_have_started_us(name):
    assert found(**{name: "0"}) == [("note", "this shell has variables of a worker or of another job")]
    assert found(**{name: "0"}, KUBERNETES_SERVICE_HOST="10.0.0.1") == []
    assert found(**{name: "0"}, DDPLAUNCH_RUN_ID="k7qx") == []


def test_mpi_in_a_step_of_slurm_is_no_other_launcher():
    assert found(PMI_RANK="0", SLURM_STEP_ID="0") == []


def test_mpi_below_its_own_launcher_is_no_other_launcher():
    env = {"PMI_RANK": "0", "OMPI_COMM_WORLD_RANK": "0"}
    assert judge(Surroundings(env=env, has_launcher=True)).findings == ()
    (finding,) = judge(Surroundings(env={**env, "RANK": "3"}, has_launcher=True)).findings
    assert finding.evidence.startswith("RANK=3\n")


def test_all_of_them_are_in_one_line_to_type():
    (finding,) = judge(Surroundings(env={"RANK": "3", "WORLD_SIZE": "8", "MASTER_PORT": "29500"})).findings
    assert finding.hint == "if no launcher has started this shell: `unset RANK WORLD_SIZE MASTER_PORT`"
    assert finding.evidence.startswith("RANK=3, WORLD_SIZE=8, MASTER_PORT=29500\n")


def test_a_container_that_docker_has_linked_is_no_other_launcher():
    linked = {
        "MASTER_PORT": "tcp://172.17.0.2:29500",
        "MASTER_PORT_29500_TCP_ADDR": "172.17.0.2",
        "MASTER_NAME": "/a/master",
    }
    assert found(**linked) == []


def test_variables_of_a_service_are_not_shown_as_set():
    linked = {"NCCL_TESTS_PORT": "tcp://10.1.2.3:22", "NCCL_TESTS_SERVICE_HOST": "10.1.2.3", "NCCL_ALGO": ""}
    assert judge(Surroundings(env=linked)).facts == "set: NCCL_ALGO"


def test_defaults_of_torchrun_are_noted():
    assert found(PET_NNODES="2") == [("note", "variables of torchrun set options of each job")]


@pytest.mark.parametrize(
    ("name", "value", "severity"),
    [
        ("TORCH_DISTRIBUTED_DEBUG", "detail", "slow"),
        ("LD_PRELOAD", "/usr/lib/libasan.so.8", "slow"),
        ("PYTHONDEVMODE", "0", ""),
    ],
)
def test_what_slows_every_job_is_found_on_every_machine(name, value, severity):
    assert [one for one, _ in found(**{name: value})] == ([severity] if severity else [])


@pytest.mark.parametrize(
    ("name", "value"), [("CUDA_LAUNCH_BLOCKING", "1"), ("NCCL_P2P_DISABLE", "1"), ("CUDA_VISIBLE_DEVICES", "")]
)
def test_what_slows_gpus_is_found_only_where_there_are_some(name, value):
    assert found(**{name: value}) == []
    assert len(found(has_accelerators=True, **{name: value})) == 1


def test_more_threads_than_cpus_are_slow():
    assert found(OMP_NUM_THREADS="64,2") == [
        ("slow", "OMP_NUM_THREADS=64,2 starts more threads in each worker than there are CPUs")
    ]


def test_the_facts_name_variables_without_their_values():
    verdict = judge(Surroundings(env={"DDPLAUNCH_TOKEN": "hush", "NCCL_X": "hush", "PASSWORD": "hush"}))
    assert verdict.facts == "set: DDPLAUNCH_TOKEN, NCCL_X"
