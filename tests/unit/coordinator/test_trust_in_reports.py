"""An agent is believed about its own workers only, and no more than these can have is worked on."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from ddplaunch.launcher.decide import job
from ddplaunch.launcher.decide.job import Member
from ddplaunch.launcher.decide.job.members import Members
from ddplaunch.launcher.job.coordinator import Coordinator
from ddplaunch.launcher.job.messages import why_refused
from ddplaunch.launcher.job.orders import Reached
from ddplaunch.record.seen import MAX_ENTRIES, Arrivals, Group, Sample
from ddplaunch.record.window.questions import Answer, NoAnswer, NodeArrivals, NodeStacks, NodeStatus, WorkerStatus
from tests.loops import FakeLoop

OWN, WORKERS, WORLD = range(2, 4), 2, 8
NOT_OWN = "speaks of workers that are not its own"


def status(*ranks: int, pid: int = 9) -> NodeStatus:
    return NodeStatus(tuple(WorkerStatus(rank, 0, pid, "", "running", "", 1.0, 0.5, 0, None) for rank in ranks))


def stacks(*ranks: int, members: Sequence[str] = ()) -> NodeStacks:
    groups = tuple(Group(name=each, members=each) for each in members) or None
    return NodeStacks.of([Sample(rank=rank, pid=9, groups=groups) for rank in ranks], threads=False)


def times(*ranks: int, entries: int = 3) -> NodeArrivals:
    numbers = (1,) * entries
    called: dict[str, Any] = {
        "numbers": numbers,
        "times": numbers,
        "newest": 3,
        "newest_at": 3,
        "length": 1,
        "period": 0.1,
    }
    return NodeArrivals(0, tuple(Arrivals(rank=rank, group="nccl 0", members="", **called) for rank in ranks))


@pytest.mark.parametrize(
    "answer",
    [
        status(2, 3),
        status(3),
        status(),
        stacks(2, 3, 3, members=("0,7", f"0-{WORLD - 1}")),
        times(2, 2, 3),
        times(2, entries=2 * MAX_ENTRIES),
        NoAnswer("could not"),
    ],
)
def test_what_an_agent_says_of_its_own_workers_is_taken(answer: Answer) -> None:
    assert why_refused(answer, OWN, WORKERS, WORLD) == ""


@pytest.mark.parametrize("answer", [status(0), status(2, 4), status(2, 2), stacks(2, 0), times(1, 2)])
def test_an_agent_does_not_speak_of_others(answer: Answer) -> None:
    assert why_refused(answer, OWN, WORKERS, WORLD) == NOT_OWN


def test_who_takes_no_part_has_workers_that_wait_and_no_others() -> None:
    nothing = range(0)
    assert why_refused(status(0, 1, pid=0), nothing, WORKERS, WORLD) == ""
    assert why_refused(status(0, 1, 2, pid=0), nothing, WORKERS, WORLD) == NOT_OWN
    for answer in (status(0), stacks(0), times(0)):
        assert why_refused(answer, nothing, WORKERS, WORLD) == NOT_OWN


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (stacks(2, members=(f"0,{WORLD}",)), "has process groups of more ranks than the job has"),
        (stacks(2, members=(f"0-{WORLD}",)), "has process groups of more ranks than the job has"),
        (stacks(2, members=(",".join(["0-3"] * 999),)), "has process groups of more ranks than the job has"),
        (stacks(*[2] * 259), "has more processes than its workers can have started"),
        (times(2, entries=2 * MAX_ENTRIES + 1), "has more to say of collectives than its workers can have called"),
        (times(*[2] * 257), "has more to say of collectives than its workers can have called"),
    ],
)
def test_more_than_its_workers_can_have_is_refused_before_any_work(answer: Answer, why: str) -> None:
    assert why_refused(answer, OWN, WORKERS, WORLD) == why


def test_who_was_asked_to_reach_nobody_parts_no_job() -> None:
    """Where the coordinator is on node 0, no meeting asks anybody to reach another node."""
    members = Members.of(Member(id=id, host="c", workers=1, requested_rank=None, node_rank=id) for id in range(3))
    state = job.State(policy=job.Policy(min_nodes=2, max_nodes=3), phase=job.Phase.RUNNING, members=members)
    nothing: Any = SimpleNamespace(on_event=lambda *_: None)
    agents: Any = SimpleNamespace(connections=SimpleNamespace(ping_all=list), state_changed=list)
    coordinator = Coordinator(FakeLoop(at=0.0), state, nothing, nothing)
    coordinator.lead(nothing, agents, is_one_host=True)
    for meeting in (0, 1):
        coordinator.on_report(2, Reached(meeting, "", "silent for 10 s"))
    assert coordinator.state == state
