"""Histories of an arbiter that were constructed by thought, and what becomes of each node in them."""

from typing import Any

import pytest
from msgspec.structs import replace

from tests.simulator.scenario import COMMAND, FOREVER, Fault, Scenario, scenario
from tests.simulator.simulation import Simulation, failure_of
from tests.simulator.test_simulator import BACK, KILLED, of

FORTY = 40


def ended(found: Scenario) -> tuple[dict[int, int | None], Simulation]:
    """Run a history, of which all invariants hold; return the status of the last process of each machine, None if killed."""
    simulation = Simulation(found)
    simulation.run()
    return {process.machine.number: process.status for process in simulation.world.processes}, simulation


@pytest.mark.parametrize("kind", ["kill", "crash", "cut", "to arbiter", "from arbiter", "stop", "freeze", "sleep"])
@pytest.mark.parametrize("machine", [0, 2])
def test_any_node_of_a_command_may_be_lost_and_the_others_go_on(kind: str, machine: int) -> None:
    statuses, simulation = ended(of("command", Fault(20.0, kind, machine, lasts=FOREVER if kind == "crash" else 60.0)))
    others = {COMMAND, 0, 1, 2} - {machine}
    assert {statuses[number] for number in others} == {0}
    last = simulation.world.arbiters[0].runs[-1]
    assert last.nodes == others - {COMMAND}


@pytest.mark.parametrize(("kind", "within"), [("kill", 3.0), ("crash", 15.0), ("cut", 15.0)])
@pytest.mark.parametrize("spares", [0, 1])
def test_the_others_of_a_command_go_on_in_time(kind: str, within: float, spares: int) -> None:
    """Killed: 3 s; without power: heartbeat, K and 3 s."""
    _, simulation = ended(of("command", Fault(20.0, kind, 0, lasts=FOREVER), spares=spares))
    first, second = simulation.world.arbiters[0].runs
    assert second.term == first.term + 1
    assert simulation.world.arbiters[0].began[second.number] <= 20.0 + within


def test_by_hand_the_others_wait_for_node_0_and_go_on_with_it() -> None:
    statuses, simulation = ended(of("by hand", KILLED, BACK))
    assert statuses == {0: 0, 1: 0, 2: 0}
    first, second = simulation.world.arbiters
    assert [run.number for arbiter in (first, second) for run in arbiter.runs] == [0, 1]
    assert second.runs[0].nodes == {0, 1, 2}


def test_a_node_that_does_not_come_back_to_node_0_holds_it_up_for_a_lease() -> None:
    cut = Fault(19.9, "cut", 2, lasts=FOREVER)
    statuses, simulation = ended(of("by hand", cut, KILLED, BACK))
    assert statuses == {0: 0, 1: 0, 2: 122}
    assert simulation.world.arbiters[1].began[1] == pytest.approx(22.0 + 12.0, abs=3.0)


def test_by_hand_a_node_0_that_is_lost_for_good_ends_the_job_with_122() -> None:
    assert ended(of("by hand", KILLED))[0] == {0: None, 1: 122, 2: 122}


def test_nobody_waits_for_a_node_0_that_was_stopping_the_job() -> None:
    ctrl_c = Fault(20.0, "signal", 0, signum=2)
    statuses, _ = ended(of("by hand", ctrl_c, replace(KILLED, at=20.5), program="slow"))
    assert statuses == {0: None, 1: 130, 2: 130}


def test_a_node_0_that_leaves_in_order_is_waited_for() -> None:
    left = Fault(20.0, "sigterm", 0, signum=15)
    statuses, simulation = ended(of("by hand", left, replace(BACK, at=30.0)))
    assert statuses == {0: 0, 1: 0, 2: 0}
    assert [process.status for process in simulation.world.processes if process.machine.number == 0] == [143, 0]


def test_node_0_that_is_parted_goes_on_alone_and_the_others_do_not_train_beside_it() -> None:
    statuses, simulation = ended(of("by hand", Fault(20.0, "cut", 0, lasts=FOREVER)))
    assert statuses == {0: 0, 1: 122, 2: 122}
    assert simulation.world.arbiters[0].runs[-1].nodes == {0}


def test_a_command_that_is_killed_ends_all() -> None:
    statuses, _ = ended(of("command", Fault(20.0, "kill", COMMAND)))
    assert statuses == {COMMAND: None, 0: 122, 1: 122, 2: 122}


@pytest.mark.parametrize("where", ["command", "by hand"])
def test_17_of_40_nodes_are_lost_at_once_and_23_go_on(where: str) -> None:
    faults: Any = [Fault(30.0, "cut", number, lasts=FOREVER) for number in range(23, FORTY)]
    statuses, _ = ended(of(where, *faults, most=FORTY))
    assert [statuses[number] for number in range(FORTY)] == [0] * 23 + [122] * 17


# --- the nodes meet, and hear each other


def between(*pairs: tuple[int, int]) -> list[Fault]:
    return [Fault(20.0, "between", one, other=other, lasts=FOREVER) for one, other in pairs]


@pytest.mark.parametrize(("pairs", "stay"), [([(0, 2)], {0, 1}), ([(0, 1), (0, 2)], {1, 2}), ([(1, 2)], {0, 1, 2})])
def test_the_larger_part_goes_on_when_the_command_hears_all_nodes(pairs: list[tuple[int, int]], stay: set[int]) -> None:
    """A node keeps a connection to the first one alone."""
    statuses, simulation = ended(of("command", *between(*pairs)))
    assert simulation.world.arbiters[0].runs[-1].nodes == stay
    assert statuses == {COMMAND: 0, **{number: 0 if number in stay else 122 for number in range(3)}}


def test_a_tie_keeps_the_first_node_if_that_lives() -> None:
    assert ended(of("command", *between((0, 1)), most=2))[0] == {COMMAND: 0, 0: 0, 1: 122}
    assert ended(of("command", Fault(20.0, "reset"), most=2))[0] == {COMMAND: 0, 0: 122, 1: 0}


def test_a_worker_that_fails_as_the_nodes_part_costs_no_restart() -> None:
    """It may fail before its agent says that the first node is not heard, and is not the first to end then."""
    follows = Fault(20.0, "follow", 2)
    reset = Fault(20.0, "reset", 0)
    statuses, simulation = ended(of("command", follows, reset))
    assert simulation.world.arbiters[0].runs[-1].nodes == {1, 2}
    assert statuses == {COMMAND: 0, 0: 122, 1: 0, 2: 0}


MEETING = 1.9  # seconds: all have joined, and not all have answered


@pytest.mark.parametrize("machine", [0, 2])
def test_a_node_that_is_lost_while_the_nodes_meet_costs_no_lease(machine: int) -> None:
    _, simulation = ended(of("command", Fault(MEETING, "crash", machine, lasts=FOREVER), delay=0.6))
    (arbiter,) = simulation.world.arbiters
    assert arbiter.runs[0].nodes == {0, 1, 2} - {machine}
    assert arbiter._meeting is not None
    assert arbiter._meeting.number == 2
    assert arbiter.began[0] < MEETING + 10.0 + 5.0, "it was silent, and nothing was waited for after that"


def test_a_job_that_is_stopped_while_the_nodes_meet_starts_nothing() -> None:
    statuses, simulation = ended(of("command", Fault(MEETING, "stop job", signum=15), delay=0.6))
    (arbiter,) = simulation.world.arbiters
    assert arbiter._meeting is not None
    assert (arbiter._meeting.number, arbiter.runs) == (1, [])
    assert set(statuses.values()) == {143}


def test_nodes_part_in_a_meeting_only_if_the_first_one_lives() -> None:
    """In this history the others say that they do not reach it before the command knows that it is lost."""
    assert not failure_of(scenario(288_627))
