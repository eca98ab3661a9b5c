"""Who waits for whom, from what torch's recorders tell: recorded of torch 2.13 over gloo while three ranks hung, and made up."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from ddplaunch.record.seen import Call, Group, Sample, Thread
from ddplaunch.record.seen.collectives import explain
from ddplaunch.record.seen.recorder import parse, parse_members
from ddplaunch.spec.outcome import Frame

RECORDED = Path(__file__).parent / "recorded"
MEMBERS = {"0": "0-2", "1": "0-1", "2": "1-2"}


def at(rank: int, groups: tuple[Group, ...] | None, *, ended: bool = False) -> Sample:
    frames = (Frame(file="/home/me/train.py", line=70 + rank, function="step"),)
    return Sample(rank=rank, pid=1, threads=(Thread(frames=frames, is_main=True),), groups=groups, ended=ended)


def recorded(case: str) -> list[Sample]:
    dumps = json.loads((RECORDED / f"{case}.json").read_text())
    return [at(int(rank), tuple(parse(json.dumps(dump).encode(), MEMBERS))) for rank, dump in dumps.items()]


def told(samples: list[Sample]) -> list[str]:
    return [line.strip() for line in explain(samples, "/home/me")]


def test_a_rank_that_has_not_come_is_named_with_its_place():
    # rank 0 broadcasts: for rank 1, which receives, it is over
    assert told(recorded("sleeps")) == [
        "rank 0 waits in broadcast #3 (float32 [4]) of group 0",
        "rank 2 has not reached it: its last was all_reduce #2, completed; it is in train.py:72 in step",
    ]


def test_a_rank_that_has_ended_is_named():
    zero, one, _ = recorded("sleeps")
    assert told([zero, one, at(2, None, ended=True)])[1:] == ["rank 2 has not reached it: it has ended"]


def test_of_a_rank_that_tells_nothing_nothing_is_claimed():
    zero, one, _ = recorded("sleeps")
    silent = told([zero, one, at(2, None)])
    assert silent == told([zero, one]) == ["rank 0 waits in broadcast #3 (float32 [4]) of group 0"]


def test_ranks_that_call_different_things_under_one_number_are_told():
    assert told(recorded("mismatched")) == [
        "the ranks disagree about collective #3 of group 0: "
        "ranks 0,2 called all_reduce (float32 [4]); rank 1 called broadcast (float32 [4])"
    ]


def test_a_missing_rank_of_a_subgroup_is_named():
    assert told(recorded("subgroup"))[-2:] == [
        "rank 0 waits in all_reduce #1 (float32 [4]) of group 1 (ranks 0-1)",
        "rank 1 has not reached it: it has called none of this group; it is in train.py:71 in step",
    ]


def test_groups_that_wait_for_each_other_are_a_deadlock():
    assert told(recorded("two_groups"))[0] == (
        "deadlock: each waits for the next: "
        "rank 0 for rank 1 in group 1, rank 1 for rank 2 in group 2, rank 2 for rank 0 in group 0"
    )


def test_where_others_exchange_messages_gloo_tells_only_who_waits_for_them():
    assert told(recorded("point_to_point")) == [
        "rank 2 waits in barrier #3 of group 0",
        "rank 0 has not reached it: its last was all_reduce #2, completed; it is in train.py:70 in step",
        "rank 1 has not reached it: its last was all_reduce #2, completed; it is in train.py:71 in step",
    ]


def call(
    number: int, operation: str = "all_reduce", size: int = 4, *, done: bool = False, is_p2p: bool = False
) -> Call:
    sizes = f"float32 [{size}]"
    return Call(number=number, operation=operation, inputs=sizes, outputs=sizes, done=done, is_p2p=is_p2p)


def group(*calls: Call, name: str = "0", members: str = "0-1") -> Group:
    return Group(name=name, members=members, calls=calls)


def test_sizes_are_compared_where_all_ranks_have_to_have_the_same():
    def of(operation: str) -> list[str]:
        return told([at(0, (group(call(7, operation, 4)),)), at(1, (group(call(7, operation, 5)),))])

    assert of("all_reduce") == [
        "the ranks disagree about collective #7 of group 0: "
        "rank 0 called all_reduce (float32 [4]); rank 1 called all_reduce (float32 [5])"
    ]
    assert of("gather") == ["ranks 0-1 wait in gather #7 (float32 [4]) of group 0"]


def test_many_ranks_at_one_place_are_one_line():
    here = replace(at(1, (group(call(1, done=True)),)), rank=1)
    samples = [at(0, (group(call(1, done=True), call(2), members="0-2"),)), here, replace(here, rank=2)]
    assert told(samples)[1:] == [
        "ranks 1-2 have not reached it: their last was all_reduce #1, completed; they are in train.py:71 in step"
    ]


def test_messages_that_nccl_records_are_told():
    samples = [at(0, (group(call(3, "recv 0<-1", is_p2p=True)),)), at(1, (group(),))]
    assert told(samples) == ["rank 0 waits in recv 0<-1 #3 (float32 [4]) of group 0"]


def test_where_nobody_waits_nothing_is_told():
    assert told([at(0, (group(call(1, done=True)),)), at(1, ()), at(2, None)]) == []


def test_members_are_read_and_what_is_none_is_left_out():
    text = "0 0-2\ntp 0,1\nbad 0,x\n\n a b 2\nhuge 0-123456789"
    assert parse_members(text) == {"0": "0-2", "tp": "0,1", " a b": "2"}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["pg_status", "entries", "pg_id", "profiling_name", "collective_seq_id", "input_sizes", "input_dtypes"]
            )
            | st.text(max_size=3),
            inner,
            max_size=6,
        )
    ),
)


@given(JSON, JSON)
def test_no_answer_is_too_strange(answer, entry):
    parse(json.dumps(answer).encode(), {})
    entry = {**entry, "profiling_name": "x", "collective_seq_id": 1} if isinstance(entry, dict) else entry
    found = parse(json.dumps({"entries": [entry], "pg_status": answer}).encode(), {})
    explain([at(0, tuple(found))], "")


@pytest.mark.parametrize("body", [b"", b"[" * 100_000, b"\xff", b"{}"], ids=["none", "deep", "no text", "empty"])
def test_what_is_no_answer_tells_nothing(body):
    assert parse(body, {}) == []
