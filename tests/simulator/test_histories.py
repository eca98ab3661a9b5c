"""Histories by which two parts of a job would train, or a majority would end, were one rule of the succession missing."""

from typing import Any

import pytest
from ddplaunch.launcher.decide.electorate import Vote
from ddplaunch.launcher.job.succession_link import SuccessionLink
from msgspec.structs import replace

from ddplaunch.launcher.decide import job
from tests.simulator import coordinator
from tests.simulator.scenario import Fault, scenario
from tests.simulator.simulation import Simulation

FOREVER = 300.0  # seconds
ELASTIC = job.Policy(
    min_nodes=1, max_nodes=8, last_call=5.0, rdzv_timeout=40.0, has_successors=True, may_leave=True, replaceable=True
)
QUIET = replace(
    scenario(0),
    policy=ELASTIC,
    work=60.0,
    program="ends",
    slow=(),
    delay=0.3,
    stuck=-1,
    follows=0.0,
    heartbeat_timeout=10.0,
    grace_period=4.0,
    stacks_within=0.0,
    health_check=False,
    workers=1,
    ranked=False,
)


def joins(number: int) -> list[Fault]:
    return [Fault(at / 10, "join", at) for at in range(number)]


def parted(at: float, group: tuple[int, ...], others: tuple[int, ...], lasts: float = FOREVER) -> list[Fault]:
    return [Fault(at, "sever", one, other, lasts=lasts) for one in group for other in others]


def statuses(seed: int, faults: list[Fault], nodes: int, **of_job: Any) -> tuple[int | None, ...]:
    """Run a history, of which all invariants hold; return the status of each node, None if it was killed."""
    policy = replace(ELASTIC, max_nodes=nodes, **of_job.pop("policy", {}))
    found = replace(QUIET, seed=seed, policy=policy, **of_job)
    simulation = Simulation(replace(found, faults=tuple(sorted(faults, key=lambda fault: fault.at))))
    simulation.run()
    return tuple(agent.status for agent in simulation.world.agents.values())


@pytest.mark.parametrize("seed", range(6))
def test_a_vote_of_a_node_that_spares_displace_lets_no_other_part_go_on(seed):
    """Node 0 dies as it announces the first generation. Spares come to node 1 before node 2 does, which is cut off then."""
    at = {0: 0.0, 1: 0.5, 2: 0.6, 3: 3.0, 4: 4.0, 5: 4.1, 6: 4.2}
    faults = [
        *(Fault(when, "join", number) for number, when in at.items()),
        Fault(2.0, "deaf", 0, 1, lasts=100.0),  # its acknowledgement does not come
        Fault(6.0, "kill", 0),
        *parted(5.9, (3,), (1, 4, 5, 6), 100.0),
        *parted(7.5 + seed / 4, (2,), (1, 4, 5, 6), 100.0),
    ]
    statuses(seed, faults, 7, policy={"min_nodes": 2, "spares": 3, "may_leave": True})


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("ranks", [(0, 1, 2, 3), (0,), (0, 3), ()], ids=["of all", "of node 0", "of both", "none"])
def test_a_node_that_claims_votes_of_others_lets_no_part_train_beside_the_other(monkeypatch, seed, ranks):
    """Nodes 2 and 3 are cut off from 0 and 1, and 3 lies."""
    honest = SuccessionLink._next_hello

    def lies(link: Any, reached: str) -> Any:
        hello = honest(link, reached)
        if not hello.votes or link._loop.number != 3:
            return hello
        term = hello.votes[-1].term
        votes = tuple(Vote(term, rank) for rank in ranks)
        return replace(hello, votes=votes, secrets=hello.secrets[-1:] * len(votes))

    monkeypatch.setattr(SuccessionLink, "_next_hello", lies)
    faults = [*joins(4), *parted(9.0 + seed / 4, (0, 1), (2, 3))]
    assert statuses(seed, faults, 4, policy={"min_nodes": 1})[2:] == (122, 122)


@pytest.mark.parametrize("seed", range(6))
def test_a_node_of_another_part_that_listens_no_longer_may_have_gone_on(seed):
    """Nodes 1 to 4 go on, of which 4 is left; 5 and 6 then lose node 0, and reach nobody."""
    faults = [
        *joins(7),
        Fault(3.0, "hang"),
        *parted(4.0, (0, 5, 6), (1, 2, 3), 11.0),
        *parted(4.0, (0, 5, 6), (4,), 100.0),
        *(Fault(21.0 + number / 5, "kill", number) for number in (1, 2, 3)),
    ]
    statuses(seed, faults, 7, slow=(0, 5, 6), grace_period=30.0, work=25.0, delay=0.01)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("has_begun", [True, False])
def test_the_end_of_a_node_proves_nothing_to_those_that_it_has_gone_on_without(monkeypatch, seed, has_begun):
    """Node 0 goes on with 1, then alone. Nodes 2 and 3 follow 1, which ends, since it is one of two of its last generation."""
    act = coordinator.SimulatedCoordinator._carry_out

    def cut_off_before_it_begins(own: Any, action: job.Action) -> None:
        if isinstance(action, job.BeginGeneration) and action.generation == 1 and own.own.number == 0:
            own.world.cut([(0, 1), (1, 0)], FOREVER)
        act(own, action)

    if not has_begun:
        monkeypatch.setattr(coordinator.SimulatedCoordinator, "_carry_out", cut_off_before_it_begins)
    faults = [*joins(4), *parted(10.0, (0,), (2, 3)), *(parted(25.0, (0,), (1,)) if has_begun else [])]
    assert statuses(seed, faults, 4, work=200.0) == (0, 122, 122, 122)


@pytest.mark.parametrize("seed", range(6))
def test_a_coordinator_with_too_few_nodes_takes_back_who_lets_it_go_on(seed):
    faults = [*joins(4), Fault(10.0, "crash", 3, lasts=FOREVER), Fault(10.0, "cut", 0, lasts=13.0)]
    ended = statuses(seed, faults, 4, policy={"min_nodes": 2}, program="ignores", grace_period=12.0, delay=0.01)
    assert ended == (0, 0, 0, None)


@pytest.mark.parametrize("seed", range(20))
def test_who_takes_over_waits_for_nodes_of_the_generation_before_the_one_that_was_announced(seed):
    """Node 2 has lost node 0, which dies once 1 has acknowledged that it goes on without 2."""
    faults = [
        *joins(3),
        *parted(5.0, (0,), (2,)),
        Fault(10.0, "deaf", 0, 1, awaits=True, lasts=100.0),
        Fault(17.0, "kill"),
    ]
    assert statuses(seed, faults, 3) == (None, 0, 0)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("who", [2, 3])
def test_a_coordinator_that_follows_another_passes_on_that_the_job_is_stopped(who, seed):
    """Node 2 has taken over and waits; it reaches node 1 as Ctrl-C comes."""
    lasts = 3.9 + 0.3 * seed
    faults = [*joins(4), Fault(10.0, "kill"), *parted(9.9, (1,), (2, 3), lasts)]
    faults.append(Fault(9.8 + lasts, "signal", who, signum=2))
    ended = statuses(seed, faults, 4, grace_period=12.0, delay=0.01)
    assert ended[2:] == (130, 130)
    assert ended[1] in (122, 130)
