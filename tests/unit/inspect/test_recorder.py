"""Asking the recorders of a worker over a real socket, of a server that answers as torch's does."""

import json
import socket
import threading
import tracemalloc

import pytest

from ddplaunch.launcher.look.recorder import ask_recorders
from ddplaunch.record.seen import Group
from ddplaunch.record.seen.recorder import parse_members


def entry(name: str, number: int) -> dict[str, object]:
    return {
        "pg_id": 0,
        "process_group": ["0", "default_pg"],
        "profiling_name": name,
        "collective_seq_id": number,
        "time_created_ns": 1,
    }


RECORDED = {b"fr_trace_json": {"entries": []}, b"dump_nccl_trace_json": {"entries": [entry("nccl:all_reduce", 7)]}}


def serve(path: str, answered: dict[bytes, object]) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()

    def answer() -> None:
        with listener:
            for _ in range(2):
                asked, _ = listener.accept()
                with asked:
                    name = asked.recv(4096).split()[1].rpartition(b"/")[2]
                    body = json.dumps(answered[name]).encode() if name in answered else b"not found"
                    status = b"200 OK" if name in answered else b"404 Not Found"
                    asked.sendall(b"HTTP/1.1 %s\r\nContent-Type: application/json\r\n\r\n%s" % (status, body))

    threading.Thread(target=answer, daemon=True).start()


def asked(path: str) -> list[str]:
    found: list[list[Group]] = []
    for _ in ask_recorders(path, found):
        pass
    assert len(found) == 1
    return [f"{call.operation} #{call.number}" for group in found[0] for call in group.calls]


def test_nccls_collectives_are_found_though_the_recorder_of_gloo_answers_too(tmp_path):
    serve(f"{tmp_path}/both", RECORDED)
    assert asked(f"{tmp_path}/both") == ["all_reduce #7"]


def test_a_torch_without_nccl_tells_of_gloos(tmp_path):
    serve(f"{tmp_path}/gloo", {b"fr_trace_json": {"entries": [entry("gloo:broadcast", 3)]}})
    assert asked(f"{tmp_path}/gloo") == ["broadcast #3"]


# --- which ranks a group has


def test_the_ranks_of_each_group_are_read_as_a_worker_has_written_them():
    assert parse_members("0 0-3\ntp 0 1,3-4\n") == {"0": "0-3", "tp 0": "1,3-4"}


@pytest.mark.parametrize(
    "ranks", ["", "x", "3-1", "1,1", "1-2,2", "4,1", "1-", "0-999999999", "-1", "1 2", "٣", "9" * 5000]
)
def test_what_no_worker_writes_as_ranks_is_left_out(ranks: str):
    assert "0" not in parse_members(f"0 {ranks}\n1 2\n")
    assert parse_members(f"0 {ranks}\n1 2\n")["1"] == "2"


def test_a_line_of_a_few_hundred_bytes_takes_no_memory_to_speak_of():
    ranges = ",".join(f"{n << 20}-{(n << 20) + (1 << 20) - 2}" for n in range(20))
    assert len(ranges) < 350
    lines = "".join(f"{n} {n}-{n + 65_000}\n" for n in range(500))
    tracemalloc.start()
    found = parse_members(f"a {ranges}\n{lines}")
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert "a" not in found
    assert len(found) == 4
    assert most < 32 << 20
