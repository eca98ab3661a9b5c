"""Whether a process belongs to the Slurm job that its variables name, by what is seen around it and what Slurm says."""

import pytest
from msgspec.structs import replace

from ddplaunch.launcher.elsewhere.slurm.presence import Answer, Host, doubt, is_within, why_not
from ddplaunch.reach.slurm.scontrol import JobRecord, parse_jobs

GONE = "the Slurm job 84 of this shell (SLURM_JOB_ID)"
IN_STEP = Host(names=("node1",), node="node1", nodes=("node1", "node2"), uid=1000, is_container=False)
IN_SALLOC = replace(IN_STEP, names=("login",), node=None)
RUNS = JobRecord(id="84", user="alice", uid=1000, state="RUNNING")
UNKNOWN = Answer()
MISSING = Answer(problem="scontrol is not on PATH", has_no_slurm=True)
SILENT = Answer(problem="scontrol timed out after 5 s")
NO_STEP = "where no step can be started: scontrol is not on PATH"


def says(*states: str) -> Answer:
    return Answer(jobs=tuple(replace(RUNS, state=state) for state in states))


@pytest.mark.parametrize("host", [IN_STEP, IN_SALLOC], ids=["step", "salloc"])
@pytest.mark.parametrize("state", ["RUNNING", "COMPLETING", "CANCELLED,COMPLETING", "CONFIGURING", "SUSPENDED"])
def test_a_job_that_runs_is_believed(host, state):
    answer = says(state)
    assert (why_not("84", host, answer), doubt("84", host, answer)) == ("", "")


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (UNKNOWN, f"{GONE} has ended: Slurm knows it no more"),
        (says("COMPLETED"), f"{GONE} does not run: COMPLETED"),
        (says("PENDING"), f"{GONE} does not run: PENDING"),
        (says("CANCELLED", "TIMEOUT"), f"{GONE} does not run: CANCELLED, TIMEOUT"),
        (Answer(jobs=(replace(RUNS, user="bob", uid=1001),)), f"{GONE} is bob's"),
    ],
)
@pytest.mark.parametrize(
    "host", [IN_STEP, IN_SALLOC, replace(IN_STEP, is_container=True)], ids=["step", "salloc", "docker"]
)
def test_what_slurm_denies_is_refused_wherever_this_is(host, answer, why):
    assert why_not("84", host, answer) == why


def test_one_component_that_runs_is_enough_and_root_may_look_into_any_job():
    assert why_not("84", IN_STEP, says("COMPLETED", "RUNNING")) == ""
    other = Answer(jobs=(replace(RUNS, user="bob", uid=1001),))
    assert why_not("84", replace(IN_STEP, uid=0), other) == ""


ELSEWHERE = replace(IN_STEP, names=("laptop",))
NOT_THIS = f"{GONE} runs this process on node1 (SLURMD_NODENAME), but this host is laptop"


@pytest.mark.parametrize(
    ("host", "answer", "why"),
    [
        (ELSEWHERE, MISSING, NOT_THIS),
        (ELSEWHERE, says("RUNNING"), NOT_THIS),
        (IN_SALLOC, MISSING, f"{GONE} has other nodes than this host, login, {NO_STEP}"),
        (replace(IN_SALLOC, names=("node2.example.org",)), MISSING, ""),
        (replace(IN_STEP, names=("node1.example.org",)), MISSING, ""),
        (replace(IN_STEP, names=("ip-10-0-0-1", "node1")), says("RUNNING"), ""),  # Slurm has another name for it
        (replace(IN_STEP, node="localhost"), MISSING, ""),
    ],
)
def test_another_host_than_the_variables_name_is_refused_and_another_name_of_it_is_not(host, answer, why):
    assert why_not("84", host, answer) == why


@pytest.mark.parametrize("host", [ELSEWHERE, IN_SALLOC], ids=["step", "salloc"])
def test_in_a_container_and_while_slurm_is_silent_there_is_only_a_doubt(host):
    assert why_not("84", replace(host, is_container=True), MISSING) == ""
    assert doubt("84", replace(host, is_container=True), MISSING) == (
        "whether the Slurm job 84 (SLURM_JOB_ID) still runs cannot be seen in this container (scontrol is not on PATH): "
        "if it has ended, add --cluster local"
    )
    assert why_not("84", host, SILENT) == ""
    assert "cannot be seen here (scontrol timed out after 5 s)" in doubt("84", host, SILENT)


def test_a_job_of_one_node_without_commands_of_slurm_runs_here_and_is_not_doubted():
    alone = replace(IN_STEP, nodes=("node1",), is_container=True)
    assert (why_not("84", alone, MISSING), doubt("84", alone, MISSING)) == ("", "")


@pytest.mark.parametrize(
    ("above", "cgroups", "within"),
    [
        (("python", "bash", "slurmstepd", "systemd"), "", True),
        (("bash", "salloc", "bash", "sshd"), "", True),
        (("slurm-train.sh", "tmux: server", "systemd"), "", False),  # a script of the user
        ((), "4:memory:/slurm/uid_1000/job_84/step_0/task_1\n0::/\n", True),
        ((), "0::/system.slice/slurmstepd.scope/job_84", True),
        ((), "0::/system.slice/slurmstepd.scope/job_844/step_0", False),
        ((), "", False),
    ],
)
def test_a_process_of_slurm_above_or_the_cgroup_of_the_job_needs_no_question(above, cgroups, within):
    assert is_within("84", above, cgroups) is within


def test_the_owner_of_a_job_is_read():
    (job,) = parse_jobs("JobId=84 JobName=train UserId=alice(1000) GroupId=users(100) JobState=RUNNING Reason=None\n")
    assert (job.user, job.uid) == ("alice", 1000)
