"""What a rank sends is read: on the CPU and on a device, on the common clock; anything else is refused."""

import json
import tempfile
import tracemalloc
import zlib
from collections.abc import Callable

import pytest

from ddplaunch.system.fields import Malformed
from ddplaunch.tools.profile.division import Joined
from ddplaunch.tools.profile.merged import entries
from ddplaunch.tools.profile.recorded import read, unpacked
from tests.recorded import traced

BASE = 1_000_000_000_000
TIMES = {"asked": -1000, "began": 0, "ended": 900_000, "stopped": 950_000, "saved": 990_000}


def slice_(name: str, cat: str, begin: float, end: float, **args: object) -> dict[str, object]:
    return {"ph": "X", "name": name, "cat": cat, "pid": 7, "tid": 7, "ts": begin, "dur": end - begin, "args": args}


def entry(number: int, at: int, name: str = "gloo:all_reduce") -> dict[str, object]:
    fields = {"collective_seq_id": number, "profiling_name": name, "time_created_ns": BASE + at, "is_p2p": False}
    return {**fields, "process_group": ["0", "default_pg"], "input_sizes": [[4]], "input_dtypes": ["Float"]}


def sent(events: list[dict[str, object]], entries: list[dict[str, object]], **more: object) -> bytes:
    """What a rank sends; times of events are microseconds, those of entries nanoseconds."""
    times = {name: BASE + at for name, at in TIMES.items()} | {"mono_asked": 0, "mono_stopped": 951_000}
    head = {"times": times, "samples": [[BASE + 5, BASE + 9, "a.py:1"]], "entries": entries, "groups": {"0": 2}, **more}
    return json.dumps(head).encode() + b"\n" + json.dumps({"traceEvents": events, "baseTimeNanoseconds": BASE}).encode()


CPU = [
    slice_("enumerate(DataLoader)#X.__next__", "user_annotation", 0, 100),
    slice_("aten::cat", "cpu_op", 50, 80),
    slice_("aten::mm", "cpu_op", 100, 300),
    slice_("c10d::allreduce_", "cpu_op", 300, 310),
    slice_("gloo:all_reduce", "user_annotation", 320, 500),
    slice_("Optimizer.step#SGD.step", "user_annotation", 500, 600),
    slice_("gloo:all_reduce", "user_annotation", 700, 800),
    {"ph": "X", "name": "", "cat": "Trace", "pid": "Spans", "tid": 0, "ts": 0, "dur": 900},
    slice_("from another time", "cpu_op", 1e12, 1e12 + 5),
]


def test_a_rank_on_the_cpu_is_divided_and_its_collectives_are_numbered():
    one = read(sent(CPU, [entry(41, 305_000)]), rank=3, host="h", ahead=1_000)
    zero = BASE - 1_000  # its clock is ahead
    assert [(begin - zero, end - zero) for begin, end in one.loads_data] == [(0, 100_000)]
    assert [(begin - zero, end - zero) for begin, end in one.computes] == [(100_000, 300_000)]
    assert [(begin - zero, end - zero) for begin, end in one.communicates] == [(300_000, 500_000), (700_000, 800_000)]
    (call,) = one.collectives
    assert (call.group, call.number, call.tensors) == ("0", 41, "float32 [4]")
    assert (call.arrived - zero, call.ended - zero, one.unnumbered) == (305_000, 500_000, 1)
    assert [end - zero for end in one.steps] == [600_000]
    assert (one.began - zero, one.clock_moved, len(one.events)) == (0, 0, 7)
    assert one.samples == [(zero + 5, zero + 9, "a.py:1")]


def test_on_a_device_the_kernels_count_and_a_collective_comes_when_its_kernel_does():
    events = [
        slice_("record_param_comms", "cpu_op", 10, 30, **{"External id": 5}),
        slice_("nccl:all_reduce", "user_annotation", 12, 28),
        slice_("aten::mm", "cpu_op", 0, 300),
        slice_("gemm", "kernel", 40, 120, **{"External id": 4}),
        slice_("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "kernel", 100, 400, **{"External id": 5}),
        slice_("enumerate(DataLoader)#X.__next__", "user_annotation", 350, 450),
    ]
    one = read(sent(events, [entry(7, 13_000, "nccl:all_reduce")]), rank=0, host="h", ahead=0)
    assert [(begin - BASE, end - BASE) for begin, end in one.computes] == [(40_000, 120_000)]
    assert [(begin - BASE, end - BASE) for begin, end in one.communicates] == [(120_000, 400_000)]
    assert [(begin - BASE, end - BASE) for begin, end in one.loads_data] == [(400_000, 450_000)]
    (call,) = one.collectives
    assert (call.number, call.arrived - BASE, call.ended - BASE) == (7, 100_000, 400_000)


def test_the_pace_of_collectives_before_says_how_much_slower_the_steps_are():
    before = [entry(number, -900_000 + 20_000 * number) for number in range(40)]
    during = [entry(100 + number, 30_000 * number) for number in range(25)]
    one = read(sent(CPU, [*before, *during]), rank=0, host="h", ahead=0)
    assert one.slowdown == pytest.approx(0.5)
    assert read(sent(CPU, during), rank=0, host="h", ahead=0).slowdown is None


def test_a_clock_that_was_set_meanwhile_is_noticed():
    times = {name: BASE + at for name, at in TIMES.items()} | {"mono_asked": 0, "mono_stopped": 951_000}
    one = read(
        sent(CPU, [], times={**times, "stopped": times["stopped"] + 3_600_000_000_000}), rank=0, host="h", ahead=0
    )
    assert one.clock_moved == 3_600_000_000_000


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}\n{}",
        b"\0" * 1000,
        sent([], [])[:-2],
        sent([{"ph": "X", "ts": 1e300}], []),
        sent([{"ph": "X", "ts": "now"}], []),
        sent([], [], samples=[[1, 2]]),
        sent([], [], times={}),
        sent([], [])[:-3] + f', "args": {"[" * 3000}'.encode(),
    ],
)
def test_what_no_worker_of_ours_sends_is_malformed(data):
    with pytest.raises(Malformed):
        read(data, rank=0, host="h", ahead=0)


@pytest.mark.parametrize("strange", [b'{"a": "\xff"}', b'{"External id": [5]}', b'{"External id": 1e999}', b"[]"])
@pytest.mark.parametrize(
    "event",
    [
        slice_("gloo:all_reduce", "user_annotation", 320, 500, x="?"),
        slice_("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "kernel", 320, 500, x="?"),
    ],
    ids=["collective", "kernel"],
)
def test_details_that_cannot_be_read_cost_nothing_else(event, strange):
    data = sent([event], [entry(41, 305_000)]).replace(b'{"x": "?"}', strange)
    one = read(data, rank=0, host="h", ahead=0)
    trace = traced(entries([one], [Joined(last=0, calls={0: call}) for call in one.collectives], []), {})
    assert event["name"] in {entry["name"] for entry in trace["traceEvents"]}


@pytest.mark.parametrize(
    ("stored", "why"),
    [
        (zlib.compress(b"x" * 1001), "longer than 1000 bytes"),
        (zlib.compress(bytes(range(256)))[:-9], "ends too early"),
        (b"no zlib", "is damaged"),
        (b"", "ends too early"),
    ],
)
def test_what_is_damaged_or_too_long_is_not_unpacked(stored, why):
    with tempfile.TemporaryFile() as file:
        file.write(stored)
        with pytest.raises(Malformed, match=why):
            unpacked(file, 1000)


def memory_of(call: Callable[[], object]) -> int:
    """The most bytes that a call takes beyond what there was before."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def refused(call: Callable[[], object], why: str) -> None:
    with pytest.raises(Malformed, match=why):
        call()


def test_a_small_trace_that_would_unpack_to_a_huge_one_takes_little_memory_and_is_refused():
    with tempfile.TemporaryFile() as file:
        file.write(zlib.compress(bytes(200 << 20), 9))
        assert file.tell() < 220_000
        taken = memory_of(lambda: refused(lambda: unpacked(file, 1 << 30), r"is longer than 16777216 bytes, unpacked"))
    assert taken < 48 << 20


DENSE = {
    "empty entries": b'{"ph":""},',
    "entries of two fields": b'{"ph":"X","ts":1.5},',
    "lists in entries": b'{"ph":"X","args":[[],[],[],[],[],[],[],[]]},',
}


@pytest.mark.parametrize("one", DENSE.values(), ids=DENSE)
def test_a_trace_of_tiny_entries_is_refused_before_they_are_made(one):
    head = sent([], []).partition(b"\n")[0]
    data = head + b'\n{"traceEvents":[' + one * (4_000_000 // len(one)) + b'{"ph":""}]}'
    taken = memory_of(lambda: refused(lambda: read(data, rank=0, host="h", ahead=0), "holds too many values for"))
    assert taken < 1 << 20


def test_a_head_of_tiny_values_is_refused_before_they_are_made():
    data = sent([], [{"x": [[]] * 1_000_000}])
    taken = memory_of(lambda: refused(lambda: read(data, rank=0, host="h", ahead=0), "holds too many values for"))
    assert taken < 2 * len(data)


def test_a_trace_as_torch_writes_it_takes_a_few_times_its_length():
    wide = dict.fromkeys(("External id", "Record function id", "Ev Idx"), 12345)
    events = [slice_(f"aten::op_{number % 50}", "cpu_op", number, number + 0.5, **wide) for number in range(20_000)]
    data = sent(events, [])
    assert memory_of(lambda: read(data, rank=0, host="h", ahead=0)) < 6 * len(data)
