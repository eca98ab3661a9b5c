"""The trace of all ranks: what its processes are called, where its arrows lead, and what is left out of our own events."""

import msgspec

from ddplaunch.tools.profile.division import Joined
from ddplaunch.tools.profile.merged import entries
from ddplaunch.tools.profile.recorded import Collective, Event, Recorded, Sample
from tests.recorded import traced

NANOSECONDS = 1_000_000_000


def rank(number: int, arrived: int, ended: int) -> tuple[Recorded, Collective]:
    """A rank whose process is 7, with one collective, and a device."""
    event = Event(ph="X", name="gloo:all_reduce", pid=7, tid=7, ts=float(arrived), dur=float(ended - arrived))
    kernel = Event(ph="X", name="gemm", cat="kernel", pid=0, tid=3, ts=float(arrived), dur=5.0, id=4)
    op = Event(ph="X", name="aten::mm", cat="cpu_op", pid=7, tid=7, ts=float(arrived), dur=1.0)
    thread = Event(ph="M", name="thread_name", pid=7, tid=7)
    call = Collective(
        group="0", number=9, operation="all_reduce", tensors="", arrived=arrived, ended=ended, event=event
    )
    return Recorded(
        rank=number,
        host="\x1b[2Jhost",
        events=[kernel, thread, event, op],
        began=NANOSECONDS,
        ended=2 * NANOSECONDS,
        starting=0,
        stopping=0,
        on_device=False,
        computes=[],
        communicates=[],
        loads_data=[],
        steps=[],
        collectives=[call],
        samples=[Sample(NANOSECONDS, NANOSECONDS, "/a/train.py:7")],
        groups={},
    ), call


def test_ranks_stand_side_by_side_and_the_last_one_releases_the_others():
    (first, early), (second, late) = (
        rank(0, NANOSECONDS + 1000, NANOSECONDS + 9000),
        rank(1, NANOSECONDS + 6000, NANOSECONDS + 9000),
    )
    ours = [
        {"ph": "X", "name": "generation 0", "ts": 0.0, "dur": 1e9, "pid": 1, "tid": 1},
        {"ph": "i", "name": "later", "ts": 3e6, "pid": 1, "tid": 1},
        {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "run"}},
    ]
    trace = traced(entries([first, second], [Joined(last=1, calls={0: early, 1: late})], ours), {"run": "r"})
    found = trace["traceEvents"]
    assert trace["otherData"] == {"run": "r"}
    names = [entry["args"]["name"] for entry in found if entry["name"] == "process_name"]
    assert names == ["run", "rank 0 on host", "rank 0 on host: device 0", "rank 1 on host", "rank 1 on host: device 0"]
    start, end = (entry for entry in found if entry.get("cat") == "collective")
    assert (start["ph"], start["pid"], start["ts"]) == ("s", 1100, 6.0)
    assert (end["ph"], end["pid"], end["ts"], end["id"]) == ("f", 1000, 8.998, start["id"])
    details = [entry["args"] for entry in found if entry["name"] == "gloo:all_reduce"]
    assert [(one["number"], one["last rank"], one["waited ms"]) for one in details] == [(9, 1, 0.005), (9, 1, 0.0)]
    assert {entry["id"] for entry in found if entry["name"] == "gemm"} == {"0.4", "1.4"}
    (generation,) = [entry for entry in found if entry["name"] == "generation 0"]
    assert (generation["ts"], generation["dur"]) == (0.0, 1e6)
    assert "later" not in {entry["name"] for entry in found}


def test_details_that_are_no_text_and_processes_beyond_the_most_lose_their_entries_alone():
    (first, early), (second, late) = (rank(number, NANOSECONDS + 1000, NANOSECONDS + 9000) for number in range(2))
    assert early.event is not None and late.event is not None
    early.event.pid = 300
    first.events = [Event(ph="X", pid=pid, ts=float(NANOSECONDS)) for pid in range(100, 200)] + first.events
    second.events[2].args = msgspec.Raw(b'{"name": "\xff"}')
    found = traced(entries([first, second], [Joined(last=1, calls={0: early, 1: late})], []), {})["traceEvents"]
    assert [entry["pid"] for entry in found if entry["name"] == "gloo:all_reduce"] == [1100]
    assert not [entry for entry in found if entry.get("cat") == "collective"]
