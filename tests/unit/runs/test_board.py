"""What `ddplaunch top` shows of what a job replies, and what its keys do."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from ddplaunch.record.run_socket import SocketPath
from ddplaunch.record.window.questions import NoAnswer, NodeStatus, WorkerStatus
from ddplaunch.record.window.requests import NodeReply
from ddplaunch.tools.runs.board import Board
from ddplaunch.tools.runs.client import RunReplies
from tests.unit.runs.test_find import RUN, WORKER

KEYS = ("up", "down", "page up", "page down", "home", "end", "<", ">", "r", "x")


def worker(rank: int, **changed: object) -> WorkerStatus:
    return replace(WORKER, rank=rank, pid=100 + rank, **changed)


def replies(*workers: WorkerStatus, problem: str = "") -> RunReplies:
    """Two nodes, of which the first has all workers and the second does not answer if there is a problem."""
    answer = NoAnswer("has not answered within 0.5 s") if problem else NodeStatus(())
    nodes = (NodeReply(0, "gpu01", NodeStatus(workers)), NodeReply(1, "gpu02", answer))
    return RunReplies(SocketPath("/runs/run", "socket"), RUN, nodes, "")


def board(*workers: WorkerStatus) -> Board:
    made = Board()
    made.on_replies(replies(*workers), 10.0)
    return made


def shown(board: Board, width: int = 120, height: int = 10) -> list[str]:
    return [text.plain.rstrip() for text in board.lines(width, height)]


def test_cpu_and_output_are_those_since_the_look_before() -> None:
    made = board(worker(0, cpu_seconds=50.0, written=1000))
    assert "95%" not in shown(made)[2]
    assert "50%" in shown(made)[2]  # since its start
    made.on_replies(replies(worker(0, cpu_seconds=50.2, written=3048, last="epoch 1")), 12.0)
    row = shown(made)[2]
    assert "10%" in row
    assert "1 KiB/s" in row
    assert row.endswith("epoch 1")


def test_the_workers_that_a_spare_would_have_are_no_rows() -> None:
    found = replies(worker(0))
    found.nodes = [NodeReply(None, "gpu03", NodeStatus((worker(0, state="waiting"),))), *found.nodes]
    made = Board()
    made.on_replies(found, 10.0)
    assert [row.split()[:2] for row in shown(made)[2:] if row.strip()][:-1] == [["0", "gpu01"]]


def test_a_restarted_worker_and_one_that_has_ended_are_compared_with_nothing() -> None:
    made = board(worker(0, cpu_seconds=50.0, written=1000), worker(1))
    fresh = replace(worker(0, cpu_seconds=1.0, seconds=10.0), pid=900)
    made.on_replies(replies(fresh, worker(1, state="ended", how="exit status 3")), 12.0)
    first, second = shown(made)[2:4]
    assert "10%" in first
    assert "/s" not in first
    assert "exit status 3" in second
    assert "%" not in second


def test_the_selected_worker_stays_selected_and_in_sight_whatever_the_order() -> None:
    made = board(*(worker(rank, rss=rank << 20) for rank in range(100)))
    made.on_key("end")
    assert made.selected == 99
    assert shown(made)[-2].split()[0] == "99"
    while "memory" not in made.sort_column.name:
        made.on_key(">")
    assert shown(made)[2].split()[0] == "99"  # the largest first
    made.on_key("r")
    assert made.selected == 99
    assert shown(made)[-2].split()[0] == "99"
    made.on_key("home")
    assert made.selected == 0


def test_nodes_that_do_not_answer_are_named_and_columns_go_where_there_is_no_room() -> None:
    made = Board()
    made.on_replies(replies(worker(0, last="x" * 500), problem="silent"), 1.0)
    lines = shown(made)
    assert any("gpu02" in text and "has not answered" in text for text in lines)
    assert "host" in lines[2]
    narrow = shown(made, width=40)
    assert "host" not in narrow[2]
    assert "state" in narrow[2]


@given(
    st.lists(st.tuples(st.integers(0, 40), st.text(max_size=30), st.sampled_from(["running", "ended", "waiting"]))),
    st.lists(st.sampled_from(KEYS), max_size=12),
    st.integers(1, 200),
    st.integers(1, 30),
)
def test_no_line_is_wider_nor_the_whole_higher_than_the_terminal(
    workers: list[tuple[int, str, str]], keys: list[str], width: int, height: int
) -> None:
    made = board(*(worker(rank, last=last, state=state) for rank, last, state in workers))
    for key in keys:
        made.on_key(key)
        lines = made.lines(width, height)
        assert len(lines) <= height
        assert all(text.cell_len <= width and "\n" not in text.plain and "\x1b" not in text.plain for text in lines)


def test_a_question_takes_the_place_of_the_help() -> None:
    made = board(worker(0))
    assert made.lines(80, 10)[-1].plain.startswith("q leave")
    assert made.lines(80, 10, "stop it? y or n")[-1].plain == "stop it? y or n"


@pytest.mark.parametrize("key", KEYS)
def test_a_job_without_workers_has_a_table_without_rows(key: str) -> None:
    made = board()
    made.on_key(key)
    assert made.selected is None
    assert len(shown(made)) == 10


def test_what_the_gpus_do_is_shown_where_nvml_tells_and_can_be_sorted_by() -> None:
    assert "gpu" not in shown(board(worker(0)))[1]
    made = board(worker(0, gpu=7, gpu_memory=1 << 30), worker(1, gpu=93, gpu_memory=70 << 30))
    assert "gpu gpu memory" in shown(made, 160)[1]
    while made.sort_column.name != "gpu":
        made.on_key(">")
    assert [line.split()[0] for line in shown(made, 160)[2:4]] == ["1", "0"]
    assert "93%     70 GiB" in shown(made, 160)[2]
