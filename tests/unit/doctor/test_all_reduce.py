"""What is said of the job of two workers, from what it prints and how it ends."""

import pytest

from ddplaunch.system.process.command import Ended
from ddplaunch.tools.doctor.all_reduce import judge, parse
from tests.verdicts import found

IMPORTED = '{"at": "imported", "seconds": 2.0, "torch": "2.13.0"}\n'
JOINED = f'a library prints\n{IMPORTED}{{"at": "joined", "seconds": 2.1}}\n'
GLOO = JOINED + '{"at": "gloo", "latency": 0.0001, "bandwidth": 2e9}\n'
GPUS = GLOO.replace('{"at": "joined"', '{"at": "gpu", "arch": "sm_90"}\n{"at": "joined"')
NCCL = GPUS + '{"at": "nccl", "latency": 0.00002, "bandwidth": 2e11, "version": "2.28.9"}\n'
END = '{"at": "end"}\n'


def said(status: int | None, out: str, err: str = "") -> tuple[str, list[tuple[str, str]]]:
    verdict = judge(parse(Ended(status=status, out=out, err=err)))
    return verdict.facts, found(verdict)


def test_a_job_that_ends_well_gives_latency_and_bandwidth():
    assert said(0, GLOO + END) == ("gloo 1.9 GiB/s, 100 µs", [])
    assert said(0, NCCL + END) == ("gloo 1.9 GiB/s, 100 µs; nccl 2.28.9 186.3 GiB/s, 20 µs", [])


def test_a_backend_that_is_far_too_slow_is_a_finding():
    _, findings = said(0, GLOO.replace("2e9", "1e6") + END)
    assert findings == [("slow", "two workers of this machine exchange 976.6 KiB/s over gloo, which is little")]


@pytest.mark.parametrize(
    ("out", "findings"),
    [
        ("", [("slow", "a job of two workers did not end in 7.5 s while it imports torch")]),
        (IMPORTED, [("slow", "a job of two workers did not end in 7.5 s as its workers use their device or meet")]),
        (JOINED, [("broken", "a job of two workers hangs in all_reduce over gloo")]),
        (GPUS, [("broken", "a job of two workers hangs in all_reduce over NCCL")]),
        (GLOO, []),  # measured: on a busy machine only its end was late
        (JOINED.replace("2.1", "7.0"), [("slow", "a job of two workers did not end in 7.5 s in all_reduce over gloo")]),
    ],
)
def test_a_job_that_does_not_end_hangs_only_if_its_workers_have_met(out, findings):
    assert said(124, out)[1] == findings


def test_a_job_that_fails_breaks_with_the_report_of_ddplaunch():
    report = "noise\nerror: rank 1 failed: RuntimeError: no kernel image\n\n  train.py:3\n\nhint: another torch\n"
    verdict = judge(parse(Ended(status=1, out=IMPORTED, err=report)))
    (finding,) = verdict.findings
    assert (finding.severity, finding.title) == (
        "broken",
        "a job of two workers fails on this machine as its workers use their device or meet",
    )
    assert finding.evidence == "error: rank 1 failed: RuntimeError: no kernel image\ntrain.py:3\nhint: another torch"


def test_a_missing_torch_is_said_by_the_check_of_the_interpreter():
    assert said(0, '{"at": "no torch"}\n') == ("there is no torch", [])
    assert said(1, "", "ModuleNotFoundError: No module named 'torch'") == ("there is no torch", [])
