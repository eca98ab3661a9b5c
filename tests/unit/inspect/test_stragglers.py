"""Who comes last, from when each rank came to its collectives: made up, as torch's recorders tell it."""

import json
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddplaunch.record.seen.arrivals import arrivals, find_step
from ddplaunch.record.seen.stragglers import Clock, History, Straggler, compare

MS = 1_000_000  # nanoseconds
NOON = 1_800_000_000 * 1000 * MS  # some time of day
STEP = [("all_reduce", [[1 << 20]]), ("all_reduce", [[4096]]), ("broadcast", [[8]])]


def entry(
    number: int, at: int, *, name: str = "gloo:all_reduce", sizes: object = None, group: str = "0"
) -> dict[str, object]:
    return {
        "process_group": [group, "default_pg"],
        "profiling_name": name,
        "collective_seq_id": number,
        "input_sizes": sizes or [[4]],
        "time_created_ns": at,
        "is_p2p": False,
    }


def recorded(
    late: int = 0, *, first: int = 1, steps: int = 100, period: int = 100 * MS, ahead: int = 0, group: str = "0"
) -> bytes:
    """What a rank has recorded that comes `late` to each step of three collectives, 5 ms from one to the next."""
    entries = [
        entry(
            3 * index + place + 1,
            NOON + ahead + index * period + place * 5 * MS + late,
            name=f"gloo:{name}",
            sizes=sizes,
            group=group,
        )
        for index in range(first - 1, first - 1 + steps)
        for place, (name, sizes) in enumerate(STEP)
    ]
    return json.dumps({"entries": entries}).encode()


def read(
    bodies: Mapping[int, bytes | Sequence[bytes]],
    *,
    history: History | None = None,
    clocks: Mapping[int, Clock] | None = None,
    members: Mapping[str, str] | None = None,
    at: float | None = None,
    every: int = 1,
) -> History:
    found = [
        each
        for rank, of_rank in bodies.items()
        for each in arrivals(rank, [of_rank] if isinstance(of_rank, bytes) else of_rank, members or {}, every)
    ]
    steps = compare(found, {**dict.fromkeys(bodies, Clock(ahead=NOON)), **(clocks or {})})
    history = history or History()
    history.add(steps, max((each.newest_at for each in steps), default=0.0) if at is None else at)
    return history


def test_a_rank_that_comes_last_to_every_step_is_named_with_what_it_costs():
    history = read({0: recorded(), 1: recorded(MS), 2: recorded(38 * MS), 3: recorded()})
    assert str(history.straggler) == (
        "rank 2 came last to the collectives in 100% of the last 100 steps, 38 ms after the median rank: 38% of a step"
    )
    assert history.pace == pytest.approx(10)


def test_lateness_within_a_step_counts_once():
    late_in_each_of_three = read({0: recorded(), 1: recorded(20 * MS), 2: recorded()}).straggler
    assert late_in_each_of_three is not None
    assert late_in_each_of_three.share == pytest.approx(0.2)


@pytest.mark.parametrize(
    "bodies",
    [
        pytest.param({0: recorded(), 1: recorded(4 * MS), 2: recorded()}, id="below-5-percent-of-a-step"),
        pytest.param({0: recorded(), 1: recorded(50 * MS, steps=15)}, id="too-few-steps"),
        pytest.param({1: recorded(50 * MS)}, id="one-rank"),
        pytest.param({0: recorded(), 1: b"", 2: recorded()}, id="a-rank-that-is-late-and-tells-nothing"),
        pytest.param({0: recorded(), 1: recorded(50 * MS, first=500)}, id="nothing-in-common"),
        pytest.param({}, id="nobody"),
    ],
)
def test_nothing_is_said_of(bodies):
    assert read(bodies).straggler is None


def test_ranks_that_take_turns_in_being_last_are_no_stragglers():
    def alternating(odd: int) -> bytes:
        entries = [entry(n, NOON + n * 100 * MS + (40 * MS if n % 2 == odd else 0)) for n in range(1, 300)]
        return json.dumps({"entries": entries}).encode()

    assert read({0: alternating(0), 1: alternating(1)}).straggler is None


def test_clocks_of_nodes_that_differ_accuse_nobody_and_hide_nobody():
    bodies = {0: recorded(), 1: recorded(30 * MS), 2: recorded(ahead=7000 * MS), 3: recorded(ahead=7000 * MS)}
    clocks = {rank: Clock(ahead=NOON + 7000 * MS) for rank in (2, 3)}
    straggler = read(bodies, clocks=clocks).straggler
    assert straggler is not None
    assert straggler.rank == 1
    assert straggler.seconds == pytest.approx(0.03)


def test_what_the_clocks_may_be_wrong_by_is_no_lateness():
    bodies = {0: recorded(), 1: recorded(), 2: recorded(30 * MS)}
    assert read(bodies, clocks={2: Clock(ahead=NOON, error=28 * MS)}).straggler is None


def test_of_readings_that_overlap_each_step_counts_once():
    history = History()
    for first in (1, 31, 61):
        read({0: recorded(first=first), 1: recorded(50 * MS, first=first)}, history=history)
    assert history.straggler is not None
    assert history.straggler.steps == 160


def test_steps_that_were_overwritten_between_two_readings_are_left_out():
    history = History()
    for first in (1, 1001):
        read({0: recorded(first=first), 1: recorded(50 * MS, first=first)}, history=history)
    assert history.straggler is not None
    assert history.straggler.steps == 200


def test_a_rank_that_is_late_no_more_is_forgotten():
    history = History()
    read({0: recorded(), 1: recorded(50 * MS)}, history=history, at=10)
    assert history.straggler is not None
    for reading in range(2, 13):
        first = 1 + 100 * reading
        read({0: recorded(first=first), 1: recorded(first=first)}, history=history, at=10 + 60 * reading)
    assert history.straggler is None


def test_a_group_that_is_made_again_counts_from_the_start():
    again = b"".join(
        (recorded(first=900, steps=20)[:-2], b",", recorded(late=0, first=1, steps=60)[len('{"entries": [') :])
    )
    late = b"".join(
        (recorded(first=900, steps=20)[:-2], b",", recorded(50 * MS, first=1, steps=60)[len('{"entries": [') :])
    )
    history = read({0: recorded(first=860), 1: recorded(first=860)})
    read({0: again, 1: late}, history=history)
    assert history.straggler is not None
    assert (history.straggler.rank, history.straggler.steps) == (1, 60)


def test_members_of_a_sub_group_are_compared_with_each_other():
    bodies = {
        0: (recorded(), recorded(group="1")),
        1: (recorded(), recorded(60 * MS, group="1")),
        2: (recorded(), recorded(90 * MS, group="2")),
        3: (recorded(), recorded(90 * MS, group="2")),
    }
    straggler = read(bodies, members={"0": "0-3", "1": "0-1", "2": "2-3"}).straggler
    assert straggler is not None
    assert (straggler.rank, straggler.seconds) == (1, pytest.approx(0.06))


def test_a_job_that_makes_no_steps_any_more_has_no_pace():
    bodies = {0: recorded(), 1: recorded()}
    assert read(bodies, at=10.0).pace == pytest.approx(10)
    assert read(bodies, at=30.0).pace is None


def test_one_rank_has_a_pace():
    history = read({0: recorded()})
    assert history.pace == pytest.approx(10)
    assert history.steps == 100


def test_an_evaluation_and_single_collectives_do_not_hide_the_steps():
    training = [(n * 100 * MS, kind) for n, kind in enumerate("abc" * 60)]
    evaluated = [*training, *((18000 * MS + n * MS, "v") for n in range(40)), (19000 * MS, "z"), (19100 * MS, "y")]
    assert find_step(evaluated) == (3, pytest.approx(0.3))
    assert (
        find_step([*training[:90], (9000 * MS, "once"), *((at + 100 * MS, kind) for at, kind in training[90:])])[0] == 3
    )


def test_what_does_not_repeat_has_no_step():
    assert find_step([(n, n) for n in range(100)]) == (0, 0.0)
    assert find_step([]) == (0, 0.0)
    assert find_step([(1, "a"), (2, "a")]) == (0, 0.0)


BUCKETS = [("gloo:all_reduce", [[n]]) for n in range(120)]
LAYERS = [*[("gloo:all_gather", [[8]]), ("gloo:reduce_scatter", [[8]])] * 60, ("gloo:all_reduce", [[1]])]


@pytest.mark.parametrize(
    ("calls", "seen"),
    [
        (BUCKETS, 0.9),
        (BUCKETS, 1.2),
        (BUCKETS, 1.6),
        *((calls, n) for calls in (BUCKETS, LAYERS) for n in (2, 2.9, 3, 3.5)),
    ],
)
def test_a_step_is_known_once_three_are_seen(calls, seen):
    recorded = [calls[n % len(calls)] for n in range(int(seen * len(calls)))]
    entries = [entry(n + 1, NOON + n * MS, name=name, sizes=sizes) for n, (name, sizes) in enumerate(recorded)]
    (found,) = arrivals(0, [json.dumps({"entries": entries}).encode()], {})
    assert found.length == (len(calls) if seen >= 3 else 0)


def test_where_sizes_change_operations_tell_the_step():
    entries = [
        entry(n + 1, NOON + n * 50 * MS, name=f"gloo:{name}", sizes=[[n]])
        for n, name in enumerate(["all_gather", "all_to_all"] * 50)
    ]
    (found,) = arrivals(0, [json.dumps({"entries": entries}).encode()], {})
    assert (found.length, found.period) == (2, pytest.approx(0.1))


def numbers_of(entries: range, length: int, every: int) -> set[int]:
    """Those that are kept of a group with steps of so many collectives, of which these are recorded."""
    body = json.dumps({"entries": [entry(n, NOON + n * MS, sizes=[[n % length]]) for n in entries]}).encode()
    (found,) = arrivals(0, [body], {}, every)
    assert (found.length, found.newest, found.newest_at) == (length, entries[-1], NOON + entries[-1] * MS)
    return {number for number, _ in found.calls}


@pytest.mark.parametrize("length", [1, 3, 30, 120])
@pytest.mark.parametrize("every", [2, 9, 64, 512])
def test_of_very_many_ranks_whole_steps_are_compared_and_the_same_of_each_rank(length, every):
    for first in range(1, 3000, 389):
        one = numbers_of(range(first, first + 500), length, every)
        other = numbers_of(range(first + 2, first + 402), length, every)  # a newer call, and other groups in between
        steps = {number // length for number in one & other}
        whole = [each for each in steps if set(range(each * length, (each + 1) * length)) <= one & other]
        assert whole
        assert len(one) <= max(500 // every, 2 * length)


def test_a_straggler_among_very_many_ranks_is_found_by_what_is_kept():
    """Also where a step is longer than what would be kept of each rank."""
    length = 100
    history = History()
    for first in range(1, 20 * 700, 700):  # each reading is far from the last
        bodies = {
            rank: json.dumps(
                {
                    "entries": [
                        entry(n, NOON + n * MS + (20 * MS if rank == 2 else 0), sizes=[[n % length]])
                        for n in range(first, first + 450)
                    ]
                }
            ).encode()
            for rank in range(4)
        }
        read(bodies, history=history, every=64)
    assert history.straggler is not None
    assert (history.straggler.rank, history.straggler.share) == (2, pytest.approx(0.2))
    assert history.straggler.steps >= 20


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
fields = st.fixed_dictionaries(
    {},
    optional={
        name: json_values | st.integers(0, 40)
        for name in ("process_group", "profiling_name", "collective_seq_id", "input_sizes", "time_created_ns", "is_p2p")
    },
)


@settings(max_examples=30)
@given(st.lists(fields | json_values, max_size=60))
def test_no_answer_of_a_worker_does_harm(entries):
    body = json.dumps({"entries": entries}).encode()
    read({0: body, 1: body, 2: recorded()})


@settings(max_examples=20)
@given(st.lists(st.integers(0, 3 * MS), min_size=200, max_size=200), st.integers(2, 6), st.data())
def test_whoever_is_named_was_the_last_by_far(noise, size, data):
    slow = data.draw(st.integers(0, size - 1))
    extra = data.draw(st.integers(0, 80 * MS))

    def body(rank: int) -> bytes:
        late = extra if rank == slow else 0
        entries = [entry(n, NOON + n * 100 * MS + late + noise[(7 * n + 31 * rank) % 200]) for n in range(1, 101)]
        return json.dumps({"entries": entries}).encode()

    found: Straggler | None = read({rank: body(rank) for rank in range(size)}).straggler
    if extra > 12 * MS:
        assert found is not None
    if found is not None:
        assert found.rank == slow
        assert abs(found.seconds - extra / 1e9) <= 0.003
    if extra < 1 * MS:
        assert found is None
