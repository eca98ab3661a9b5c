"""What the report of a hang leads with, and what that of a failure says of the others."""

import pytest
from msgspec.structs import replace

from ddplaunch.record.seen import NOT_BEGUN, Call, Group, Sample, Thread
from ddplaunch.record.seen.collectives import describe, describe_end
from ddplaunch.record.seen.merge import is_waiting
from ddplaunch.spec.outcome import Frame

C10D = "/env/lib/python3.12/site-packages/torch/distributed/distributed_c10d.py"
OWN = Frame(file="/home/me/train.py", line=88, function="step")
WAITING = (Frame(file=C10D, line=2864, function="broadcast"), OWN)


def at(rank: int, *frames: Frame, calls: tuple[Call, ...] | None = None, ended: bool = False) -> Sample:
    groups = None if calls is None else (Group(name="0", members="0-2", calls=calls),)
    return Sample(rank=rank, pid=1, threads=(Thread(frames=frames, is_main=True),), groups=groups, ended=ended)


def call(number: int, operation: str = "broadcast", *, done: bool = False) -> Call:
    return Call(number=number, operation=operation, inputs="float32 [4]", outputs="", done=done)


IN_IT = tuple(at(rank, *WAITING, calls=(call(2),)) for rank in (0, 1))


def test_the_rank_that_has_not_come_to_the_collective_is_named_first():
    found = describe([*IN_IT, at(2, replace(OWN, line=71), calls=(call(1, done=True),))], "/home/me")
    assert found.explanation == "rank 2 has not reached broadcast #2 (float32 [4]) of group 0, in which ranks 0-1 wait"
    assert found.locations[:3] == (
        "rank 2: train.py:71 in step",
        "ranks 0-1: broadcast, train.py:88 in step",
        "ranks 0-1 wait in broadcast #2 (float32 [4]) of group 0",
    )
    assert found.awaited == (2,)


def test_a_rank_that_has_ended_is_one_that_does_not_come():
    found = describe([*IN_IT, at(2, ended=True)], "/home/me")
    assert found.explanation.startswith("rank 2 has not reached broadcast #2")
    assert found.locations[0] == "ranks 0-1: broadcast, train.py:88 in step"
    assert "it has ended" in found.locations[-1]


def test_where_torch_records_nothing_the_stacks_show_who_is_in_a_collective():
    found = describe([at(0, *WAITING), at(1, *WAITING), at(2, replace(OWN, line=71))], "/home/me")
    assert found.explanation == "rank 2 is in no collective, ranks 0-1 wait in one"
    assert found.locations == ("rank 2: train.py:71 in step", "ranks 0-1: broadcast, train.py:88 in step")
    assert found.awaited == (2,)


def test_ranks_that_disagree_are_what_is_wrong():
    mixed = [at(0, *WAITING, calls=(call(2),)), at(1, *WAITING, calls=(call(2, "all_reduce"),)), IN_IT[0]]
    found = describe([replace(one, rank=rank) for rank, one in enumerate(mixed)], "/home/me")
    assert found.explanation.startswith("the ranks disagree about collective #2 of group 0: ")


@pytest.mark.parametrize("samples", [[], [at(0, OWN), at(1, OWN)]], ids=["nobody answered", "none is in a collective"])
def test_nothing_is_guessed(samples: list[Sample]):
    assert describe(samples, "/home/me").explanation == ""


@pytest.mark.parametrize(
    ("sample", "waits"),
    [
        (at(0, *WAITING), True),
        (at(0, OWN, calls=(call(1),)), True),  # the GPU waits, and the CPU for the GPU
        (at(0, OWN, calls=(call(1, done=True),)), False),
        (at(0, OWN, Frame(file=C10D, line=9, function="wrapper")), False),  # something that torch has called
        (at(0), False),
    ],
)
def test_who_waits_in_a_collective_is_describe_by_the_innermost_frame_or_the_recorder(sample: Sample, waits: bool):
    assert is_waiting(sample) is waits


def at_the_end(*samples: Sample) -> tuple[str, ...]:
    return describe_end(samples, "/home/me", of_hang=False).locations


def test_after_a_failure_those_in_a_collective_are_named_once_with_its_number_and_their_place():
    assert at_the_end(*IN_IT, at(2, ended=True)) == (
        "ranks 0-1 wait in broadcast #2 (float32 [4]) of group 0, train.py:88 in step",
    )


def test_after_a_failure_those_in_no_collective_are_named_too_wherever_they_are():
    loading = Frame(file="/home/me/data.py", line=3, function="load")
    assert at_the_end(at(1, loading, calls=()), at(2, loading, OWN), at(3, OWN)) == (
        "ranks 1-2 were in data.py:3 in load",
        "rank 3 was in train.py:88 in step",
    )


def test_of_ranks_that_failed_too_it_is_not_said_where_they_were():
    samples = (at(0, OWN), replace(at(1), state="no Python, or it has not begun to run its program"), at(2, OWN))
    found = describe_end(samples, "/home/me", of_hang=False, ended={1, 2})
    assert found.locations == ("rank 0 was in train.py:88 in step",)


def test_after_a_stop_the_rank_for_which_others_wait_is_named():
    samples = [*IN_IT, at(2, replace(OWN, line=71), calls=(call(1, done=True),))]
    found = describe_end(samples, "/home/me", of_hang=False)
    assert found.explanation == describe(samples, "/home/me").explanation != ""


def test_of_a_rank_that_has_no_frame_any_more_nothing_is_said():
    assert at_the_end(at(1)) == ()
    assert at_the_end(replace(at(1), state=NOT_BEGUN)) == ()
    assert at_the_end(replace(at(1), state=f"{NOT_BEGUN}, in nfs_wait (read)")) != ()


def test_what_is_known_in_place_of_a_stack_is_said_as_it_is():
    over = "its script has ended, and Python waits for a thread: train.py:3 in upload"
    silent = "it does not answer, in nfs_wait (read)"
    assert at_the_end(replace(at(0, OWN), state=over), replace(at(1), state=silent), replace(at(2), state=silent)) == (
        f"rank 0: {over}",
        f"ranks 1-2: {silent}",
    )


def test_many_places_are_not_a_page():
    found = at_the_end(*(at(rank, replace(OWN, line=rank)) for rank in range(40)))
    assert len(found) == 17
    assert found[-1] == "ranks 16-39 were elsewhere"
