"""Whatever a worker, its recorder, its error file or its memory file holds, what its node makes of that is a valid message."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from ddplaunch.launcher.job import messages
from ddplaunch.launcher.job.orders import NodeEnd, SentReport
from ddplaunch.launcher.look.answers import stacks_at_end
from ddplaunch.launcher.look.stacks import sample_of
from ddplaunch.reach.channel.handshake import LIMIT
from ddplaunch.record.seen import MAX_ENTRIES, Group, Sample
from ddplaunch.record.seen.arrivals import arrivals
from ddplaunch.record.seen.recorder import parse, parse_members
from ddplaunch.record.window import requests
from ddplaunch.record.window.questions import Answered, NoAnswer, NodeArrivals, NodeStacks, StacksAtEnd
from ddplaunch.spec import error_file
from ddplaunch.spec.outcome import Traces, WorkerExit
from ddplaunch.system.fields import Malformed

TRACES = Traces(oom_kills=0, shm=None, log_folder=None)
END = WorkerExit(
    rank=3, local_rank=1, host="b", pid=9, device="cpu", code=3, signal=None, at=5.0, seconds=1.0, cpu_seconds=0.5
)

odd_text = st.text(st.characters(codec=None, categories=None), max_size=20)  # halves of characters too
odd_int = st.integers() | st.sampled_from([-1, 0, 1 << 31, 1 << 63, (1 << 63) - 1, 10**400])
odd = st.recursive(
    st.none() | st.booleans() | odd_int | odd_int.map(str) | st.floats() | odd_text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(odd_text, inner, max_size=3),
    max_leaves=6,
)
CALL: dict[str, Any] = {
    "pg_id": 0,
    "process_group": ["0", "default_pg"],
    "profiling_name": "gloo:all_reduce",
    "collective_seq_id": 7,
    "p2p_seq_id": 1,
    "is_p2p": False,
    "state": "scheduled",
    "retired": False,
    "input_sizes": [[4, 4]],
    "input_dtypes": ["Float"],
    "output_sizes": [[4, 4]],
    "output_dtypes": ["Float"],
    "time_created_ns": 1,
}
LEFT_OUT = object()


def changed(fields: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """These fields, each as it is, left out, or with any other value."""
    each = {name: st.just(value) | st.just(LEFT_OUT) | odd for name, value in fields.items()}
    return st.fixed_dictionaries(each).map(
        lambda found: {name: value for name, value in found.items() if value is not LEFT_OUT}
    )


call = st.just(CALL) | changed(CALL) | odd
answer = st.fixed_dictionaries(
    {
        "entries": st.lists(call, max_size=40) | odd,
        "pg_status": st.dictionaries(
            st.just("0") | odd_text, changed({"last_completed_collective": 6}) | odd, max_size=2
        )
        | odd,
    }
)
recorded = answer.map(lambda found: json.dumps(found).encode()) | st.binary(max_size=200)
groups_file = st.lists(
    st.sampled_from(["0 0-3", "0 0-99999999", "0 -1", "0", " ", "x 1,2,1", "0 9999999999999999999"]) | odd_text,
    max_size=5,
).map("\n".join)
dumped = st.lists(
    st.sampled_from(
        [
            "Current thread 0x00007f3b2d (most recent call first):",
            "Thread 0x00007f3b2c [name] (most recent call first):",
            '  File "/home/me/train.py", line 88 in train_step',
            '  File "\\udc80\\U0010ffff", line 999999999 in \\x80',
            "  File ???, line ??? in f",
        ]
    )
    | odd_text,
    max_size=30,
).map("\n".join)
error = st.fixed_dictionaries(
    {
        "message": odd
        | changed(
            {
                "message": "ValueError: boom",
                "extraInfo": {
                    "py_callstack": "Traceback\n",
                    "ddplaunch": {
                        "type": "E",
                        "message": "m",
                        "frames": [{"file": "a.py", "line": 10**30}],
                        "monotonic": 1e300,
                    },
                },
            }
        )
        | changed(
            {
                "type": "E",
                "message": "boom",
                "frames": [{"file": "a.py", "line": 1, "function": "f", "source": "x"}],
                "monotonic": 1.0,
            }
        ).map(lambda ours: {"extraInfo": {"py_callstack": ours.get("message"), "ddplaunch": ours}})
    }
)
error_text = error.map(lambda found: json.dumps(found).encode()) | st.binary(max_size=200)


def travel(report: SentReport | Answered | StacksAtEnd) -> messages.ToCoordinator:
    """Return what arrives of a report, after proving that nothing was left out on the way."""
    message = messages.fitted(report)
    payload = messages.encode(message)
    assert len(payload) <= LIMIT
    assert messages.for_coordinator(payload) == message
    if isinstance(report, Answered):
        reply = requests.NodeReply(0, "a", report.answer)
        assert requests.decode_reply(requests.encode(reply)) == reply
    return message


def fits(samples: Sequence[Sample], *ends: WorkerExit) -> None:
    """Prove that these can be sent, as the answer to a question and at the end of a generation."""
    for threads in (False, True):
        travel(Answered(1, NodeStacks.of(samples, threads=threads)))
    if samples:
        report = stacks_at_end(0, samples)
        assert report is not None
        travel(report)
    travel(NodeEnd(0, ends, None, (), TRACES))


@given(recorded, groups_file)
@example(json.dumps({"entries": [{**CALL, "time_created_ns": None}]}).encode(), "0 0-1")
def test_whatever_a_recorder_answers_can_be_sent(body: bytes, groups: str) -> None:
    members = parse_members(groups)
    fits([Sample(rank=3, pid=9, groups=tuple(parse(body, members)))])


@given(st.lists(recorded, max_size=3), groups_file, st.integers(1, 3))
def test_whatever_a_recorder_answers_of_times_can_be_sent(bodies: list[bytes], groups: str, every: int) -> None:
    travel(Answered(1, NodeArrivals(-5, tuple(arrivals(3, bodies, parse_members(groups), every)))))


@given(dumped, odd_text, odd_text)
def test_whatever_a_memory_file_holds_can_be_sent(text: str, child: str, state: str) -> None:
    text = text.encode(errors="surrogatepass").decode(errors="replace")
    fits([replace(sample_of(3, 9, "a", child=child, state=state, dump=text), native=text, ras=text)])


@given(error_text, odd_text)
def test_whatever_an_error_file_holds_can_be_sent(content: bytes, last_words: str) -> None:
    fits((), *(replace(END, rank=rank, error=error_file.parse(content), stderr_tail=last_words) for rank in range(6)))


def test_more_than_a_message_may_hold_is_cut_and_not_refused() -> None:
    frames = [f'  File "a.py", line {line} in f\n' for line in range(300)]
    dump = "".join(f"Thread 0x1 (most recent call first):\n{''.join(frames[n:])}\n" for n in range(300))
    calls = [
        {**CALL, "pg_id": n, "process_group": [str(n)], "collective_seq_id": i} for i in range(80) for n in range(300)
    ]
    body = json.dumps({"entries": calls}).encode()
    groups = tuple(parse(body, {str(n): f"{n}-{n + 1}" for n in range(300)}))
    (found,) = NodeStacks.of(
        [replace(sample_of(3, 9, "a", dump=dump), groups=(*groups, *groups))], threads=True
    ).samples("a")
    assert found.threads[-1].is_main
    fits([found])
    many = [Sample(rank=rank, pid=9, groups=(Group(name="0", members=str(rank)),)) for rank in range(5000)]
    assert travel(Answered(1, NodeStacks.of(many, threads=False)))
    long = [{**CALL, "collective_seq_id": number} for number in range(5000)]
    for entries in (long, [*long, *calls]):
        series = arrivals(3, [json.dumps({"entries": entries}).encode()], {"0": "0"})
        assert sum(len(each.numbers) for each in series) <= MAX_ENTRIES // 2  # a worker has two recorders
        assert travel(Answered(1, NodeArrivals(0, tuple(series))))


def test_the_ends_of_thousands_that_all_say_much_fit_together() -> None:
    content = json.dumps({"message": {"message": "\1" * 9000, "extraInfo": {"ddplaunch": {"type": "\1" * 9000}}}})
    error = error_file.parse(content.encode())
    assert error is not None
    fits((), *(replace(END, rank=rank, error=error, stderr_tail="\1" * 9000) for rank in range(3000)))


# --- what a node sends that is not as ours


CALLED = [7, "f", "", "", False, False, -1]
STACKS = {
    "type": "stacks",
    "stacks": [],
    "of_threads": [],
    "processes": [{"rank": 3, "pid": 9, "groups": [["0", "", "", -1, [CALLED]]]}],
}


def test_of_an_answer_that_is_malformed_there_is_left_that_it_is() -> None:
    payload = messages.encode({"type": "answered", "number": 4, "answer": STACKS})
    with pytest.raises(Malformed, match="at"):
        messages.for_coordinator(payload)
    assert messages.stand_in_for_malformed(payload) == Answered(4, NoAnswer("has sent a malformed answer"))


def test_of_malformed_stacks_at_the_end_nothing_is_left() -> None:
    payload = messages.encode({"type": "stacks_at_end", "generation": 2, "stacks": STACKS})
    with pytest.raises(Malformed):
        messages.for_coordinator(payload)
    assert messages.stand_in_for_malformed(payload) is None


@pytest.mark.parametrize(
    "payload", [b"", b"[]", b'{"type":"pause_limits","paused":3}', b'{"type":"ended"}', b'{"type":"answered"}']
)
def test_no_job_can_do_without_any_other_message(payload: bytes) -> None:
    with pytest.raises(Malformed):
        messages.stand_in_for_malformed(payload)


def test_a_command_that_asks_is_told_which_node_has_sent_a_malformed_answer() -> None:
    payload = requests.encode({"type": "node", "node_rank": 1, "host": "b", "answer": STACKS})
    reply = requests.decode_reply(payload)
    assert isinstance(reply, requests.NodeReply)
    assert isinstance(reply.answer, NoAnswer)
    assert (reply.node_rank, reply.host) == (1, "b")
    assert reply.answer.reason.startswith("has sent a malformed answer (")
