"""The step of a job in a Slurm allocation: the command that starts it, and its variables."""

import errno

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from ddplaunch.launcher.elsewhere.slurm.run_step import argv, environment, mpi_type, order, run_step
from ddplaunch.plan.cluster import AllocatedJob, Allocation, Endpoint
from ddplaunch.plan.cluster.hostlist import Host
from ddplaunch.reach.slurm.srun import not_started
from ddplaunch.spec.job import Given, JobSpec, Program, ProgramKind
from ddplaunch.spec.options import token as secret
from ddplaunch.spec.options.table import OPTIONS
from ddplaunch.spec.order import from_variables
from ddplaunch.system.errors import LaunchError
from ddplaunch.system.fields import Malformed
from ddplaunch.system.process.child import StartError


def variables(**env: str) -> dict[str, str]:
    return environment(env, token="secret", host="ctl", port=20000)


def test_agents_are_told_the_secret_and_where_to_meet_by_variables_alone() -> None:
    meeting = {"DDPLAUNCH_RDZV_HOST": "ctl", "DDPLAUNCH_RDZV_PORT": "20000"}
    assert variables(HOME="/root") == {"HOME": "/root", "DDPLAUNCH_TOKEN": "secret", **meeting}
    assert secret.visible_to_workers(variables(HOME="/root")) == {"HOME": "/root"}


def test_the_job_is_told_by_variables_alone_which_workers_do_not_get() -> None:
    command = "curl https://me:hush@host/"
    job = replace(
        SPEC,
        given=(Given.typed("health_check", command),),
        health_check=command,
        env=(("PATH", "/theirs"), ("SECRET", "two\nlines")),
        origins_of_secrets={"SECRET": "job.env"},
    )
    told = {"PATH": "/usr/bin", **order(job, place("node1")).variables()}
    assert told["PATH"] == "/usr/bin"
    got = there(told)
    assert (dict(got.env), got.origins_of_secrets, got.health_check) == (dict(job.env), job.origins_of_secrets, command)
    assert secret.visible_to_workers(told) == {"PATH": "/usr/bin"}
    assert variables(**order(job, place("node1")).variables()) == variables()  # of an outer step
    read = {name for option in OPTIONS for name, _ in option.variables}
    assert read == secret.visible_to_workers(dict.fromkeys(read, "")).keys()


@given(st.lists(st.text(alphabet="\\:a\udcff\n"), max_size=5), st.sampled_from((1, 100_000)))
def test_the_program_and_its_arguments_are_told_whatever_they_hold(words: list[str], times: int) -> None:
    job = replace(SPEC, program=replace(SPEC.program, args=tuple(word * times for word in words)))
    told = order(job, place("node1")).variables()
    assert there(told).program == job.program
    assert all(len(value) < 1 << 17 and value.isascii() for value in told.values())


def test_what_fits_into_a_command_line_fits_into_the_variables_of_a_step() -> None:
    """The kernel bounds both together, and the limit of a command line may be used up."""
    words = tuple(f"--sample=/data/shard-{index:06}.tar" for index in range(60_000))
    told = order(replace(SPEC, program=replace(SPEC.program, args=words)), place("node1")).variables()
    assert sum(map(len, told.values())) < sum(map(len, words))


def test_a_step_for_which_there_is_too_much_to_say_names_no_fault_of_srun() -> None:
    error = not_started(StartError(errno.E2BIG, "srun"))
    assert error.render() == (
        "error: no step could be started: srun: Argument list too long\n\n"
        "hint: the arguments and the variables are too long together: give the program a file in their place\n"
    )


@pytest.mark.parametrize("env", [{}, {"DDPLAUNCH_ORDER_0": "{}"}, {"DDPLAUNCH_ORDER_0": "eA=="}], ids=str)
def test_variables_that_hold_no_order_are_malformed(env: dict[str, str]) -> None:
    with pytest.raises(Malformed):
        from_variables(env)


@pytest.mark.parametrize(
    ("env", "asked"),
    [
        ({}, "none"),
        ({"SLURM_MPI_TYPE": ""}, "none"),
        ({"SLURM_MPI_TYPE": "pmi2"}, "pmi2"),
        ({"SLURM_MPI_TYPE": "pmi2", "SLURM_STEP_ID": "0"}, "none"),  # of the task that has submitted the script
    ],
)
def test_a_step_prepares_nothing_for_mpi_whatever_the_site_does_unless_the_batch_script_says_so(env, asked):
    command = argv(place("node1", "node2"), "/bin/python", mpi=mpi_type(env))
    assert [word for word in command if word.startswith("--mpi")] == [f"--mpi={asked}"]


PTY = "srun --pty --ntasks-per-node=1 --nodes="


@pytest.mark.parametrize(
    ("changes", "nodes", "asked", "hint"),
    [
        ({"debug_rank": 0}, 2, "--debug 0", f"{PTY}2 ddplaunch --debug 0 ...`"),
        ({"debug_rank": 1, "nproc_per_node": 2}, 2, "--debug 1", f"{PTY}2 ddplaunch --debug 1 ...`"),
        ({"debug_rank": 2, "nproc_per_node": 2}, 2, "--debug 2", "with `--debugpy 2` that rank waits"),
        ({"debug_rank": 1, "nproc_per_node": None}, 2, "--debug 1", "with `--debugpy 1` that rank waits"),
        ({"debug_on_error": True}, 1, "--debug-on-error", f"{PTY}1 ddplaunch --debug-on-error ...`"),
        ({"debug_on_error": True}, 2, "--debug-on-error", f"{PTY}1 ddplaunch --nnodes 1 --debug-on-error ...`"),
    ],
)
def test_a_job_that_needs_a_terminal_has_none_in_a_step_of_ours_and_is_told_what_gives_it_one(
    changes: dict[str, object], nodes: int, asked: str, hint: str
) -> None:
    job = replace(SPEC, origins={"debug_rank": "--debug"}, **changes)
    with pytest.raises(LaunchError) as raised:
        run_step(AllocatedJob(spec=job, env={}, allocation=place(*("node1", "node2")[:nodes])))
    assert raised.value.message == f"{asked}: the step that ddplaunch would start has no terminal"
    assert hint in str(raised.value.hint)


def test_what_srun_would_take_for_tasks_of_the_step_is_left_out() -> None:
    kept = variables(SLURM_NTASKS="12", SLURM_CPUS_PER_TASK="4", SLURM_EXACT="1", SLURM_JOB_ID="7", SLURM_GPUS="4")
    assert [name for name in kept if name.startswith("SLURM")] == ["SLURM_JOB_ID"]


def test_the_tasks_that_the_script_asked_for_are_told_in_another_way() -> None:
    kept = variables(SLURM_NTASKS_PER_NODE="4")
    assert kept.pop("DDPLAUNCH_TASKS_PER_NODE") == "4"
    assert kept == variables()
    assert secret.visible_to_workers(variables(SLURM_NTASKS_PER_NODE="4")) == {}


OPTIONS_OF_SRUN = """SLURM_DEBUG SLURMD_DEBUG SLURM_STDOUTMODE SLURM_STDERRMODE SLURM_LABELIO SLURM_OPEN_MODE SLURM_REMOTE_CWD
 SRUN_EXPORT_ENV SLURM_EXPORT_ENV SRUN_OUTPUT SLURM_TIMELIMIT SLURM_HOSTFILE SLURM_BCAST SLURM_CONTAINER SLURM_SIGNAL
 SLURM_STEP_ID SLURM_NTASKS_HET_GROUP_0 SLURM_CPUS_PER_TASK_PACK_GROUP_1 SLURM_GPUS_HET_GROUP_0"""
OF_THE_JOB = """SLURM_JOB_ID SLURM_JOB_NODELIST SLURM_JOB_ID_HET_GROUP_1 SLURM_ARRAY_TASK_ID SLURM_HET_SIZE SLURM_RESTART_COUNT
 SLURM_CONF SLURM_SUBMIT_DIR SLURM_MEM_PER_NODE SLURM_GPUS_PER_NODE SLURM_GPUS_PER_NODE_HET_GROUP_0 SLURMISH HOME"""


@pytest.mark.parametrize("name", OPTIONS_OF_SRUN.split())
def test_no_variable_is_an_option_of_srun(name: str) -> None:
    assert variables(**{name: "1"}) == variables()


@pytest.mark.parametrize("name", OF_THE_JOB.split())
def test_what_describes_the_job_is_known_to_the_step(name: str) -> None:
    assert variables(**{name: "1"})[name] == "1"


def test_srun_is_told_apart_what_each_component_has_to_do() -> None:
    words = argv(place("node3", "node1"), "/bin/python", components=(("node3",), ("node2",), ("node1", "node4")))
    assert words.count(":") == 1
    before, after = words[: words.index(":")], words[words.index(":") + 1 :]
    assert before[:2] == ("srun", "--het-group=0")
    assert after[0] == "--het-group=2"
    assert {"--nodes=1", "--ntasks=1", "--nodelist=node3"} <= set(before)
    assert {"--nodes=1", "--ntasks=1", "--nodelist=node1"} <= set(after)
    assert before[before.index("/bin/python") :] == after[after.index("/bin/python") :]


SPEC = JobSpec(program=Program(kind=ProgramKind.SCRIPT, target="train.py"), given=(Given.typed("nproc_per_node", "2"),))


def there(env: dict[str, str]) -> JobSpec:
    """The job as an agent of the step reads it."""
    return from_variables(env).spec()


def place(*names: str) -> Allocation:
    """The allocation of nodes on which we start the agents."""
    return Allocation(
        cluster="slurm",
        hosts=names,
        endpoint=Endpoint(names[0], "the first node", None, "a free one"),
        hosts_to_start_on=tuple(Host(name=name) for name in names),
    )


def test_a_step_has_one_agent_on_each_of_the_nodes_in_their_order() -> None:
    words = argv(place("node1", "node2", "node5"), "/bin/python")
    assert {"--nodes=3", "--ntasks=3", "--ntasks-per-node=1", "--nodelist=node[1-2],node5", "--overlap"} <= set(words)
    assert words[words.index("/bin/python") :] == ("/bin/python", "-P", "-m", "ddplaunch.launcher.start.task")


def test_a_range_of_nodes_reaches_the_agents_with_as_many_as_there_are() -> None:
    some = replace(place("a1", "a2", "a3"), nnodes=(2, 3))
    assert there(order(replace(SPEC, nnodes=(2, 9)), some).variables()).nnodes == (2, 3)
    words = argv(some, "/bin/python")
    assert "--no-kill" in words[: words.index("/bin/python")]
    all_of_them = replace(some, nnodes=(3, 3))
    assert there(order(replace(SPEC, nnodes=(3, 3)), all_of_them).variables()).nnodes == (1, 1)
    fixed = argv(all_of_them, "/bin/python")
    assert "--no-kill" not in fixed
