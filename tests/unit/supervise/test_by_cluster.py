"""Histories of signals that a cluster sends to all processes of a job, the workers among them: they get no second one of ours."""

from signal import SIGINT, SIGTERM, SIGUSR1

import pytest
from msgspec.structs import replace

from ddplaunch.launcher.decide import job, node
from ddplaunch.launcher.decide.job import Member
from ddplaunch.launcher.decide.node import *
from ddplaunch.launcher.decide.node.teardown import CLUSTER_SIGNALS_WITHIN, NAMES_EVERY
from ddplaunch.spec.outcome import Why
from tests.unit.supervise.histories import ALL, POLICY, STARTED, ended
from tests.unit.supervise.phases import job_step, node_step

STARTS: tuple[node.Event, ...] = (GenerationBegun(0, ALL, 0.05), *STARTED)
TERM = SignalReceived(SIGTERM, 1.0, is_request=False, by_cluster=True)
COPY = SignalReceived(SIGTERM, 1.0, is_request=False, is_copy=True)  # that the front passes on
ORDER = StopOrdered(SIGTERM, 0.9, by_cluster=True)  # since another node has had the signal first
HAD = StopWorkers(SIGTERM, ALL, by_cluster=True)
SENT = StopWorkers(SIGTERM, ALL)


def follows(*events: node.Event, policy: node.Policy = POLICY) -> list[node.Action]:
    """What all events after the start of the workers ask for."""
    state = node.State(policy=policy)
    asked: list[node.Action] = []
    for event in STARTS:
        state, _ = node_step(state, event)
    for event in events:
        state, actions = node_step(state, event)
        asked += actions
    return asked


def test_workers_that_have_had_the_signal_get_no_second_one() -> None:
    assert follows(TERM, COPY) == [HAD, ReportStopping(Why.SIGNALLED, SIGTERM, by_cluster=True)]


def test_what_comes_to_the_front_alone_is_sent_to_the_workers() -> None:
    alone = replace(COPY, is_copy=False)
    assert follows(alone) == [SENT, ReportStopping(Why.SIGNALLED, SIGTERM)]


def test_a_node_that_is_told_before_the_signal_comes_waits_for_it() -> None:
    assert follows(ORDER) == []
    assert follows(ORDER, TERM, COPY) == [HAD, ReportStopping(Why.SIGNALLED, SIGTERM)]


def test_it_sends_the_signal_itself_if_that_does_not_come() -> None:
    late = DeadlineReached(0.9 + CLUSTER_SIGNALS_WITHIN)
    assert follows(ORDER, DeadlineReached(0.8 + CLUSTER_SIGNALS_WITHIN)) == []
    assert follows(ORDER, late) == [SENT]
    assert follows(ORDER, late, TERM)[1:] == [ReportStopping(Why.SIGNALLED, SIGTERM)]
    assert follows(ORDER, TERM, late)[2:] == []


def test_it_waits_no_longer_than_the_grace_period() -> None:
    assert follows(ORDER, TERM, DeadlineReached(0.9 + POLICY.grace_period))[-1] == KillWorkers(ALL)


def test_who_still_runs_is_named_on_every_node() -> None:
    patient = replace(POLICY, grace_period=30.0)
    assert follows(ORDER, TERM, DeadlineReached(0.9 + NAMES_EVERY), policy=patient)[-1] == NameRunning(ALL, 25.0)


def test_workers_that_ended_by_it_before_are_the_end_of_the_node() -> None:
    ends = [ended(rank, 1.1, code=None, signal=15) for rank in sorted(ALL)]
    assert [type(action).__name__ for action in follows(ORDER, *ends)] == ["Sweep"]


def test_a_notice_to_both_processes_reaches_a_worker_once() -> None:
    """Elsewhere than in Slurm the workers have not had it: `pkill -USR1 -f train.py`."""
    policy = replace(POLICY, notices=frozenset({SIGUSR1}))
    one, copy = SignalReceived(SIGUSR1, 1.0), SignalReceived(SIGUSR1, 1.1, is_request=False, is_copy=True)
    assert follows(one, copy, policy=policy) == [ReportNotice(SIGUSR1), ForwardSignal(SIGUSR1, ALL)]
    assert follows(replace(one, by_cluster=True), copy, policy=policy) == [ReportNotice(SIGUSR1)]


def test_a_ctrl_c_is_never_waited_for() -> None:
    assert follows(StopOrdered(SIGINT, 1.0)) == [StopWorkers(SIGINT, ALL)]


# --- the job


def stopped(*, by_cluster: bool, watched: bool) -> tuple[job.Action, ...]:
    """What a stop of a job of two nodes asks for; `watched`: it comes from the command that has started the agents."""
    state = job.first_state(job.Policy(min_nodes=2, max_nodes=2), 0.0, 1)
    for id in (0, 1):
        state, _ = job_step(state, job.Joined(Member(id=id, host=f"node{id}", workers=2, requested_rank=id), 0.1))
    if watched:
        return job_step(state, job.StopRequested(Why.SIGNALLED, SIGTERM, 1.0, by_cluster))[1]
    return job_step(state, job.NodeStopping(1, Why.SIGNALLED, SIGTERM, 1.0, by_cluster))[1]


@pytest.mark.parametrize("by_cluster", [False, True])
def test_all_nodes_are_told_whether_the_cluster_signals_their_workers(by_cluster: bool) -> None:
    assert stopped(by_cluster=by_cluster, watched=False) == (job.StopNodes((0,), SIGTERM, by_cluster),)
    assert stopped(by_cluster=by_cluster, watched=True) == (job.StopNodes((0, 1), SIGTERM, by_cluster),)
