"""Which machine is put on the list of those that have failed, where nodes of a job have lost each other."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace

from ddplaunch.launcher.decide import job
from ddplaunch.launcher.decide.job import SELF_ID, Member
from ddplaunch.launcher.decide.job.members import Members
from ddplaunch.launcher.decide.job.restarts import Generation
from ddplaunch.launcher.tell.blame import Loss, Suspect, blamed, suspect_of
from ddplaunch.launcher.tell.job_reporter import JobReporter
from ddplaunch.launcher.tell.reporter import Surroundings
from ddplaunch.launcher.tell.story import Story
from ddplaunch.record import bad_nodes

OWN = Suspect("a", None)


def lost(host: str, reason: str = "silent for 10 s", *, at_work: bool = True, silent: int = 0) -> Loss:
    return Loss(Suspect(host, f"10.0.0.{ord(host)}"), reason, at_work, silent, reason == "connection closed")


@pytest.mark.parametrize(
    ("others", "losses", "hosts"),
    [
        (2, [lost("b")], ["b"]),
        (2, [lost("b"), lost("c")], ["a"]),
        (2, [lost("b"), lost("c", at_work=False)], ["a"]),
        (2, [lost("b", silent=1)], ["a"]),
        (2, [lost("b", "connection closed"), lost("c")], ["a"]),
        (2, [lost("b", "connection closed"), lost("c", "connection closed")], []),
        (1, [lost("b")], []),
        (1, [lost("b", "connection reset")], []),
        (1, [lost("b", "connection closed")], ["b"]),
        (3, [lost("b"), lost("c")], []),
        (4, [lost("b"), lost("c")], ["b", "c"]),
        (4, [lost("b"), lost("c", at_work=False)], ["b"]),
        (4, [lost("b", silent=1)], ["b"]),
        (4, [lost("b", silent=2)], []),
        (4, [lost("b"), lost("c"), lost("d")], []),
        (8, [lost(host) for host in "bcdefghi"], ["a"]),
    ],
    ids=[
        "one of three",
        "both of the others, at once",
        "and the second one a moment later, as the workers stop",
        "and its report came as the cable was in again",
        "and its connection was closed as the cable was in again",
        "both, which have ended",
        "the other one of two",
        "a reset of it, which proves nothing",
        "its end, which its kernel has said",
        "half of four",
        "two of five",
        "one of these while the workers were ending",
        "one of two that are silent, and come again",
        "one of three that are silent, and come again",
        "three of five, with another one still here",
        "all of nine",
    ],
)
def test_who_has_lost_most_others_is_at_fault_and_nobody_if_that_cannot_be_told(
    others: int, losses: list[Loss], hosts: list[str]
) -> None:
    assert [one.host for one in blamed(OWN, others, losses)] == hosts


def member(id: int, host: str, rank: int | None = None) -> Member:
    return Member(
        id=id, host=host, workers=1, requested_rank=rank, node_rank=rank, address=f"10.0.0.{id}" if id else ""
    )


@pytest.mark.parametrize(
    ("one", "names", "suspect"),
    [
        (member(1, "gpu07", 1), ("n0", "n1"), Suspect("n1", None)),
        (member(SELF_ID, "a"), ("n0", "n1"), Suspect("n0", None)),
        (member(SELF_ID, "a"), (), Suspect("a", None)),
        (member(1, "gpu07", 1), (), Suspect("gpu07", "10.0.0.1")),
        (member(1, "gpu07"), ("n0", "n1"), Suspect("gpu07", "10.0.0.1")),
        (member(1, "gpu07", 7), ("n0", "n1"), Suspect("gpu07", "10.0.0.1")),
    ],
    ids=["as it was started", "this one, too", "this one", "by its own word", "without a rank", "no such rank"],
)
def test_a_machine_is_called_as_who_has_started_it_calls_it_and_else_its_address_is_kept(
    one: Member, names: tuple[str, ...], suspect: Suspect
) -> None:
    assert suspect_of(one, names) == suspect


class Remembered:
    """A job of nodes a, b, c, d, which one command has started; its coordinator on `a` remembers at the end who has failed."""

    def __init__(self, path: str) -> None:
        self._path = path
        nothing = lambda *_, **__: None  # noqa: E731
        of_node = SimpleNamespace(
            spec=SimpleNamespace(chaos=(), no_sample=True),
            story=Story(began=0.0),
            around=Surroundings(bad_nodes=path),
            print=nothing,
            emit=nothing,
        )
        self.reporter = JobReporter(cast(Any, of_node))
        members = Members.of([member(SELF_ID, "a", 0), *(member(id, "lies", id) for id in range(1, 4))])
        policy = job.Policy(min_nodes=4, max_nodes=4, host_names=tuple("abcd"))
        self.state = job.State(policy=policy, phase=job.Phase.RUNNING, generation=Generation(number=0), members=members)

    def lose(self, id: int, reason: str = "silent for 10 s") -> None:
        after = replace(self.state, phase=job.Phase.STOPPING, members=self.state.members.without(id))
        self.reporter.on_event(job.AgentLost(id, reason, 1.0), self.state, after)
        self.state = after

    def end(self, **state: Any) -> list[str]:
        self.reporter._remember_faults(replace(self.state, **state))
        return [one.host for one in bad_nodes.read(self._path, time.time())]


@pytest.fixture
def remembered(tmp_path: Path) -> Remembered:
    return Remembered(str(tmp_path / "nodes.jsonl"))


@pytest.mark.parametrize("reason", ["silent for 10 s", "has heard nothing from here for too long"])
def test_a_node_that_is_lost_is_remembered_as_it_was_started(remembered: Remembered, reason: str) -> None:
    remembered.lose(1, reason)
    assert remembered.end() == ["b"]


def test_a_node_0_that_loses_all_others_is_remembered_itself(remembered: Remembered) -> None:
    for id in (1, 2, 3):
        remembered.lose(id)
    assert remembered.end() == ["a"]


def test_a_command_that_loses_all_nodes_accuses_none(remembered: Remembered) -> None:
    """The command that has started all agents is no node of the job, and its own network may be out."""
    without_own = remembered.state.members.without(SELF_ID)
    remembered.state = replace(remembered.state, members=without_own)
    for id in (1, 2, 3):
        remembered.lose(id)
    assert remembered.end() == []


@pytest.mark.parametrize(
    ("host", "address", "is_known"),
    [
        ("gpu07", None, True),
        ("gpu07.invalid", "192.0.2.7", False),
        ("localhost", "192.0.2.7", False),
        ("gpu07", "127.0.0.1", False),
        (os.uname().nodename, "127.0.0.1", True),
        ("192.0.2.7", "192.0.2.7", True),
        ("gpu07", "", False),
    ],
    ids=[
        "by the word of another",
        "a name that leads nowhere",
        "one that leads elsewhere",
        "another one of this host",
        "this host",
        "its address",
        "from nowhere",
    ],
)
def test_a_name_that_a_machine_gives_itself_has_to_lead_there(
    tmp_path: Path, host: str, address: str | None, is_known: bool
) -> None:
    path, now = str(tmp_path / "nodes.jsonl"), time.time()
    bad_nodes.remember_suspects(path, [(bad_nodes.Failure(host=host, kind="lost", at=now), address)], now)
    assert [one.host for one in bad_nodes.read(path, now)] == ([host] if is_known else [])
