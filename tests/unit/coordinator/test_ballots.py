"""Whose a vote is: what a node has to show for it, to the coordinator that gave it and to one that takes over."""

from __future__ import annotations

import pytest

from ddplaunch.launcher.decide.electorate import Vote
from ddplaunch.launcher.job.ballots import Ballots, Seals, seal_of

A, B, C = (Vote(1, rank) for rank in range(3))


@pytest.fixture
def given() -> Ballots:
    """What the coordinator knows that has given these votes."""
    ballots = Ballots()
    ballots.issue(1, 3, ())
    return ballots


@pytest.fixture(params=["that has given it", "that takes over"])
def here(request: pytest.FixtureRequest, given: Ballots) -> Ballots:
    """What the coordinator knows to which votes are shown."""
    return given if request.param == "that has given it" else Ballots(given.seals_of([1]))


def test_a_vote_counts_with_the_secret_that_came_with_it(given: Ballots, here: Ballots) -> None:
    assert here.take([B], given.secrets_of([B]))
    assert here.secrets_of([B]) == given.secrets_of([B])


@pytest.mark.parametrize("secrets", [(), ("",), ("0" * 32,)], ids=["none", "an empty one", "a guess"])
def test_a_vote_without_its_secret_is_that_of_another(here: Ballots, secrets: tuple[str, ...]) -> None:
    assert not here.take([B], secrets)


def test_the_secret_of_one_vote_shows_no_other(given: Ballots, here: Ballots) -> None:
    assert not here.take([C], given.secrets_of([B]))
    assert not here.take([Vote(1, 7)], given.secrets_of([B]))
    assert not here.take([A, B, C], given.secrets_of([B]) * 3)


def test_nobody_has_two_votes_in_a_term(given: Ballots, here: Ballots) -> None:
    assert not here.take([B, C], given.secrets_of([B, C]))


def test_what_a_seal_says_is_no_secret(given: Ballots, here: Ballots) -> None:
    (seals,) = given.seals_of([1])
    assert not here.take([B], [seals.by_rank[1] * 2])
    assert seals == Seals(1, tuple(map(seal_of, given.secrets_of([A, B, C]))))


def test_votes_of_coordinators_that_are_not_known_here_are_kept_for_these(here: Ballots) -> None:
    there = Vote(9, 1)
    assert here.take([there], ["1" * 32])
    assert here.secrets_of([there]) == ("1" * 32,)
    assert here.take([there], ["2" * 32])
    assert here.secrets_of([there]) == ("1" * 32,)  # nobody takes the secret of another away


def test_of_earlier_electorates_what_still_counts_is_known(given: Ballots) -> None:
    shown = given.secrets_of([B])
    given.issue(2, 2, [1])
    assert given.take([B], shown)
    given.issue(3, 2, [2])
    assert [one.term for one in given.seals_of([1, 2, 3])] == [2, 3]
    assert given.secrets_of([B]) == ("",)
