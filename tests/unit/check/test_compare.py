"""What `ddplaunch check` finds in what ranks did: made-up traces go in, sentences come out."""

from ddplaunch.spec.outcome import Frame
from ddplaunch.tools.check.compare import compare
from ddplaunch.tools.check.notes import Call, Group, Trace

WORLD = Group(members=tuple(range(8)))


def called(operation="all_reduce", inputs="float32 [4]", *, group="0", step=1, line=88, **more):
    frames = (
        Frame(file="/usr/lib/python3.12/site-packages/torch/distributed/distributed_c10d.py", line=3, function="f"),
        Frame(file="/home/me/train.py", line=line, function="train"),
    )
    return Call(operation=operation, inputs=inputs, group=group, step=step, frames=frames, **more)


def trace(rank, *calls, end="steps", steps=3, **groups):
    others = {name.removeprefix("group"): Group(members=members) for name, members in groups.items()}
    return Trace(rank=rank, calls=calls, end=end, steps=steps, groups={"0": WORLD, **others})


def found(*traces):
    return [mismatch.text for mismatch in compare(traces, "/home/me").mismatches]


def test_ranks_that_ask_for_the_same_agree():
    compared = compare([trace(rank, *[called()] * 5) for rank in (0, 1, 7)], "/")
    assert (compared.mismatches, compared.calls, compared.groups) == ((), 5, 1)


def test_another_operation_shape_root_or_group_is_a_mismatch():
    same = called()
    assert found(trace(0, same, called()), trace(1, same, called()), trace(7, same, called("broadcast", peer=0))) == [
        "step 1: ranks 0-1 call all_reduce (float32 [4]), rank 7 calls broadcast (float32 [4], rank 0): train.py:88 in train"
    ]
    assert found(trace(0, called()), trace(7, called(inputs="float32 [5]", line=90))) == [
        "step 1: rank 0 calls all_reduce (float32 [4]) at train.py:88 in train, "
        "rank 7 calls all_reduce (float32 [5]) at train.py:90 in train"
    ]
    assert found(trace(0, called("broadcast", peer=0)), trace(7, called("broadcast", peer=1)))
    assert found(trace(0, called("all_gather", outputs="a")), trace(7, called("all_gather", outputs="b")))
    assert found(
        trace(0, called("new_group", "", members="0-1")), trace(7, called("new_group", "", members="2-3"))
    ) == ["step 1: rank 0 calls new_group (ranks 0-1), rank 7 calls new_group (ranks 2-3): train.py:88 in train"]


def test_sizes_of_all_to_all_may_differ_and_types_may_not():
    def each(inputs):
        return called("all_to_all_single", inputs)

    assert not found(trace(0, each("int64 [4]")), trace(1, each("int64 [9]")))
    assert not found(trace(0, each("2 x int64 [4]")), trace(1, each("int64 [4], int64 [5]")))
    assert found(trace(0, each("int64 [4]")), trace(1, each("float32 [4]")))


def test_a_rank_that_ends_or_steps_without_a_call_that_others_make_is_named():
    many = [called(), called(step=2)]
    assert found(trace(0, *many), trace(7, called(), end="ended", steps=1)) == [
        "step 2: rank 0 calls all_reduce (float32 [4]), rank 7 ends after step 1: train.py:88 in train"
    ]
    assert found(trace(0, *many), trace(7, called(), steps=3))[0].startswith("step 2: rank 0 calls all_reduce")
    # what comes after a save, an error or a deadline is not known
    for end in ("saves", "calls", "raised", "failed", "late"):
        assert found(trace(0, *many), trace(7, called(), end=end)) == []
    assert found(trace(0, *many), trace(1, called(), called("barrier", "")), trace(7, end="saves"))


def test_groups_are_compared_among_their_members_only():
    def of(rank, members, *calls):
        return trace(rank, *calls, called(), group1=members)

    low, high = (0, 1, 2, 3), (4, 5, 6, 7)
    first, other = called(group="1"), called("barrier", "", group="1")
    agree = [of(0, low, first), of(1, low, first), of(4, high, other), of(5, high, other)]
    assert found(*agree) == []
    compared = compare([*agree[:3]], "/")
    assert compared.uncompared == (high,)
    assert found(*agree[:3], of(5, high, first)) == [
        "step 1: in group 1 (ranks 4-7), rank 4 calls barrier, rank 5 calls all_reduce (float32 [4]): train.py:88 in train"
    ]


def test_groups_that_are_used_in_another_order_are_a_deadlock():
    first, second = called(group="1", line=1), called(group="2", line=2)
    groups = {"group1": (0, 1, 7), "group2": (0, 7)}
    assert found(trace(0, first, second, **groups), trace(7, second, first, **groups)) == [
        "step 1: rank 0 calls all_reduce (float32 [4]) of group 1 (ranks 0-1,7) at train.py:1 in train, "
        "rank 7 calls all_reduce (float32 [4]) of group 2 (ranks 0,7) at train.py:2 in train"
    ]


def test_sends_and_receives_between_checked_ranks_are_paired():
    def sends(inputs="int8 [2]", peer=7, **more):
        return called("send", inputs, peer=peer, **more)

    def receives(outputs="int8 [2]", peer=0, **more):
        return called("recv", "", outputs=outputs, peer=peer, **more)

    assert not found(trace(0, sends(), sends(peer=5)), trace(7, receives()))
    assert not found(trace(0, sends(), sends(tag=1)), trace(7, receives(tag=1), receives()))
    assert not found(trace(0, sends()), trace(7, called("recv_any_source", "", outputs="int8 [9]")))
    assert not found(trace(0, sends()), trace(7, end="late"))
    assert found(trace(0, sends(), sends()), trace(7, receives())) == [
        "step 1: rank 0 sends int8 [2] to rank 7, rank 7 receives no more from rank 0: train.py:88 in train"
    ]
    assert found(trace(0, sends()), trace(7, receives("int8 [3]"))) == [
        "step 1: rank 0 sends int8 [2] to rank 7, rank 7 receives int8 [3] from rank 0: train.py:88 in train"
    ]


def test_hundreds_of_ranks_and_calls_are_compared_at_once():
    traces = [trace(rank, *[called(step=step) for step in range(1, 200)]) for rank in range(8)]
    assert compare(traces, "/").calls == 199
