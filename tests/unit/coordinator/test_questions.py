"""A question to all nodes is answered once for each of them, whatever becomes of them, and then it is done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ddplaunch.launcher.decide.job import Member
from ddplaunch.launcher.job.questions import Questions
from ddplaunch.record.window.questions import Answered, Ask, AskStatus, Forget, NoAnswer, NodeStatus
from tests.loops import FakeLoop
from tests.unit.coordinator.played import PlayedAsker

if TYPE_CHECKING:
    from ddplaunch.launcher.job.orders import OrderToAll

MEMBERS = {id: Member(id=id, host=f"host-{id}", workers=1, requested_rank=None) for id in range(3)}
FINE = NodeStatus(())


@dataclass
class Bed:
    """Questions, the orders that come of them, and what the one who asks is told."""

    loop: FakeLoop = field(default_factory=lambda: FakeLoop(at=0.0))
    sent: list[tuple[Sequence[int], OrderToAll]] = field(default_factory=list)
    asker: PlayedAsker = field(default_factory=PlayedAsker)

    def __post_init__(self) -> None:
        self.members = MEMBERS
        self.questions = Questions(self.loop, self)
        self.told = self.asker.told

    def order(self, ids: Sequence[int], order: OrderToAll) -> None:
        self.sent.append((ids, order))

    def on_last_stream_ended(self, id: int) -> None:
        """There are no streams."""

    def ask(self) -> None:
        """Ask all members, with two seconds to answer."""
        self.questions.ask(AskStatus(), 2.0, self.asker)


def test_all_are_asked_at_once_and_each_answer_is_told_as_it_comes():
    bed = Bed()
    bed.ask()
    assert bed.sent == [((0, 1, 2), Ask(1, AskStatus()))]
    for id in (2, 0):
        bed.questions.on_answer(id, Answered(1, FINE))
    assert bed.told == [(2, FINE), (0, FINE)]
    bed.questions.on_answer(1, Answered(1, FINE))
    assert bed.told[2:] == [(1, FINE), "done"]
    assert bed.loop.deadline is None


def test_who_does_not_answer_in_time_or_is_lost_is_named_with_the_reason():
    bed = Bed()
    bed.ask()
    bed.questions.on_answer(0, Answered(1, FINE))
    bed.questions.drop_departed({id: member for id, member in MEMBERS.items() if id != 1})
    assert bed.told[1:] == [(1, NoAnswer("was lost before it had answered"))]
    assert bed.loop.deadline == 2.0
    bed.loop.pass_time(1.9)
    assert "done" not in bed.told
    bed.loop.pass_time(0.1)
    assert bed.told[2:] == [(2, NoAnswer("has not answered within 2 s")), "done"]


def test_an_answer_that_nobody_asked_for_or_that_comes_twice_or_too_late_changes_nothing():
    bed = Bed()
    bed.questions.on_answer(0, Answered(1, FINE))
    bed.ask()
    bed.questions.on_answer(7, Answered(1, FINE))
    bed.questions.on_answer(0, Answered(2, FINE))
    bed.questions.on_answer(0, Answered(1, FINE))
    bed.questions.on_answer(0, Answered(1, FINE))
    assert bed.told == [(0, FINE)]
    bed.loop.pass_time(2.0)
    told = list(bed.told)
    bed.questions.on_answer(1, Answered(1, FINE))
    assert bed.told == told


def test_who_has_gone_is_told_nothing_more():
    bed = Bed()
    bed.ask()
    bed.questions.on_answer(2, Answered(1, FINE))
    bed.questions.forget(bed.asker)
    bed.questions.on_answer(0, Answered(1, FINE))
    bed.loop.pass_time(9.0)
    assert bed.told == [(2, FINE)]


def test_who_has_not_answered_yet_is_told_that_nobody_waits_for_it():
    bed = Bed()
    bed.ask()
    bed.questions.on_answer(2, Answered(1, FINE))
    bed.questions.forget(bed.asker)
    assert bed.sent[1:] == [((0, 1), Forget(1))]
