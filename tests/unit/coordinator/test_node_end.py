"""How workers ended is told to another node: nothing changes on the way but the clock, and nothing is too long for it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from ddplaunch.launcher.job.messages import encode, fitted, for_coordinator, on_our_clock
from ddplaunch.launcher.job.orders import NodeEnd
from ddplaunch.reach.channel.handshake import LIMIT
from ddplaunch.spec.outcome import Frame, Traces, WorkerError, WorkerExit

END = WorkerExit(
    rank=3,
    local_rank=1,
    host="a",
    pid=4711,
    device="cuda:1",
    code=1,
    signal=None,
    at=50.0,
    seconds=7.5,
    stopped_with=15,
    stopped_at=49.5,
    core_dumped=True,
    peak_rss=1 << 40,
    cpu_seconds=3.5,
    error=WorkerError(
        type="ValueError",
        message="boom",
        traceback="Traceback\n",
        frames=(Frame(file="train.py", line=88, function="step", source="loss = f(x)"),),
        at=49.0,
    ),
    stderr_tail="last words",
    log="/logs/rank-3.err",
)


def travel(*ends: WorkerExit, offset: float = 0.0) -> tuple[WorkerExit, ...]:
    """What arrives of these ends, through bytes and back."""
    payload = encode(fitted(NodeEnd(0, ends, None, (), Traces(oom_kills=0, shm=None, log_folder=None))))
    assert len(payload) < LIMIT
    arrived = for_coordinator(payload)
    assert isinstance(arrived, NodeEnd)
    return on_our_clock(arrived, "a", offset).exits


def test_an_end_arrives_as_it_was() -> None:
    assert travel(END) == (END,)


def test_every_time_is_moved_to_the_readers_clock() -> None:
    (end,) = travel(END, offset=1000.0)
    assert end.error is not None
    assert (end.at, end.stopped_at, end.error.at, end.seconds) == (1050.0, 1049.5, 1049.0, 7.5)


def test_no_node_says_on_which_host_its_workers_were() -> None:
    (end,) = travel(replace(END, host="another"))
    assert end.host == "a"


def test_ends_arrive_in_the_order_of_the_failures() -> None:
    later, earlier = replace(END, rank=1, error=None, at=60.0), replace(END, rank=2, error=None, at=40.0)
    assert [end.rank for end in travel(later, earlier)] == [2, 1]


def test_only_the_first_failures_travel_with_all_they_said() -> None:
    """A hundred workers that all raise do not fill the channel; who merely follows still shows as such."""
    ends = [replace(END, rank=rank, at=50.0 + rank, stopped_with=None, stopped_at=None) for rank in range(100)]
    arrived = travel(*ends)
    whole = [end.rank for end in arrived if end.error is not None and end.error.traceback]
    assert whole == [0, 1, 2, 3]
    assert all(end.error is not None and end.error.message == "boom" for end in arrived)


def test_those_that_ended_well_say_nothing() -> None:
    (end,) = travel(replace(END, code=0, error=None))
    assert end.stderr_tail == ""


def test_a_worker_that_failed_by_itself_is_told_whole_even_if_five_were_stopped_before_it() -> None:
    stopped = [replace(END, rank=rank, at=1.0 + rank, error=None) for rank in range(5)]
    own = replace(END, rank=9, at=90.0, stopped_with=None, stopped_at=None)
    (found,) = [end for end in travel(*stopped, own) if end.rank == 9]
    assert found == own


@given(st.text(alphabet=st.characters(), max_size=300), st.integers(1, 400))
def test_whatever_a_worker_says_fits_and_can_be_read(text: str, times: int) -> None:
    """Also what is no text, as lone surrogates: JSON could not carry it."""
    error = WorkerError(
        type=text * times,
        message=text * times,
        traceback=text * times,
        frames=tuple(Frame(file=text * 9, line=times - 200, function=text * 9, source=text * 9) for _ in range(times)),
        at=1e300,
    )
    ends = [replace(END, rank=rank, error=error, stderr_tail=text * times, log=text * 9) for rank in range(8)]
    arrived = travel(*ends)
    assert len(arrived) == 8
    assert all(end.error is not None and end.error.at is None for end in arrived)


@pytest.mark.parametrize("number", [-1, 1 << 31, 1 << 40, 10**30])
def test_a_line_number_that_no_file_has_is_put_right_before_it_is_sent(number: int) -> None:
    """A program may write anything into its error file, and its node is not to be expelled for it."""
    error = replace(END.error, frames=(Frame(file="a.py", line=number, function="f"),)) if END.error else None
    (end,) = travel(replace(END, error=error))
    assert end.error is not None
    assert end.error.frames[0].line in (0, 2**31 - 1)


@given(st.text(max_size=30))
def test_no_path_no_device_and_no_host_is_too_odd_to_be_sent(text: str) -> None:
    (end,) = travel(replace(END, log=text, device=text, host=text))
    assert end.log is not None
    assert len(end.log) == len(text)


def test_even_what_takes_the_most_room_fits() -> None:
    """A control character is one character in a line and six in JSON."""
    frames = tuple(Frame(file="\1" * 2000, line=1, function="\1" * 2000, source="\1" * 2000) for _ in range(200))
    error = WorkerError(type="\1" * 2000, message="\1" * 50_000, traceback="\1" * 50_000, frames=frames)
    arrived = travel(*(replace(END, rank=rank, error=error, stderr_tail="\1" * 50_000) for rank in range(64)))
    assert len(arrived) == 64
