"""SIGTERM to one agent of an elastic job: that node leaves, and the others go on; or the job ends, where they cannot."""

from signal import SIGHUP, SIGINT, SIGTERM

import pytest
from msgspec.structs import replace

from ddplaunch.launcher.decide.job import *
from ddplaunch.launcher.decide.job.node_loss import PAUSE_AFTER_LEAVE
from ddplaunch.spec.outcome import StartFailure, Why
from tests.unit.supervise.job_histories import (
    ELASTIC,
    TOO_FEW,
    end,
    ended,
    failing,
    history,
    member,
    met,
    silent,
    stopping,
)

SPOT = replace(ELASTIC, nodes_may_leave=True, nodes_are_replaceable=True)
STEP = replace(SPOT, nodes_are_replaceable=False)  # tasks of Slurm are started once
BEGUN = BeginGeneration(0, (0, 1, 2), 0)


def term(id: int, at: float, **fields: bool) -> NodeStopping:
    return NodeStopping(id, Why.SIGNALLED, SIGTERM, at, **fields)


def after(at: float) -> DeadlineReached:
    """Time enough for others to hear of the signal too."""
    return DeadlineReached(at + PAUSE_AFTER_LEAVE)


LEAVES: dict[str, tuple[Policy, list[Event], list[Action]]] = {
    "the others start again without it, at the cost of no restart": (
        SPOT,
        [*met(), term(1, 60), stopping(0, 61), stopping(2, 61), stopping(1, 69), after(69)],
        [BEGUN, StopNodes((0, 2), SIGTERM), Release(1, SIGTERM), BeginGeneration(1, (0, 2), 0)],
    ),
    "so does the end of its terminal": (
        SPOT,
        [*met(), NodeStopping(1, Why.SIGNALLED, SIGHUP, 60), *(stopping(id, 61) for id in range(3)), after(61)],
        [BEGUN, StopNodes((0, 2), SIGTERM), Release(1, SIGHUP), BeginGeneration(1, (0, 2), 0)],
    ),
    "it ends when its own workers have, however long the others save": (
        SPOT,
        [*met(), term(1, 60), stopping(1, 61), stopping(0, 80), stopping(2, 80), DeadlineReached(80)],
        [BEGUN, StopNodes((0, 2), SIGTERM), Release(1, SIGTERM), BeginGeneration(1, (0, 2), 0)],
    ),
    "nothing starts while the signal may be on its way to others": (
        SPOT,
        [*met(), term(1, 60), stopping(1, 60), stopping(0, 60), stopping(2, 60), DeadlineReached(60 + PAUSE_AFTER_LEAVE / 2)],
        [BEGUN, StopNodes((0, 2), SIGTERM), Release(1, SIGTERM)],
    ),
    "when node 0 has it too, those that stay wait for it": (
        SPOT,
        [*met(), term(1, 60), stopping(1, 60), term(0, 60.1), stopping(0, 60.2), stopping(2, 60.2)],
        [BEGUN, StopNodes((0, 2), SIGTERM), Release(1, SIGTERM), LeaveJob(SIGTERM), Release(0, SIGTERM)],
    ),
    "node 0 leaves last, when no worker is left anywhere": (
        SPOT,
        [*met(), term(0, 60), stopping(0, 61), stopping(1, 70), stopping(2, 80)],
        [BEGUN, StopNodes((1, 2), SIGTERM), LeaveJob(SIGTERM), Release(0, SIGTERM)],
    ),
    "or when the rest is lost": (
        SPOT,
        [*met(), term(0, 60), stopping(0, 61), stopping(1, 70), AgentLost(2, "silent for 10 s", 80)],
        [BEGUN, StopNodes((1, 2), SIGTERM), LeaveJob(SIGTERM), Release(0, SIGTERM)],
    ),
    "a second SIGTERM to node 0, which waits for others, kills theirs": (
        SPOT,
        [*met(), term(0, 60), NodeEscalated(0, SIGTERM, 61), *(stopping(id, 61) for id in range(3))],
        [BEGUN, StopNodes((1, 2), SIGTERM), KillNodes((1, 2)), LeaveJob(SIGTERM), Release(0, SIGTERM)],
    ),
    "told twice to leave, node 0 leaves once": (
        SPOT,
        [*met(), term(0, 60), stopping(0, 61), term(0, 62), stopping(1, 63), stopping(2, 63)],
        [BEGUN, StopNodes((1, 2), SIGTERM), LeaveJob(SIGTERM), Release(0, SIGTERM)],
    ),
    "node 0 leaves at once where no workers run": (
        SPOT,
        [*met(2), term(0, 3)],
        [LeaveJob(SIGTERM), Release(0, SIGTERM)],
    ),
    "node 0 that has finished stops the workers of others before it leaves": (
        SPOT,
        [*met(), ended(0, 59), term(0, 60), stopping(1, 61), stopping(2, 61)],
        [BEGUN, StopNodes((1, 2), SIGTERM), LeaveJob(SIGTERM), Release(0, SIGTERM)],
    ),
    "also when all have stopped before": (
        SPOT,
        [*met(), term(1, 60), *(stopping(id, 60) for id in range(3)), term(2, 60.4), after(60.1), term(0, 62.3)],
        [BEGUN, StopNodes((0, 2), SIGTERM), Release(1, SIGTERM), Release(2, SIGTERM), EndJob(143)],
    ),
    "when all others leave after node 0, the job ends": (
        SPOT,
        [*met(), term(0, 60), term(1, 60.1), term(2, 60.1), *(stopping(id, 61) for id in range(3))],
        [BEGUN, StopNodes((1, 2), SIGTERM), Release(1, SIGTERM), Release(2, SIGTERM), EndJob(143)],
    ),
    "a worker that could not be started elsewhere ends the job with its own status": (
        SPOT,
        [*met(), term(1, 60), NodeStopping(2, Why.FAILED, SIGTERM, 60.1), stopping(0, 61),
        ended(2, 61, failed=StartFailure(2, "c", "no room", 126)), stopping(1, 62)],
        [BEGUN, StopNodes((0, 2), SIGTERM), Release(1, SIGTERM), EndJob(126)],
    ),
    "several leave at once": (
        replace(SPOT, min_nodes=1),
        [*met(), term(1, 60), term(2, 60.1), *(stopping(id, 61) for id in range(3)), after(61)],
        [BEGUN, StopNodes((0, 2), SIGTERM), Release(1, SIGTERM), Release(2, SIGTERM), BeginGeneration(1, (0,), 0)],
    ),
    "with too few the job waits for others": (
        SPOT,
        [*met(2), DeadlineReached(31), term(1, 60), stopping(0, 61), stopping(1, 61), after(61), Joined(member(3), 90)],
        [
            BeginGeneration(0, (0, 1), 0),
            StopNodes((0,), SIGTERM),
            Release(1, SIGTERM),
            BeginGeneration(1, (0, 3), 0),
        ],
    ),
    "as long as at the start": (
        SPOT,
        [*met(2), DeadlineReached(31), term(1, 60), stopping(0, 61), stopping(1, 61), after(61), DeadlineReached(700)],
        [
            BeginGeneration(0, (0, 1), 0),
            StopNodes((0,), SIGTERM),
            Release(1, SIGTERM),
            TOO_FEW,
        ],
    ),
    "where none can come, the signal ends the job": (
        STEP,
        [*met(2), DeadlineReached(31), term(1, 60), stopping(0, 61), stopping(1, 61)],
        [BeginGeneration(0, (0, 1), 0), StopNodes((0,), SIGTERM), EndJob(143)],
    ),
    "but not if enough stay": (
        STEP,
        [*met(), term(1, 60), *(stopping(id, 61) for id in range(3)), after(61)],
        [BEGUN, StopNodes((0, 2), SIGTERM), Release(1, SIGTERM), BeginGeneration(1, (0, 2), 0)],
    ),
    "its second SIGTERM kills its own workers, and nobody else's": (
        SPOT,
        [*met(), term(1, 60), NodeEscalated(1, SIGTERM, 61), *(stopping(id, 62) for id in range(3)), after(62)],
        [BEGUN, StopNodes((0, 2), SIGTERM), Release(1, SIGTERM), BeginGeneration(1, (0, 2), 0)],
    ),
    "Ctrl-C there kills everywhere and ends the job": (
        SPOT,
        [*met(), term(1, 60), NodeEscalated(1, SIGINT, 61), *(stopping(id, 62) for id in range(3))],
        [
            BEGUN,
            StopNodes((0, 2), SIGTERM),
            KillNodes((0, 2)),
            StopNodes((1, 2), SIGINT, another_node_ended=True),
            Release(1, SIGTERM),
            EndJob(130),
        ],
    ),
    "killed before its workers have ended, it has left all the same": (
        SPOT,
        [*met(), term(1, 60), stopping(0, 61), stopping(2, 61), AgentLost(1, "connection closed", 90), DeadlineReached(90)],
        [BEGUN, StopNodes((0, 2), SIGTERM), BeginGeneration(1, (0, 2), 0)],
    ),
    "a worker that fails since a node has left is no failure": (
        SPOT,
        [*met(), term(1, 60), *failing(2, 60.1), stopping(0, 61), stopping(1, 61), after(61)],
        [BEGUN, StopNodes((0, 2), SIGTERM), Release(1, SIGTERM), BeginGeneration(1, (0, 2), 0)],
    ),
    "a node that leaves while all stop for a failure is not started again": (
        replace(SPOT, max_restarts=1),
        [*met(), *failing(0, 60), term(1, 60.25), stopping(1, 61), stopping(2, 61), after(61)],
        [
            BEGUN,
            StopNodes((1, 2), SIGTERM),
            Release(1, SIGTERM),
            ReportFailure(PAUSE_AFTER_LEAVE - 0.75),
            BeginGeneration(1, (0, 2), 1),
        ],
    ),
    "a node that is lost besides may leave too few": (
        SPOT,
        [*met(), term(1, 60), AgentLost(2, "silent", 60.5), stopping(0, 61), stopping(1, 61)],
        [BEGUN, StopNodes((0, 2), SIGTERM), Release(1, SIGTERM), EndJob(122)],
    ),
    "a node that has finished leaves the others at work": (
        SPOT,
        [*met(), ended(1, 59), term(1, 60), ended(0, 61), ended(2, 61)],
        [BEGUN, Release(1, SIGTERM), EndJob(0)],
    ),
    "when all have finished meanwhile the job has": (
        SPOT,
        [*met(), term(1, 60), *(ended(id, 61, end(id, "abc"[id], 59.9)) for id in range(3))],
        [BEGUN, StopNodes((0, 2), SIGTERM), Release(1, SIGTERM), EndJob(0)],
    ),
    "what cannot be ended there stops nobody else": (
        SPOT,
        [*met(), term(1, 60), stopping(0, 61), stopping(2, 61), NodeEnded(1, (), None, 70, ("pid 7",)), after(70)],
        [BEGUN, StopNodes((0, 2), SIGTERM), Release(1, SIGTERM), BeginGeneration(1, (0, 2), 0)],
    ),
    "nor does what could not be started there": (
        SPOT,
        [*met(), term(1, 1), NodeEnded(1, (), StartFailure(2, "b", "gone", 127), 2), stopping(0, 2), stopping(2, 2), after(2)],
        [BEGUN, StopNodes((0, 2), SIGTERM), Release(1, SIGTERM), BeginGeneration(1, (0, 2), 0)],
    ),
    "before the first start the others are waited for as before": (
        SPOT,
        [*met(2), term(1, 3), Joined(member(3), 4), Joined(member(4), 5)],
        [Release(1, SIGTERM), BeginGeneration(0, (0, 3, 4), 0)],
    ),
    "one that comes in its place meanwhile takes part": (
        SPOT,
        [*met(2), DeadlineReached(31), term(1, 60), Joined(member(2), 61), stopping(0, 61), stopping(1, 62), after(62)],
        [BeginGeneration(0, (0, 1), 0), StopNodes((0,), SIGTERM), Release(1, SIGTERM), BeginGeneration(1, (0, 2), 0)],
    ),
}  # fmt: skip
ENDS: dict[str, tuple[Policy, Event]] = {
    "the number of nodes is fixed": (replace(SPOT, min_nodes=3), term(1, 60)),
    "it came to node 0, which coordinates": (SPOT, term(0, 60)),
    "another signal came": (SPOT, NodeStopping(1, Why.SIGNALLED, SIGINT, 60)),
    "the cluster signals all processes of the job": (SPOT, term(1, 60, by_cluster=True)),
    "a command has started the agents": (replace(SPOT, nodes_may_leave=False), term(1, 60)),
    "SIGTERM is the job's notice": (replace(SPOT, notices=frozenset({SIGTERM})), term(1, 60)),
}


@pytest.mark.parametrize("sentence", LEAVES)
def test_a_node_leaves(sentence: str) -> None:
    policy, events, expected = LEAVES[sentence]
    assert silent(history(policy, events)[1]) == expected


@pytest.mark.parametrize("sentence", ENDS)
def test_a_signal_ends_the_job_if(sentence: str) -> None:
    policy, signalled = ENDS[sentence]
    state, _ = history(policy, [*met(), signalled, *(stopping(id, 61) for id in range(3))])
    assert (state.phase, state.end.status) == (Phase.ENDED, 130 if "another" in sentence else 143)


@pytest.mark.parametrize(("number", "others"), [(3, "without it"), (2, "once 1 more has joined")])
def test_what_the_others_do_is_said(number: int, others: str) -> None:
    _, actions = history(SPOT, [*met(number), DeadlineReached(31), term(1, 60)])
    said = [action.text for action in actions if isinstance(action, Print)]
    assert said == [f"node 1 (b) leaves (SIGTERM): all workers start again {others}"]


def test_a_stop_of_the_job_that_comes_after_gives_its_status() -> None:
    events = [*met(), term(1, 60), NodeStopping(2, Why.SIGNALLED, SIGINT, 61), *(stopping(id, 62) for id in range(3))]
    assert history(SPOT, events)[0].end.status == 130
