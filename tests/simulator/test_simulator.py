"""The invariants of docs/design/simulator.md hold in jobs that meet random faults; and the simulator sees when they do not."""

import pytest
from ddplaunch.launcher.decide.electorate import Electorate
from msgspec.structs import replace

from ddplaunch.launcher.decide import job, node
from tests.simulator.scenario import Fault, scenario
from tests.simulator.simulation import Simulation, failure_of, report, shrunk

SEEDS = 300


@pytest.mark.parametrize("part", range(3))
def test_invariants_hold_in_every_job_of_many_seeds(part):
    for seed in range(part, SEEDS, 3):
        assert not failure_of(scenario(seed)), report(seed)


def test_a_seed_gives_the_same_history_each_time():
    histories = [[], []]
    for history in histories:
        Simulation(scenario(5), history).run()
    assert histories[0] == histories[1] != []


def without(kind, step):
    return lambda state, event: (state, ()) if isinstance(event, kind) else step(state, event)


def for_all(state, event, step=job.step):
    return step(state, replace(event, by_cluster=True) if isinstance(event, job.NodeStopping) else event)


@pytest.mark.parametrize(
    ("decision", "step", "invariant"),
    [
        (node, without(node.StopOrdered, node.step), ""),
        (node, without(node.KillOrdered, node.step), "a kill reaches nodes that stop"),
        (job, for_all, "a node leaves"),
    ],
    ids=["a stop never comes", "a kill never comes", "no node may leave"],
)
def test_a_broken_decision_is_seen_and_shrunk_to_the_faults_that_it_needs(monkeypatch, decision, step, invariant):
    monkeypatch.setattr(decision, "step", step)
    broken = next(found for found in map(scenario, range(SEEDS)) if failure_of(found))
    assert failure_of(broken).startswith(invariant)
    fewest = shrunk(broken)
    assert failure_of(fewest).partition(":")[0] == failure_of(broken).partition(":")[0]
    for fault in fewest.faults[1:]:
        assert not failure_of(replace(fewest, faults=tuple(other for other in fewest.faults if other is not fault)))
    assert "history:" in report(broken.seed)


def test_two_nodes_that_go_on_apart_are_seen(monkeypatch):
    """Node 0 is killed while the two others have lost each other: neither may count it as its own."""
    alone = replace(scenario(0).policy, min_nodes=1, max_nodes=3, spares=0, has_successors=True)
    joins = tuple(Fault(number / 10, "join", number) for number in range(3))
    parts = (Fault(9.0, "sever", 1, 2, lasts=30.0), Fault(10.0, "kill"))
    parted = replace(scenario(0), policy=alone, work=30.0, program="ends", delay=0.01, stuck=-1, faults=joins + parts)
    assert not failure_of(parted)
    count = Electorate.count
    monkeypatch.setattr(
        Electorate, "count", lambda one, votes: (count(one, votes)[0] + len(one.ended), count(one, votes)[1])
    )
    assert failure_of(parted).startswith("generations train in their order")
