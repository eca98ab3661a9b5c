"""How the steps of ranks divide, whom they wait for, and what is left out where that is not known."""

import pytest
from msgspec.structs import replace

from ddplaunch.record.trace import difference, intersection, total_length, union
from ddplaunch.system.console.tables import Look, written
from ddplaunch.tools.profile import _about_last, _sentences, _table
from ddplaunch.tools.profile.division import Division, Last, divide, join_collectives
from ddplaunch.tools.profile.recorded import Collective, Recorded, Sample


def call(arrived: int, ended: int, number: int = 1, operation: str = "all_reduce") -> Collective:
    return Collective(group="0", number=number, operation=operation, tensors="", arrived=arrived, ended=ended)


def rank(number: int, *calls: Collective, **more: object) -> Recorded:
    """A rank that computes in the first 10 ns, and then is in its collectives; a step ends at 0 and at 100."""
    given: dict[str, object] = {
        "computes": [(0, 10)],
        "loads_data": [],
        "communicates": union((one.arrived, one.ended) for one in calls),
        "samples": [],
        "groups": {"0": 2},
        "ended": 100,
        "steps": [0, 100],
    }
    return Recorded(
        rank=number,
        host="h",
        events=[],
        began=0,
        starting=0,
        stopping=0,
        on_device=False,
        collectives=list(calls),
        **{**given, **more},  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("ours", "others", "both", "rest"),
    [
        ([(0, 10)], [(2, 3), (5, 20)], [(2, 3), (5, 10)], [(0, 2), (3, 5)]),
        ([(0, 1), (2, 3)], [(0, 3)], [(0, 1), (2, 3)], []),
        ([(5, 9)], [(0, 5), (9, 12)], [], [(5, 9)]),
        ([(0, 4), (6, 8)], [(1, 7)], [(1, 4), (6, 7)], [(0, 1), (7, 8)]),
    ],
)
def test_spans_are_cut_where_others_begin_and_end(ours, others, both, rest):
    assert intersection(ours, others) == both
    assert difference(ours, others) == rest
    assert total_length(both) + total_length(rest) == total_length(ours)


def test_spans_that_touch_or_overlap_become_one():
    assert union([(5, 6), (1, 3), (3, 4), (2, 3), (9, 9), (8, 7)]) == [(1, 4), (5, 6)]


def test_a_rank_waits_until_the_last_one_comes_and_communicates_then():
    late = rank(
        1,
        call(70, 90),
        computes=[(0, 30)],
        loads_data=[(30, 40)],
        samples=[Sample(0, 20, "a.py:1"), Sample(20, 60, "a.py:2")],
    )
    found = [rank(0, call(10, 90)), late]
    divisions, last = divide(found, join_collectives(found, aligned={0, 1}))
    assert [(one.computes, one.waits, one.communicates, one.loads_data, one.other) for one in divisions] == [
        (10, 60, 20, 0, 10),
        (30, 0, 20, 10, 40),
    ]
    assert last is not None
    assert (last.rank, last.share, last.per_step, last.times, last.compared, last.by_step) == (1, 0.6, 60, 1, 1, True)
    assert last.meanwhile["computes"] == pytest.approx(20 / 60)
    assert last.meanwhile["loads data"] == pytest.approx(10 / 60)
    assert last.lines[0][0] == "a.py:2"


@pytest.mark.parametrize(
    ("second", "aligned"),
    [
        (call(70, 90), {0}),  # its clock was set
        (call(70, 90, number=2), {0, 1}),
        (call(70, 90, operation="broadcast"), {0, 1}),
    ],
)
def test_nobody_waits_in_what_is_not_the_same_collective_or_on_another_clock(second, aligned):
    found = [rank(0, call(10, 90)), rank(1, second)]
    divisions, last = divide(found, join_collectives(found, aligned=aligned))
    assert (divisions[0].waits, divisions[0].communicates, last) == (0, 80, None)


def taking_turns(last_ranks: list[int], more: list[tuple[int, int]] = []) -> list[Recorded]:  # noqa: B006 - it is read only
    """Two ranks with a step of 100 ns for each of `last_ranks`, which comes 40 ns later than the other to its first collective.

    `more` says who came how much later to the further collectives of each step.
    """
    arrivals: dict[int, list[int]] = {0: [], 1: []}
    for step, last in enumerate(last_ranks):
        for at, (who, late) in enumerate([(last, 40), *more]):
            for number, times in arrivals.items():
                times.append(100 * step + 10 + 50 * bool(at) + 2 * at + (late if number == who else 0))
    return [
        rank(
            number,
            *(call(at, at + 41, index) for index, at in enumerate(times)),
            steps=[100 * step for step in range(len(last_ranks) + 1)],
            ended=100 * len(last_ranks),
            computes=[],
        )
        for number, times in arrivals.items()
    ]


def test_no_rank_is_blamed_where_ranks_take_turns_in_being_the_last():
    found = taking_turns([0, 1, 0, 1, 0, 1, 0, 1, 1])
    assert divide(found, join_collectives(found, aligned={0, 1}))[1] is None
    no_steps = [replace(one, steps=[]) for one in found]
    assert divide(no_steps, join_collectives(no_steps, aligned={0, 1}))[1] is None


def test_the_collective_of_a_step_counts_for_which_the_ranks_waited_longest():
    found = taking_turns([1] * 5, more=[(0, 1)] * 3)
    last = divide(found, join_collectives(found, aligned={0, 1}))[1]
    assert last is not None
    assert (last.rank, last.times, last.compared) == (1, 5, 5)


def test_who_is_the_last_is_not_known_where_a_rank_of_the_group_was_left_out():
    found = [rank(0, call(10, 90), groups={"0": 3}), rank(1, call(70, 90))]
    (joined,) = join_collectives(found, aligned={0, 1})
    assert joined.last is None
    assert divide(found, [joined])[1] is None


def test_what_ranks_record_while_another_makes_its_trace_does_not_count():
    early = rank(1, call(70, 90), steps=[0, 50, 100], ended=60)
    found = [rank(0, call(10, 90), steps=[0, 50, 100]), early]
    divisions, _ = divide(found, join_collectives(found, aligned={0, 1}))
    assert [(one.whole, one.steps) for one in divisions] == [(50, 1), (50, 1)]


@pytest.mark.parametrize("width", [80, 100, None])
def test_a_screen_of_80_columns_has_room_for_each_row_and_breaks_sentences_between_words(width):
    ms = 1_000_000
    parts = {"computes": 300 * ms, "communicates": 200 * ms, "waits": 2000 * ms, "loads_data": 0}
    divisions = [Division(rank=rank, whole=3000 * ms, steps=1, **parts) for rank in range(2)]
    last = Last(
        rank=1,
        share=0.5,
        per_step=36 * ms,
        times=25,
        compared=28,
        by_step=True,
        meanwhile={"loads data": 0.7},
        lines=[],
    )
    look = Look(width=width)
    rows, said = (
        written([block], look) for block in (_table(divisions, {0: "gpu01"}, look), _sentences(_about_last(last), look))
    )
    assert ("2000 ms  67%" in rows) is (width != 80)
    assert " 67%" in rows
    assert all(len(text) <= (width or 1000) for text in (rows + "\n" + said).split("\n"))
    assert said.replace("\n", " ").startswith(
        "the others wait for rank 1 for 50% of the time, 36 ms of each step: it is the last in 25 of 28 steps"
    )


@pytest.mark.parametrize("width", [80, 100])
def test_hosts_with_long_names_stand_below_the_table_where_a_row_would_be_broken(width):
    host = "gpu-node-0123.cluster.example.org"
    parts = {"computes": 300, "communicates": 200, "waits": 2000, "loads_data": 0}
    divisions = [Division(rank=rank, whole=3000, steps=140, **parts) for rank in (0, 1, 127)]
    rows = written([_table(divisions, dict.fromkeys((0, 1, 127), host), look := Look(width=width))], look).split("\n")
    assert all(len(row) <= width for row in rows)
    assert all(row.count("%") == 5 for row in rows[1:4])
    assert (rows[-1] == f"ranks 0-1,127: {host}") is (width == 80)
