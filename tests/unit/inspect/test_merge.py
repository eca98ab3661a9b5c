"""Equal stacks are told once, and the program's own frames first."""

from typing import Any

from ddplaunch.record.seen import Sample, Thread
from ddplaunch.record.seen import merge as merging
from ddplaunch.record.seen.merge import merge, where
from ddplaunch.spec.outcome import Frame

SITE = "/venv/lib/python3.11/site-packages/torch"
CWD = "/home/me"


def frame(text: str) -> Frame:
    place, _, function = text.partition(" ")
    file, _, line = place.rpartition(":")
    return Frame(file=file, line=int(line), function=function)


STEP = ["/home/me/train.py:88 train_step", "/home/me/train.py:120 main", "/home/me/train.py:130 <module>"]
REDUCING = [
    f"{SITE}/distributed/distributed_c10d.py:2810 all_reduce",
    f"{SITE}/distributed/c10d_logger.py:83 wrapper",
    *STEP,
]
LOADING = [
    "/usr/lib/python3.11/selectors.py:415 select",
    f"{SITE}/utils/data/dataloader.py:1251 _try_get_data",
    f"{SITE}/utils/data/dataloader.py:701 __next__",
    "/home/me/train.py:71 <module>",
]


def sample(rank: int, stack: list[str], child: str = "", state: str = "", pid: int = 0) -> Sample:
    thread = Thread(frames=tuple(map(frame, stack)), is_main=True)
    return Sample(rank=rank, pid=pid or 100 + rank, child=child, threads=(thread,), state=state)


def short(*samples: Sample) -> list[str]:
    return [f"{group.who}: {where(group.samples[0], CWD)}" for group in merge(samples)]


def lines(*args: Any, **options: Any) -> list[str]:
    return [str(line) for line in merging.lines(*args, **options)]


def test_equal_stacks_are_told_once_and_those_of_many_ranks_first():
    assert short(*(sample(rank, LOADING if rank == 3 else REDUCING) for rank in range(8))) == [
        "ranks 0-2,4-7: all_reduce, train.py:88 in train_step",
        "rank 3: dataloader.__next__, train.py:71",
    ]


def test_a_call_that_no_library_has_made_is_told_by_its_place():
    assert short(sample(0, STEP)) == ["rank 0: train.py:88 in train_step"]


def test_a_stack_without_a_frame_of_the_program_is_told_by_its_innermost_one():
    assert short(sample(0, ["/usr/lib/python3.11/runpy.py:88 _run_code"])) == ["rank 0: runpy.py:88 in _run_code"]
    assert short(sample(0, [])) == ["rank 0: no Python frame"]


def test_what_is_known_instead_of_a_stack_stands_there():
    state = "in uninterruptible sleep, in nfs_wait_on_request (read)"
    assert short(sample(0, [], state=state)) == [f"rank 0: {state}"]


def test_children_stand_behind_the_workers():
    loader = ["/home/me/data.py:7 __getitem__"]
    children = [sample(rank, loader, child="python", pid=pid) for rank in (0, 1) for pid in (1, 2)]
    assert short(*children, sample(0, STEP), sample(1, STEP)) == [
        "ranks 0-1: train.py:88 in train_step",
        "4 children of ranks 0-1: data.py:7 in __getitem__",
    ]


def test_frames_of_libraries_are_folded_below_the_line():
    assert lines(merge([sample(0, REDUCING)]), CWD) == [
        "rank 0: all_reduce, train.py:88 in train_step",
        "  torch/distributed/distributed_c10d.py:2810 in all_reduce (and 1 frame of libraries)",
        "  train.py:88 in train_step",
        "  train.py:120 in main",
        "  train.py:130",
    ]


def test_threads_are_shown_where_asked_for():
    waiting = Thread(frames=(frame("/home/me/data.py:9 fetch"),), name="loader")
    unnamed = Thread(frames=(frame("/home/me/data.py:20 watch"),))
    one = Sample(rank=0, pid=1, threads=(waiting, unnamed, *sample(0, STEP[:1]).threads))
    other = sample(1, STEP[:1])
    assert len(merge([one, other])) == 1
    assert lines(merge([one, other], threads=True), CWD, threads=True) == [
        "rank 0: train.py:88 in train_step",
        "  thread loader",
        "    data.py:9 in fetch",
        "  thread 2 of 2",
        "    data.py:20 in watch",
        "",
        "rank 1: train.py:88 in train_step",
    ]
