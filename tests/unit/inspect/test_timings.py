"""The lines about collectives that the agent writes: the last of each group, on one clock."""

from __future__ import annotations

from ddplaunch.record.seen import Call, Group, Sample
from ddplaunch.record.seen.arrivals import rows_of_arrivals, rows_of_samples
from ddplaunch.record.seen.stragglers import Clock
from tests.unit.builders import arrivals


def test_the_times_of_all_nodes_are_brought_to_one_clock() -> None:
    found = [arrivals(0, 1, [5_000_000, 7_000_000], "0-1"), arrivals(1, 2, [107_500_000], "0-1")]
    [row] = rows_of_arrivals(found, {0: Clock(ahead=1_000_000), 1: Clock(ahead=101_000_000)})
    assert (row["group"], row["members"], row["ranks"], row["numbers"]) == ("0", "0-1", "0-1", [1, 2])
    assert row["mono"] == 0.004
    assert row["came"] == [[0, None], [2000, 2500]]


def test_of_many_ranks_a_line_has_the_last_few_collectives() -> None:
    found = [arrivals(rank, 1, range(1000, 9000), "0-1") for rank in range(256)]
    [row] = rows_of_arrivals(found, dict.fromkeys(range(256), Clock(ahead=0)))
    assert row["numbers"] == [7997, 7998, 7999, 8000]


def test_workers_that_had_to_end_tell_the_collectives_that_they_had_called() -> None:
    call = Call(number=7, operation="all_reduce", inputs="", outputs="", done=False, at=3_000_000)
    other = Call(number=3, operation="send", inputs="", outputs="", done=False, at=1, is_p2p=True)
    group = Group(name="0", members="0-1", calls=(call, other))
    samples = [
        Sample(rank=0, pid=1, groups=(group,)),
        Sample(rank=0, pid=2, child="loader", groups=(group,)),
        Sample(rank=1, pid=3),
    ]
    [row] = rows_of_samples(samples, 1_000_000)
    assert (row["ranks"], row["numbers"], row["operations"], row["came"], row["mono"]) == (
        "0",
        [7],
        ["all_reduce"],
        [[0]],
        0.002,
    )
    assert rows_of_samples([], 0) == []
