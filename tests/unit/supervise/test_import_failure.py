"""A job whose ranks all fail at the same import in the first lines of their program is not started again."""

from signal import SIGTERM
from typing import Any

import pytest
from msgspec.structs import replace

from ddplaunch.launcher.decide.first_failure import import_failure
from ddplaunch.launcher.decide.job import DeadlineReached, EndJob, NodeEnded, NodeStopping, Print, ReportFailure
from ddplaunch.launcher.decide.node import CAUSE_TIMEOUT, Exit, Phase, StopWorkers
from ddplaunch.launcher.decide.node import DeadlineReached as NodeDeadline
from ddplaunch.spec.outcome import Frame, Why, WorkerError
from tests.unit.supervise.histories import ALL, NOTHING_LEFT, STARTED, ended, one_node
from tests.unit.supervise.job_histories import THREE, end, history, met, silent, stopped


def error(kind: str = "ModuleNotFoundError", message: str = "No module named 'x'", **frame: Any) -> WorkerError:
    values: dict[str, Any] = {
        "file": "/project/train.py",
        "line": 1,
        "function": "<module>",
        "source": "import x",
    } | frame
    return WorkerError(type=kind, message=message, traceback="", frames=(Frame(**values),), at=0.9)


MISSING = error()
OTHER = error(message="No module named 'y'", source="from y import z")
RAISED = WorkerError(type="ValueError", message="boom", traceback="", at=0.9)
SYNTAX = error("SyntaxError", "invalid syntax (train.py, line 1)", source="def f(:")
LATER = error(source="main()")
IN_FUNCTION = error(function="main")


@pytest.mark.parametrize(
    ("failed", "expected"),
    [
        (MISSING, "ModuleNotFoundError: No module named 'x'"),
        (OTHER, "ModuleNotFoundError: No module named 'y'"),
        (SYNTAX, "SyntaxError: invalid syntax (train.py, line 1)"),
        (error("SyntaxError", "invalid syntax (x.py, line 7)"), "SyntaxError: invalid syntax (x.py, line 7)"),
        (error("SyntaxError", "invalid syntax (<string>, line 1)", source="eval(text)"), ""),
        (error("SystemExit", "python: No module named pkg.m", file="<frozen runpy>"), "python: No module named pkg.m"),
        (error("SystemExit", "no such config", source="import x"), ""),
        (LATER, ""),
        (IN_FUNCTION, ""),
        (replace(MISSING, frames=()), ""),
        (RAISED, ""),
        (None, ""),
    ],
)
def test_the_import_that_failed_in_the_first_lines(failed, expected) -> None:
    assert import_failure(failed) == expected


# --- on one node


def failures(*errors: WorkerError | None) -> list[Any]:
    return [ended(rank, 1.0 + rank / 10, code=1, error=found) for rank, found in enumerate(errors)]


def test_all_ranks_that_fail_at_the_same_import_use_up_no_restart() -> None:
    _, actions = one_node(*STARTED, *failures(MISSING, MISSING, MISSING), NOTHING_LEFT, max_restarts=9)
    assert [type(action) for action in actions] == [Print, Exit]
    assert str(actions[0]).count("not started again: all 3 ranks failed at the same import") == 1


@pytest.mark.parametrize(
    "errors",
    [(MISSING, OTHER, MISSING), (MISSING, MISSING, RAISED), (LATER, LATER, LATER), (RAISED, RAISED, RAISED)],
    ids=["at different imports", "one of them otherwise", "in a function", "otherwise"],
)
def test_ranks_that_fail_in_other_ways_are_started_again(errors) -> None:
    _, actions = one_node(*STARTED, *failures(*errors), NOTHING_LEFT, max_restarts=9)
    assert [type(action) for action in actions] == [ReportFailure]


def test_without_restarts_nothing_is_said_of_them() -> None:
    assert one_node(*STARTED, *failures(MISSING, MISSING, MISSING), NOTHING_LEFT)[1] == [Exit(1)]


def test_after_a_failed_import_the_others_have_a_moment_to_show_whether_theirs_fails_too() -> None:
    began = (*STARTED, *failures(MISSING))
    state, actions = one_node(*began)
    assert (actions, state.phase, state.deadline) == ([], Phase.SETTLING, 1.0 + CAUSE_TIMEOUT)
    assert one_node(*began, ended(1, 1.1, code=1, error=RAISED))[1] == [StopWorkers(SIGTERM, ALL)]
    assert one_node(*began, NodeDeadline(1.0 + CAUSE_TIMEOUT))[1] == [StopWorkers(SIGTERM, ALL)]
    assert one_node(*STARTED, *failures(MISSING, MISSING, MISSING))[1][:1] == [StopWorkers(SIGTERM, ALL)]


# --- on several


def generation(at: float, failed: WorkerError, *, others_stopped: bool) -> list[Any]:
    """Rank 1 fails, on node 1; the others do, too, or are stopped."""
    first = end(1, "b", at, 1, error=failed)
    rest = [
        stopped(id, "abc"[id], at + 0.2) if others_stopped else end(id, "abc"[id], at + 0.1, 1, error=failed)
        for id in (0, 2)
    ]
    return [
        NodeStopping(1, Why.FAILED, SIGTERM, at),
        NodeEnded(1, (first,), None, at + 0.1),
        *(NodeEnded(exit.rank, (exit,), None, at + 0.3) for exit in rest),
    ]


RESTARTS = replace(THREE, max_restarts=9)


def test_all_ranks_of_all_nodes_that_fail_at_the_same_import_use_up_no_restart() -> None:
    _, actions = history(RESTARTS, [*met(), *generation(1, MISSING, others_stopped=False)])
    assert silent(actions)[-1] == EndJob(1)
    assert any(isinstance(action, Print) and "all 3 ranks" in action.text for action in actions)


def test_a_rank_that_fails_at_an_import_while_others_are_stopped_is_started_again_once() -> None:
    events = [*met(), *generation(1, MISSING, others_stopped=True), DeadlineReached(1.5)]
    assert history(RESTARTS, events)[0].restarts.number == 1
    state, actions = history(RESTARTS, [*events, *generation(3, MISSING, others_stopped=True)])
    assert (silent(actions)[-1], state.restarts.number) == (EndJob(1), 1)
    assert any("rank 1 failed at the same import" in action.text for action in actions if isinstance(action, Print))


@pytest.mark.parametrize("second", [OTHER, RAISED], ids=["at another import", "otherwise"])
def test_a_rank_that_fails_in_another_way_after_a_failed_import_is_started_again(second) -> None:
    events = [*met(), *generation(1, MISSING, others_stopped=True), DeadlineReached(1.5)]
    state, _ = history(RESTARTS, [*events, *generation(3, second, others_stopped=True)])
    assert state.restarts.number == 2
