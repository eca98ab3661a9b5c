"""The invariants of docs/design/simulator.md hold in jobs that meet random faults; and the simulator sees when they do not."""

import importlib
from typing import Any

import pytest
from msgspec.structs import replace

from ddplaunch.launcher.decide import job, node
from ddplaunch.launcher.decide.job import restarts, state
from ddplaunch.launcher.job import remote_link
from tests.simulator import agents, arbiters
from tests.simulator.scenario import FOREVER, Fault, Scenario, policy_of, scenario
from tests.simulator.simulation import Simulation, failure_of, report, shrunk
from tests.simulator.training import Storage

SEEDS = 900
node_loss: Any = importlib.import_module("ddplaunch.launcher.decide.job.node_loss")


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


def test_a_broken_decision_is_seen_and_shrunk_to_the_faults_that_it_needs(monkeypatch):
    monkeypatch.setattr(node, "step", without(node.StopOrdered, node.step))
    broken = next(
        found for found in map(scenario, range(SEEDS)) if failure_of(found).startswith("nothing waits for ever")
    )
    fewest = shrunk(broken)
    assert failure_of(fewest).partition(":")[0] == failure_of(broken).partition(":")[0]
    for fault in fewest.faults[1:]:
        assert not failure_of(replace(fewest, faults=tuple(other for other in fewest.faults if other is not fault)))


# --- what each invariant is for: a job in which it holds, and breaks where the code is broken


def of(where: str, *faults: Fault, least: int = 1, most: int = 3, **fields: Any) -> Scenario:
    """Return a job of so many nodes, which all start at once, with these faults."""
    joins = [Fault(number / 10, "join", number) for number in range(most)]
    of_job = {name: fields.pop(name) for name in ("spares", "max_restarts") if name in fields}
    values: dict[str, Any] = {
        "heartbeat_timeout": 10.0,
        "grace_period": 4.0,
        "work": 60.0,
        "program": "ends",
        "delay": 0.05,
        **fields,
    }
    return Scenario(
        seed=1,
        where=where,
        policy=policy_of(where, least, most, 10.0, last_call=2.0, rdzv_timeout=60.0, **of_job),
        workers=1,
        ranked=False,
        follows=0.0,
        faults=tuple(sorted([*joins, *faults], key=lambda fault: fault.at)),
        **values,
    )


CUT = Fault(20.0, "cut", 2, lasts=FOREVER)
STOPPED = Fault(20.0, "stop", 2, lasts=60.0)
KILLED = Fault(20.0, "kill", 0)
BACK = Fault(22.0, "return", 0)


def without_wait(of_state, _lost):
    return of_state


def at_once(policy, at, first_term, begin=job.first_state):
    began = begin(policy, at, first_term)
    return replace(began, rendezvous=replace(began.rendezvous, earliest_start_if_incomplete=at))


def number_alone(generation, at, *, after=-1, after_term=-1, following=restarts.Generation.next):
    return following(generation, at)


def last_written(storage):
    return storage.newest


BREAKS: dict[str, tuple[Scenario, Any, str, Any, str]] = {
    "no generation waits for a lease": (
        of("command", Fault(20.0, "reset", 2), slow=(2,), grace_period=30.0),
        *(node_loss, "_with_wait_for_lease", without_wait, "no two generations have living workers"),
    ),
    "no agent ends its workers when their lease is over": (
        of("by hand", CUT, slow=(2,), grace_period=30.0),
        *(remote_link.RemoteLink, "_check_lease", lambda _: None, "no two generations have living workers"),
    ),
    "no front ends an agent that is stopped": (
        of("command", STOPPED),
        *(agents.Agent, "_on_front", lambda _: None, "no two generations have living workers"),
    ),
    "a node 0 that is back begins without those that follow the one before": (
        of("by hand", replace(CUT, at=19.9), KILLED, BACK, program="ignores", grace_period=30.0),
        *(job, "first_state", at_once, "no two generations have living workers"),
    ),
    "a spare counts as one that was there": (
        of("by hand", replace(CUT, machine=1, at=19.9), KILLED, BACK, spares=1, program="ignores", grace_period=30.0),
        *(
            state,
            "have_all_workers",
            lambda policy, members: len(members) >= policy.most_running,
            "no two generations have",
        ),
    ),
    "a node 0 that is back counts generations anew": (
        of("by hand", KILLED, BACK),
        *(restarts.Generation, "next", number_alone, "nobody is misunderstood"),
    ),
    "terms begin anew": (
        of("by hand", replace(CUT, at=19.9), replace(CUT, at=19.9, machine=1), KILLED, BACK),
        *(arbiters, "first_term", lambda _: 1, "terms grow"),
    ),
    "the last checkpoint is loaded, whatever its term": (
        of("command", Fault(20.0, "freeze", 2, lasts=40.0), Fault(44.0, "kill", 1), work=90.0),
        *(Storage, "greatest", property(last_written), "a checkpoint never goes back"),
    ),
}


@pytest.mark.parametrize("what", BREAKS)
def test_a_broken_rule_breaks_an_invariant(monkeypatch, what):
    found, home, name, broken, invariant = BREAKS[what]
    assert not failure_of(found)
    monkeypatch.setattr(home, name, broken)
    assert failure_of(found).startswith(invariant)
