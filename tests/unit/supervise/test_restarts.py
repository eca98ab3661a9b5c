"""Which failures lead to another generation, what a restart costs, and when a job gives up: `launcher/decide/job/restarts.py`."""

from typing import Any

import pytest

from ddplaunch.launcher.decide.job import (
    AgentLost,
    BeginGeneration,
    DeadlineReached,
    EndJob,
    NodeStopping,
    Policy,
    Print,
    ProgressKnown,
)
from ddplaunch.launcher.decide.job.restarts import kind_of_failure
from ddplaunch.spec.outcome import Frame, Progress, Why, WorkerError, WorkerExit
from ddplaunch.system import exitcodes
from ddplaunch.system.fields import RESTART_KINDS
from tests.unit.supervise.job_histories import end, ended, history, met

ONE = Policy(min_nodes=1, max_nodes=1, max_restarts=9)


def raised(name: str = "ValueError", message: str = "boom", line: int = 88, source: str = "loss = f(x)") -> WorkerError:
    frames = (Frame(file="/job/train.py", line=line, function="<module>", source=source),)
    return WorkerError(type=name, message=message, traceback=f"{name}: {message}", frames=frames)


def failed(rank: int = 0, **fields: Any) -> WorkerExit:
    return end(rank, "a", fields.pop("at", 1.0), **{"code": 1, **fields})


def at_step(step: int, source: str = "script") -> Progress:
    return Progress(step=step, total=None, source=source)


def generations(policy: Policy, *ends: tuple[WorkerExit, ...], every: float = 100.0, why: Why = Why.FAILED) -> Any:
    """Have a job of one node go through generations whose workers end so; return its state and all actions."""
    events: list[Any] = met(1)
    for number, exits in enumerate(ends):
        at = (number + 1) * every
        events += [NodeStopping(0, why, 15, at), ended(0, at + 0.1, *exits), DeadlineReached(at + 40)]
    return history(policy, events)


def started(actions: list[Any]) -> int:
    return sum(isinstance(action, BeginGeneration) for action in actions)


def status(actions: list[Any]) -> list[int]:
    return [action.status for action in actions if isinstance(action, EndJob)]


def printed(actions: list[Any]) -> str:
    return "\n".join(action.text for action in actions if isinstance(action, Print))


@pytest.mark.parametrize(
    ("failure", "why", "expected"),
    [
        (failed(code=None, signal=9), Why.FAILED, "killed"),
        (failed(code=3), Why.FAILED, "exit"),
        (failed(error=raised()), Why.FAILED, "exception"),
        (
            failed(error=raised("OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB")),
            Why.FAILED,
            "cuda",
        ),
        (failed(error=raised("RuntimeError", "CUDA error: an illegal memory access")), Why.FAILED, "cuda"),
        (failed(error=raised("DistBackendError", "NCCL error in: x.cpp")), Why.FAILED, "nccl"),
        (failed(error=raised("DistNetworkError", "Failed to recv, got 0 bytes")), Why.FAILED, "nccl"),
        (failed(error=raised("TimeoutError", "too late")), Why.FAILED, "timeout"),
        (failed(error=raised("ImportError", "no x", source="import x")), Why.FAILED, "import"),
        (None, Why.HUNG, "hang"),
        (None, Why.NODE_LOST, "node-lost"),
    ],
)
def test_a_failure_has_a_kind_that_restart_on_takes(failure: WorkerExit | None, why: Why, expected: str) -> None:
    assert kind_of_failure(why, failure) == expected
    assert expected in RESTART_KINDS


def test_a_failure_of_another_kind_than_those_named_ends_the_job_and_says_so() -> None:
    policy = Policy(min_nodes=1, max_nodes=1, max_restarts=3, restart_on=frozenset({"killed", "cuda"}))
    _, killed = generations(policy, (failed(code=None, signal=9),))
    assert started(killed) == 2
    _, raising = generations(policy, (failed(error=raised()),))
    assert (started(raising), status(raising)) == (1, [1])
    assert (
        printed(raising)
        == 'not started again: this failure is of the kind "exception", and --restart-on has cuda,killed'
    )


def test_restarts_that_lie_longer_ago_than_their_time_do_not_count() -> None:
    policy = Policy(min_nodes=1, max_nodes=1, max_restarts=2, restart_window=1000.0)
    _, slow = generations(policy, *[(failed(),)] * 6, every=600.0)
    assert (started(slow), status(slow)) == (7, [])
    _, quick = generations(policy, *[(failed(),)] * 6, every=100.0)
    assert (started(quick), status(quick)) == (3, [1])


def test_a_generation_that_makes_new_steps_gives_its_restart_back() -> None:
    policy = Policy(min_nodes=1, max_nodes=1, max_restarts=1)
    steps = [(failed(progress=at_step(step)),) for step in (10, 20, 30, 30, 30)]
    state, actions = generations(policy, *steps)
    assert (started(actions), state.restarts.number, status(actions)) == (4, 3, [1])


@pytest.mark.parametrize("source", ["bar", "collectives"])
def test_steps_that_neither_the_script_nor_a_trainer_says_give_no_restart_back(source: str) -> None:
    policy = Policy(min_nodes=1, max_nodes=1, max_restarts=1)
    _, actions = generations(policy, *[(failed(progress=at_step(step, source)),) for step in (10, 20, 30)])
    assert started(actions) == 2


def test_generations_without_a_new_step_end_the_job_with_a_status_of_their_own() -> None:
    policy = Policy(min_nodes=1, max_nodes=1, max_restarts=99, max_no_progress=2)
    steps = [(failed(progress=at_step(step)),) for step in (1200, 1300, 1300, 1250)]
    _, actions = generations(policy, *steps)
    assert (started(actions), status(actions)) == (4, [exitcodes.NO_PROGRESS])
    expected = "not started again: 2 generations in a row made no step beyond 1,300 (--max-no-progress)"
    assert printed(actions) == expected
    _, silent = generations(policy, (failed(),), (failed(),))
    assert printed(silent).endswith("2 generations in a row made no step that ddplaunch knows of (--max-no-progress)")


def test_giving_up_needs_no_restart_to_be_left() -> None:
    policy = Policy(min_nodes=1, max_nodes=1, max_restarts=1, max_no_progress=2)
    assert status(generations(policy, (failed(),), (failed(),))[1]) == [exitcodes.NO_PROGRESS]


def test_where_no_restart_is_allowed_the_status_is_that_of_the_failure() -> None:
    _, actions = generations(Policy(min_nodes=1, max_nodes=1, max_no_progress=1), (failed(),))
    assert (status(actions), printed(actions)) == ([1], "")


def test_a_generation_whose_steps_were_lost_with_their_node_is_not_in_vain() -> None:
    policy = Policy(min_nodes=1, max_nodes=2, max_restarts=9, max_no_progress=1, last_call=0.1)
    events = [
        *met(2),
        AgentLost(1, "connection closed", 9.0),
        ended(0, 9.1, end(0, "a", 9.1, code=None, signal=15, stopped_with=15)),
    ]
    _, actions = history(policy, events)
    assert status(actions) == []


def test_a_job_that_makes_no_progress_is_not_queued_again_after_a_notice() -> None:
    policy = Policy(min_nodes=1, max_nodes=1, max_no_progress=1, notices=frozenset({10}))
    events = [
        *met(1),
        NodeStopping(0, Why.SIGNALLED, 10, 5.0),
        ended(0, 6.0, end(0, "a", 5.5, stopped_with=10, stopped_at=5.0)),
    ]
    _, actions = history(policy, events)
    ends = [action for action in actions if isinstance(action, EndJob)]
    assert [(end.status, end.requeue) for end in ends] == [(exitcodes.NO_PROGRESS, 0)]
    assert printed(actions).startswith("not queued again: the last generation made no step")


@pytest.mark.parametrize(
    ("known", "step", "again"),
    [
        ((40, 1), 40, False),  # the second generation in a row
        ((40, 1), 41, True),
        ((40, 0), 40, True),
        ((-1, 1), None, False),
    ],
)
def test_generations_without_a_new_step_count_over_requeues(
    known: tuple[int, int], step: int | None, again: bool
) -> None:
    policy = Policy(min_nodes=1, max_nodes=1, max_no_progress=2, notices=frozenset({10}))
    progress = None if step is None else at_step(step)
    events = [
        ProgressKnown(*known),
        *met(1),
        NodeStopping(0, Why.SIGNALLED, 10, 5.0),
        ended(0, 6.0, end(0, "a", 5.5, stopped_with=10, stopped_at=5.0, progress=progress)),
    ]
    state, actions = history(policy, events)
    ends = [action for action in actions if isinstance(action, EndJob)]
    assert [end.requeue for end in ends] == [10 if again else 0]
    assert state.restarts.without_new_step == (0 if step == 41 else known[1] + 1)


def test_what_a_slow_disk_tells_of_earlier_starts_is_added_to_what_has_come_meanwhile() -> None:
    policy = Policy(min_nodes=1, max_nodes=1, max_no_progress=3, max_restarts=5)
    begun = [*met(1), NodeStopping(0, Why.FAILED, 15, 5.0)]
    far = ended(0, 6.0, end(0, "a", 5.5, code=1, progress=at_step(50)))
    state, _ = history(policy, [*begun, far, ProgressKnown(40, 1)])
    assert (state.restarts.best_step, state.restarts.without_new_step) == (50, 1)
    at_once = ended(0, 6.0, end(0, "a", 5.5, code=1))  # no step
    state, _ = history(policy, [*begun, at_once, ProgressKnown(40, 1)])
    assert (state.restarts.best_step, state.restarts.without_new_step) == (40, 2)


SAME = (failed(0, error=raised()), failed(1, error=raised(message="bang")))


def test_the_same_exception_on_all_ranks_twice_in_a_row_ends_the_job() -> None:
    _, actions = generations(ONE, SAME, SAME, SAME)
    assert (started(actions), status(actions)) == (2, [1])
    assert (
        printed(actions)
        == "not started again: both ranks failed by the same ValueError in train.py:88 as before the restart"
    )


@pytest.mark.parametrize(
    "second",
    [
        (SAME[0], failed(1, error=raised(line=89))),
        (SAME[0], end(1, "a", 2.0, code=None, signal=15, stopped_with=15, stopped_at=1.0)),
        (failed(0, error=raised(line=99)), failed(1, error=raised(line=99))),
        (failed(0, error=raised(), progress=at_step(5)), SAME[1]),
    ],
    ids=["at different lines", "one rank was stopped", "at another line than before", "after a new step"],
)
def test_exceptions_that_are_not_quite_the_same_lead_to_a_restart(second: tuple[WorkerExit, ...]) -> None:
    assert started(generations(ONE, SAME, second)[1]) == 3


@pytest.mark.parametrize(
    "name",
    [
        "ConnectionResetError",
        "FileNotFoundError",
        "TimeoutError",
        "MemoryError",
        "huggingface_hub.errors.HfHubHTTPError",
        "httpx.ConnectError",
        "urllib.error.URLError",
        "botocore.exceptions.ClientError",
    ],
)
def test_exceptions_that_may_go_away_lead_to_a_restart_each_time(name: str) -> None:
    assert started(generations(ONE, *[(failed(error=raised(name)),)] * 3)[1]) == 4
