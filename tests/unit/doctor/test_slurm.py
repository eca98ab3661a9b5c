"""What is said of Slurm, from what scontrol shows."""

from ddplaunch.reach.slurm.scontrol import parse_config
from ddplaunch.tools.doctor import Subject, Verdict
from ddplaunch.tools.doctor.slurm import Cluster, judge, read
from tests.verdicts import found

# cut from Slurm 22.05's `scontrol show config`
CONFIG = """\
Configuration data as of 2026-11-25T22:00:00
AccountingStorageHost   = localhost
KillWait                = 30 sec
MpiDefault              = none
ProctrackType           = proctrack/cgroup
SLURM_VERSION           = 22.05.8
TaskPlugin              = task/affinity,task/cgroup
TaskPluginParam         = (null type)

Cgroup Support Configuration:
AllowedRAMSpace         = 100.0%
"""
GOOD = parse_config(CONFIG)


def test_settings_are_read_by_name():
    assert GOOD["KillWait"] == "30 sec"
    assert GOOD["TaskPluginParam"] == "(null type)"
    verdict = judge(Cluster(is_here=True, settings=GOOD, job_id="7", states=frozenset({"RUNNING"})))
    assert found(verdict) == []
    assert verdict.facts.startswith("SLURM_VERSION 22.05.8, ProctrackType proctrack/cgroup")


def test_a_machine_without_slurm_has_no_finding(tmp_path):
    subject = Subject(env={"PATH": str(tmp_path)}, python="python")
    assert judge(read(subject)) == Verdict("no Slurm here")


def test_settings_that_have_jobs_share_cpus_or_end_them_soon_are_noted():
    settings = {**GOOD, "TaskPlugin": "task/none", "KillWait": "5 sec"}
    titles = [title for severity, title in found(judge(Cluster(is_here=True, settings=settings))) if severity == "note"]
    assert titles == [
        "Slurm binds no job to its CPUs, so several jobs on a node use the same ones",
        "workers have 5 s to save when Slurm ends a job",
    ]


def test_variables_of_a_job_that_has_ended_break_a_job():
    for states, text in ((None, "unknown to Slurm"), (frozenset({"COMPLETED"}), "COMPLETED")):
        (finding,) = judge(Cluster(is_here=True, settings=GOOD, job_id="7", states=states)).findings
        assert (finding.severity, finding.title) == ("broken", "the Slurm job of this shell, 7, does not run")
        assert text in finding.evidence


def test_a_slurm_that_does_not_answer_matters_within_a_job():
    assert found(judge(Cluster(is_here=True, problem="scontrol timed out"))) == [("note", "Slurm does not answer")]
    assert found(judge(Cluster(is_here=True, problem="scontrol timed out", job_id="7"))) == [
        ("slow", "Slurm does not answer")
    ]
    missing = Cluster(is_here=True, problem="scontrol is not on PATH", is_missing=True, job_id="7")
    assert found(judge(missing)) == [("note", "this shell belongs to a Slurm job, but scontrol does not work here")]
