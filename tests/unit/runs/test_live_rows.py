"""What the rows of --live say of a job: its own row, those of the ranks that differ, and that of all others."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from rich.cells import cell_len

from ddplaunch.reach.pipes import MESSAGE, STDERR
from ddplaunch.record.run_socket import SocketPath
from ddplaunch.record.seen.collectives import Wait
from ddplaunch.record.window.questions import NoAnswer, NodeStatus, WorkerStatus
from ddplaunch.record.window.requests import NodeReply, Run
from ddplaunch.spec.outcome import Progress
from ddplaunch.tools.runs.client import RunReplies
from ddplaunch.tools.runs.live import ConfirmedWaits, LiveRows, replies_with
from tests.unit.runs.test_find import RUN, WORKER

FRESH = replace(RUN, restarts=0, seconds=60.0)


def worker(rank: int, **changed: object) -> WorkerStatus:
    return replace(WORKER, **{"rank": rank, "pid": 100 + rank, "quiet": 1.0, **changed})


def replies(*workers: WorkerStatus, run: Run | None = FRESH, problem: str = "") -> RunReplies:
    return RunReplies(SocketPath("/runs/run", "socket"), run, [NodeReply(0, "gpu01", NodeStatus(workers))], problem)


def at_step(step: int, total: int | None = 1000, **changed: object) -> Progress:
    return replace(Progress(step=step, total=total), **changed)


def rows(*looks: RunReplies, width: int = 200, height: int = 10, waits: tuple[Wait, ...] = ()) -> list[str]:
    """The rows after looks that were 10 seconds apart."""
    made = LiveRows()
    for number, look in enumerate(looks):
        made.on_replies(look, 10.0 * number)
    made.show_waits(waits)
    return [row.plain for row in made.render(10.0 * (len(looks) - 1), width, height)]


def test_the_row_of_the_job_says_how_far_it_is_and_the_next_what_all_ranks_do() -> None:
    looks = (
        [worker(rank, progress=at_step(step, metrics=(("loss", "0.4"),))) for rank in range(3)] for step in (100, 120)
    )
    head, rest = rows(*(replies(*look) for look in looks))
    assert head == "run  1 min  step 120 of 1,000 (12%)  7 min 20 s left  2 steps/s  loss 0.4  CPU 0%  memory 9 GiB"
    assert rest == "all 3: running, step 120"


def test_a_job_that_stands_still_says_so_as_it_has_said() -> None:
    head, _ = rows(replies(worker(0), worker(1), run=replace(FRESH, idle_for=159.0, idle_why="rank 1 waits")))
    assert head.startswith("run  stands still for 2 min 39 s  1 min")
    stopping = rows(replies(worker(0), run=replace(FRESH, phase="stopping", idle_for=159.0)))
    assert "stands still" not in stopping[0]


def test_of_two_ranks_one_that_prints_nothing_is_no_odd_one() -> None:
    """In most scripts rank 0 alone prints."""
    assert rows(replies(worker(0), worker(1, quiet=23.0)))[1:] == ["all 2: running"]
    quiet = rows(replies(worker(0), worker(1), worker(2, quiet=23.0)))[1:]
    assert quiet == ["rank 2 on gpu01: quiet for 23 s", "2 more: running"]


def test_a_node_that_waits_as_a_spare_has_no_row_and_hides_no_rank() -> None:
    spare = NodeReply(None, "gpu02", NodeStatus((worker(0, pid=0, state="waiting"), worker(7, pid=0, state="waiting"))))
    found = replies(worker(0), worker(1))
    found.nodes = [spare, *found.nodes]
    assert rows(found, found)[1:] == ["all 2: running"]


def test_gpus_are_shown_as_their_mean_and_the_rank_that_uses_most_of_their_memory_by_that() -> None:
    workers = [worker(rank, gpu=90 + rank, gpu_memory=(rank + 1) << 30) for rank in range(3)]
    head, different, _ = rows(replies(*workers))
    assert "GPU 91%  GPU memory 6 GiB  memory 9 GiB" in head
    assert different == "rank 2 on gpu01: GPU memory 3 GiB, others 2 GiB"


def test_where_no_script_and_no_bar_tells_the_step_the_collectives_do() -> None:
    look = replies(worker(0), run=replace(FRESH, steps=1240, steps_per_second=3.2))
    assert rows(look)[0].startswith("run  1 min  about step 1,240  3.2 steps/s  CPU")


def test_what_a_script_says_comes_before_a_trainer_and_that_before_a_bar() -> None:
    sources = ["bar", "trainer", "script"]
    told = [worker(rank, progress=at_step(10 * rank, source=source)) for rank, source in enumerate(sources)]
    assert "  step 20 of 1,000 " in rows(replies(*told))[0]
    assert "  step 10 of 1,000 " in rows(replies(*told[:2]))[0]
    assert "  bar 0 of 1,000 " in rows(replies(*told[:1]))[0]


def test_before_anything_is_known_there_is_no_row() -> None:
    assert LiveRows().render(0.0, 80, 10) == []


def test_facts_for_which_there_is_no_room_are_left_out_those_that_matter_most_stay() -> None:
    look = replies(worker(0, progress=at_step(10)))
    assert rows(look, width=40)[0] == "run  1 min  step 10 of 1,000 (1%)"
    assert rows(look, width=20)[0] == "run  1 min  CPU 95%"
    assert rows(look, width=4)[0] == "run"


@pytest.mark.parametrize(
    ("different", "text"),
    [
        ({"state": "ended", "how": "killed by SIGKILL"}, "killed by SIGKILL"),
        ({"state": "suspended"}, "suspended"),
        ({"state": "waiting", "pid": 0, "quiet": None}, "not started yet"),
        ({"quiet": 70.0, "last": "epoch 3"}, "quiet for 1 min 10 s: epoch 3"),
        ({"cpu_seconds": 1.0}, "idle: 1% of a core, others 95%"),
        ({"rss": 9 << 30}, "memory 9 GiB, others 3 GiB"),
        ({"progress": at_step(40)}, "10 steps behind"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_rank_that_differs_has_a_row_and_says_how(different: dict[str, object], text: str) -> None:
    others = [worker(rank, progress=at_step(50)) for rank in range(3)]
    shown = rows(replies(*others, worker(3, **{"progress": at_step(50), **different})))
    assert shown[1] == f"rank 3 on gpu01: {text}"
    assert shown[2].startswith("3 more: running, step 50")
    assert len(shown) == 3


def test_ranks_that_differ_in_the_same_way_share_a_row_and_most_matters_first() -> None:
    slow = [worker(rank, progress=at_step(40)) for rank in (0, 1, 5)]
    fast = [worker(rank, progress=at_step(50)) for rank in (2, 3, 4, 6)]
    dead = worker(7, state="ended", how="exit status 3")
    assert rows(replies(*slow, *fast, dead))[1:3] == [
        "rank 7 on gpu01: exit status 3",
        "ranks 0-1,5 on gpu01: 10 steps behind",
    ]


def test_no_more_than_eight_ranks_have_rows_and_no_more_rows_are_made_than_there_is_room_for() -> None:
    look = replies(*(worker(rank, progress=at_step(1000 - rank * 3)) for rank in range(256)))
    assert len(rows(look)) == 10
    assert len(rows(look, height=4)) == 4
    assert rows(look, height=4)[-1].endswith("step 619-1,000")
    assert len(rows(look, height=1)) == 1


def test_a_job_whose_ranks_are_all_alike_in_what_is_unusual_is_one_row() -> None:
    starts = rows(replies(*(worker(rank, state="waiting", pid=0) for rank in range(256))))
    assert starts[1:] == ["all 256: waiting"]


def test_who_waits_in_which_collective_is_said_and_who_has_not_reached_it() -> None:
    wait = Wait(name="0", operation="all_reduce", number=412, waiting=(0, 1, 3), missing=(2,))
    look = replies(*(worker(rank, quiet=40.0) for rank in range(4)))
    shown = rows(look, look, look, waits=(wait,))
    assert shown[1] == "rank 2 on gpu01: has not reached all_reduce #412, in which ranks 0-1,3 wait"
    assert shown[2] == "3 more: in all_reduce #412, quiet for 40 s"


def test_a_job_stands_once_no_rank_has_written_or_made_a_step_for_a_while_and_what_it_waited_in_is_then_forgotten() -> (
    None
):
    made = LiveRows()
    made.on_replies(replies(worker(0, written=5)), 0.0)
    made.on_replies(replies(worker(0, written=5)), 9.0)
    assert not made.lacks_signs_of_life(9.0)
    assert made.lacks_signs_of_life(10.0)
    made.show_waits([Wait(name="0", operation="all_reduce", number=1, waiting=(0,), missing=())])
    made.on_replies(replies(worker(0, written=6)), 11.0)
    assert not made.lacks_signs_of_life(11.0)
    assert "all_reduce" not in made.render(11.0, 100, 10)[1].plain


def test_a_job_that_makes_no_step_any_more_says_for_how_long_in_place_of_its_speed() -> None:
    looks = [
        replies(worker(0, progress=at_step(step, age=age))) for step, age in ((10, 0), (50, 0), (50, 10), (50, 20))
    ]
    assert "4 steps/s" in rows(*looks[:2])[0]
    head = rows(*looks)[0]
    assert "step 50 of 1,000 (5%)  no step for 20 s" in head
    assert "steps/s" not in head
    assert "left" not in head


def test_after_a_restart_steps_are_counted_from_where_it_goes_on() -> None:
    looks = [replies(worker(0, progress=at_step(step))) for step in (500, 600, 300, 310)]
    assert "1 steps/s" in rows(*looks)[0]


def test_an_agent_that_does_not_answer_leaves_what_was_known_and_is_named() -> None:
    shown = rows(replies(worker(0)), RunReplies(SocketPath("/runs/run", "socket"), problem="its agent is stopped"))
    assert shown[0].startswith("run  1 min")
    assert shown[1] == "its agent is stopped"


def test_a_node_that_does_not_answer_is_named() -> None:
    made = replies(worker(0))
    made.nodes = [*made.nodes, NodeReply(1, "gpu02", NoAnswer("has not answered within 0.5 s"))]
    assert rows(made)[1] == "node 1 (gpu02) has not answered within 0.5 s"


@given(
    st.lists(st.text(st.characters() | st.sampled_from("訓\x1b\n\t"), max_size=90), max_size=12),
    st.integers(1, 120),
    st.integers(1, 12),
)
def test_whatever_workers_write_a_row_is_one_line_of_printable_text_that_fits(
    last: list[str], width: int, height: int
) -> None:
    workers = [worker(rank, last=text, quiet=10.0**rank, how=text) for rank, text in enumerate(last)]
    shown = rows(replies(*workers), width=width, height=height)
    assert len(shown) <= height
    for row in shown:
        assert cell_len(row) <= width
        assert not re.search(r"[\x00-\x1f\x7f-\x9f]", row)


@given(st.text(st.characters(codec=None), max_size=100).map(lambda text: text * 1000))
def test_a_snapshot_arrives_whole_in_messages_that_are_not_too_long(written: str) -> None:
    messages = replies_with(STDERR, written)
    assert all(message[:1] == STDERR and len(message) <= 1 + MESSAGE for message in messages)
    assert b"".join(message[1:] for message in messages) == written.encode(errors="replace")


def wait_of(group: str) -> Wait:
    return Wait(name=group, operation="all_reduce", number=1, waiting=(0,), missing=(1,))


def test_a_wait_is_shown_once_two_questions_have_found_it_also_beside_another_one():
    confirmation, first, later = ConfirmedWaits(), wait_of("0"), wait_of("1")
    found = ([first], [first], [first, later], [first, later])
    assert [confirmation.on_found(waits, 10.0 * at) for at, waits in enumerate(found)] == [
        [],
        [first],
        [first],
        [first, later],
    ]


def test_ranks_that_are_only_slow_are_asked_about_more_and_more_seldom():
    confirmation, now, pauses = ConfirmedWaits(), 100.0, []
    for number in range(6):
        assert confirmation.on_found([wait_of(str(number))], now) == []
        pauses.append(confirmation.ask_at - now)
        now = confirmation.ask_at
    assert pauses == [2.0, 20.0, 2.0, 40.0, 2.0, 80.0]
