"""Why a rank may hang: the errors that it has printed, and the children of it that have ended."""

import pytest

from ddplaunch.launcher.decide.job import State
from ddplaunch.launcher.tell.closing import render_hang
from ddplaunch.record.seen import Call, Group, Sample, Thread, Whereabouts
from ddplaunch.record.seen.collectives import describe
from ddplaunch.record.seen.reasons import last_error, reasons
from ddplaunch.spec.outcome import Frame
from tests.unit.supervise.job_histories import THREE

OF_A_THREAD = """\
Exception in thread Thread-1 (prefetch):
Traceback (most recent call last):
  File "/usr/lib/python3.11/threading.py", line 1045, in _bootstrap_inner
    self.run()
  File "/home/me/train.py", line 5, in prefetch
    raise OSError("shard 17 is gone")
OSError: shard 17 is gone
"""
OF_A_CRASH = """\
Fatal Python error: Segmentation fault

Current thread 0x1 (most recent call first):
  File "/home/me/load.py", line 9 in decode
"""
OF_A_GROUP = """\
  + Exception Group Traceback (most recent call last):
  |   File "/home/me/train.py", line 3, in main
  |     async with asyncio.TaskGroup() as group:
  | ExceptionGroup: unhandled errors in a TaskGroup (1 sub-exception)
"""
IN_A_GROUP = """\
  +-+---------------- 1 ----------------
    | Traceback (most recent call last):
    |   File "/home/me/train.py", line 5, in prefetch
    |     raise OSError("shard 17 is gone")
    | OSError: shard 17 is gone
    +------------------------------------
"""
CWD = "/home/me"


def rank(number: int, said: str = "") -> Sample:
    frames = (Frame(file=f"{CWD}/train.py", line=8, function="step"),)
    return Sample(rank=number, pid=1, threads=(Thread(frames=frames, is_main=True),), said=said)


def child(of: int, how: str, name: str = "python") -> Sample:
    return Sample(rank=of, pid=2, child=name, state=how, ended=True)


@pytest.mark.parametrize(
    ("stderr", "said"),
    [
        (OF_A_THREAD, "OSError: shard 17 is gone   (train.py:5 in prefetch)"),
        (f"a\n{OF_A_THREAD}step 7\nstep 8\n", "OSError: shard 17 is gone   (train.py:5 in prefetch)"),
        (OF_A_THREAD.replace("17", "16") + OF_A_THREAD, "OSError: shard 17 is gone   (train.py:5 in prefetch)"),
        (
            "".join(f"[rank3]: {line}" for line in OF_A_THREAD.splitlines(True)),
            "OSError: shard 17 is gone   (train.py:5 in prefetch)",
        ),
        (OF_A_GROUP + IN_A_GROUP, "OSError: shard 17 is gone   (train.py:5 in prefetch)"),
        (OF_A_GROUP, "ExceptionGroup: unhandled errors in a TaskGroup (1 sub-exception)   (train.py:3 in main)"),
        (OF_A_CRASH, "Fatal Python error: Segmentation fault   (load.py:9 in decode)"),
        (OF_A_THREAD + OF_A_CRASH, "Fatal Python error: Segmentation fault   (load.py:9 in decode)"),
        ("Traceback (most recent call last):\nValueError\n", "ValueError"),
    ],
)
def test_the_last_error_on_stderr_is_told_with_its_line(stderr: str, said: str) -> None:
    assert reasons([rank(3, last_error(stderr))], CWD) == [f"rank 3 printed {said}"]


@pytest.mark.parametrize("stderr", ["", "all is well\n", "Traceback (most recent call last):\n", "Traceback\n"])
def test_where_there_is_no_error_nothing_is_told(stderr: str) -> None:
    assert reasons([rank(3, last_error(stderr))], CWD) == []


def test_errors_of_several_ranks_that_differ_in_numbers_are_one() -> None:
    samples = [rank(number, last_error(OF_A_THREAD.replace("17", f"1{number}"))) for number in range(8)]
    assert reasons(samples, CWD) == ["ranks 0-7 printed OSError: shard 10 is gone   (train.py:5 in prefetch)"]


def test_children_that_have_ended_are_told_with_how() -> None:
    samples = [child(0, "killed by SIGKILL"), child(1, "killed by SIGKILL"), child(1, "exit status 3", "loader")]
    assert reasons(samples, CWD) == [
        "2 children of ranks 0-1 (python) have ended: killed by SIGKILL",
        "a child of rank 1 (loader) has ended: exit status 3",
    ]


def test_a_child_that_has_ended_well_is_told_but_explains_nothing() -> None:
    found = describe([rank(0), child(0, "exit status 0")], CWD)
    assert found.locations == ("rank 0: train.py:8 in step", "a child of rank 0 (python) has ended: exit status 0")
    assert (found.explanation, found.is_explained) == ("", False)


def test_a_reason_leads_the_report_where_nobody_waits_in_a_collective() -> None:
    found = describe([rank(0, last_error(OF_A_THREAD)), rank(1)], CWD)
    assert found.explanation == "rank 0 printed OSError: shard 17 is gone   (train.py:5 in prefetch)"
    assert found.locations == ("ranks 0-1: train.py:8 in step",)


def called(number: int, operation: str) -> Sample:
    call = Call(number=2, operation=operation, inputs="", outputs="", done=False)
    return Sample(rank=number, pid=1, groups=(Group(name="0", members="0-1", calls=(call,)),))


@pytest.mark.parametrize(
    ("samples", "is_slow"),
    [
        ([rank(0), rank(1)], True),
        ([called(0, "all_reduce"), rank(1)], True),
        ([rank(0, last_error(OF_A_THREAD)), rank(1)], False),
        ([rank(0), child(0, "killed by SIGKILL")], False),
        ([called(0, "all_reduce"), called(1, "broadcast")], False),
    ],
    ids=["nothing is known", "one waits", "an error", "a child", "they disagree"],
)
def test_that_a_job_was_only_slow_is_said_where_nothing_says_more(samples: list[Sample], is_slow: bool) -> None:
    assert ("if it was only slow" in hang(describe(samples, CWD))) is is_slow


def test_what_is_wrong_stands_once_in_the_report() -> None:
    report = hang(describe([called(0, "all_reduce"), called(1, "broadcast")], CWD))
    assert report.count("the ranks disagree about collective #2") == 1, report


def hang(found: Whereabouts) -> str:
    return render_hang(found, 5.0, State(policy=THREE), {}, CWD)
