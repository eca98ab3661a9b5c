"""What a job that was submitted is said to do, when it is over, and its status: histories of what Slurm says."""

from collections.abc import Sequence

import pytest

from ddplaunch.reach.slurm.scontrol import JobRecord, parse_jobs
from ddplaunch.tools.submit.follow import (
    FAILED,
    REQUEUED_WITHIN,
    Observation,
    after_slurm_forgot,
    end_of,
    has_run,
    update,
)


def job(state: str, reason: str = "None", **fields: str) -> JobRecord:
    """The job as it is read from what scontrol shows."""
    shown = {
        "JobId": "7", "JobState": state, "Reason": reason, "Requeue": "1", "Restarts": "0", "ExitCode": "0:0",
        "RunTime": "00:00:00", "NodeList": "node[1-2]", **fields,
    }  # fmt: skip
    (found,) = parse_jobs(" ".join(f"{name}={value}" for name, value in shown.items()))
    return found


def element(number: object, state: str, **fields: str) -> JobRecord:
    return job(state, **{"ArrayJobId": "7", "ArrayTaskId": f"{number}", **fields})


def reported(*history: Sequence[JobRecord], every: float = 1.0) -> tuple[list[tuple[str, ...]], Observation]:
    observed, lines = Observation(), []
    for number, jobs in enumerate(history):
        observed, said = update(observed, jobs, 100 + number * every)
        lines.append(said)
    return lines, observed


def test_each_change_is_told_once() -> None:
    lines, observed = reported(
        [job("PENDING")],
        [job("PENDING", "Priority")],
        [job("PENDING", "Resources")],
        [job("PENDING", "Resources")],
        [job("CONFIGURING")],
        [job("RUNNING")],
        [job("COMPLETING")],
        [job("COMPLETED", RunTime="00:01:02")],
    )
    assert lines == [
        (), ("is pending (Priority)",), ("is pending (Resources)",), (), (), ("is running on node[1-2]",), (),
        ("completed after 00:01:02",),
    ]  # fmt: skip
    assert (observed.is_over, observed.status) == (True, 0)


def test_a_job_that_comes_back_is_not_over() -> None:
    again = {"Restarts": "1"}
    lines, observed = reported(
        [job("RUNNING")],
        [job("PREEMPTED")],
        [job("PENDING", "BeginTime", **again)],
        [job("RUNNING", **again)],
        [job("FAILED", "NonZeroExitCode", ExitCode="3:0", **again)],
    )
    assert lines == [
        ("is running on node[1-2]",), (), ("is pending (BeginTime), restart 1",),
        ("is running on node[1-2], restart 1",), ("failed with status 3",),
    ]  # fmt: skip
    assert (observed.is_over, observed.status) == (True, 3)


def test_a_job_that_could_come_back_but_does_not_is_over_after_a_while() -> None:
    lost = [job("NODE_FAIL")]
    lines, observed = reported([job("RUNNING")], lost, lost, every=REQUEUED_WITHIN - 1)
    assert (observed.is_over, lines[-1]) == (False, ())
    lines, observed = reported([job("RUNNING")], lost, lost, every=REQUEUED_WITHIN)
    assert (observed.is_over, observed.status, lines[-1]) == (True, 122, ("ended because a node failed",))
    _, observed = reported([job("NODE_FAIL", Requeue="0")])
    assert observed.is_over


ENDS = [
    ("COMPLETED", "0:0", 0, "completed"),
    ("FAILED", "3:0", 3, "failed with status 3"),
    ("FAILED", "0:9", 137, "failed with status 137"),
    ("FAILED", "143:0", 143, "failed with status 143"),
    ("CANCELLED", "0:15", 143, "was cancelled"),
    ("CANCELLED", "0:0", 143, "was cancelled"),
    ("TIMEOUT", "0:15", 124, "reached its time limit"),
    ("OUT_OF_MEMORY", "0:125", 137, "ran out of memory"),
    ("BOOT_FAIL", "0:0", 122, "ended because a node did not boot"),
    ("FAILED", "0:0", FAILED, "failed with status 1"),
]


@pytest.mark.parametrize(("state", "code", "status", "text"), ENDS)
def test_the_status_is_the_scripts_or_tells_why_there_is_none(state: str, code: str, status: int, text: str) -> None:
    end = end_of(job(state, ExitCode=code))
    assert (end.status, end.text) == (status, text)


def test_a_job_that_slurm_could_not_start_has_no_output_to_wait_for() -> None:
    failed = job("FAILED", "JobLaunchFailure", ExitCode="0:53")
    assert end_of(failed).status == FAILED
    assert "could not be started" in end_of(failed).text
    assert not has_run(failed)
    assert not has_run(job("CANCELLED", NodeList=""))
    assert not has_run(job("CANCELLED", NodeList="(null)"))
    assert has_run(job("COMPLETED"))


def test_an_array_is_over_with_its_last_element_and_has_the_worst_status() -> None:
    lines, observed = reported(
        [element("1-3%1", "PENDING", Reason="Priority")],
        [element("2-3%1", "PENDING", Reason="JobArrayTaskLimit"), element(1, "RUNNING")],
        [element("3%1", "PENDING"), element(2, "RUNNING"), element(1, "FAILED", ExitCode="2:0", RunTime="00:00:09")],
        [element(3, "FAILED", ExitCode="1:0"), element(2, "COMPLETED")],
    )
    assert lines == [
        ("is pending (Priority)",), ("is running",), ("7_1 failed with status 2 after 00:00:09",),
        ("7_3 failed with status 1", "ended, with 2 as the worst status of its elements"),
    ]  # fmt: skip
    assert (observed.is_over, observed.status) == (True, 2)
    lines, observed = reported([element(1, "COMPLETED"), element(2, "COMPLETED")])
    assert (lines, observed.status) == ([("completed with all of its elements",)], 0)


def test_a_job_that_slurm_has_forgotten_did_not_end_well_as_far_as_one_knows() -> None:
    _, observed = reported([job("RUNNING")])
    observed = after_slurm_forgot(observed)
    assert (observed.is_over, observed.status) == (True, FAILED)
    _, observed = reported([element(1, "FAILED", ExitCode="5:0"), element(2, "RUNNING")])
    assert after_slurm_forgot(observed).status == 5


def test_an_empty_answer_says_nothing() -> None:
    lines, observed = reported([job("RUNNING")], [])
    assert (lines[1], observed.is_over) == ((), False)


def test_what_scontrol_says_is_read() -> None:
    text = (
        "JobId=9 ArrayJobId=9 ArrayTaskId=2-3%1 JobName=my job JobState=PENDING Reason=None CPUs/Task=1 "
        "ReqB:S:C:T=0:0:*:* StdOut=/a b/my job-9.out Power= \n"
        "JobId=10 ArrayJobId=9 NodeList= \n\n"
    )
    (found,) = parse_jobs(text)
    assert (found.name, found.state, found.stdout) == ("my job", "PENDING", "/a b/my job-9.out")
    assert (found.element, found.nodes) == ("9_2-3%1", "")
    assert parse_jobs("No jobs in the system\n") == ()
