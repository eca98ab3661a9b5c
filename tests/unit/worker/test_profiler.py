"""How long a worker records, and where it writes its trace."""

import json
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ddplaunch.worker import profiler
from ddplaunch.worker.profiler import saved


class Result:
    """What torch's profiler gives: a trace that is written to a path."""

    def save(self, path: str) -> None:
        self.mode = os.stat(os.path.dirname(path)).st_mode & 0o777
        for name in (path, f"{path}.tmp"):  # torch makes a second file beside it
            Path(name).write_text("a trace")


def test_a_trace_is_written_where_nobody_else_can_put_a_link_and_nothing_is_left(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    result = Result()
    with saved(result) as file:
        assert (file.read(), result.mode) == (b"a trace", 0o700)
        assert os.listdir(tmp_path) == []


def test_steps_count_from_when_the_client_says_that_all_ranks_record():
    ours, client = socket.socketpair()
    client.settimeout(60)  # where the worker has ended too early
    with ours, client, ThreadPoolExecutor(1) as pool:
        profile = profiler.Profile(ours, 0)
        ended = pool.submit(profile.record, 1)

        def said(**message: object) -> None:
            """Tell the worker, and wait for the answer to a ping: it has looked at all of that, and goes on recording."""
            for one in (message, {"type": "ping", "number": 7}):
                client.sendall(json.dumps(one).encode() + b"\n")
            assert b"[7," in client.recv(100)

        profile.steps = 10  # done before another rank had begun
        said()
        said(type="count")
        profile.steps = 12  # of which the first had begun before, and one is to spare
        said()
        profile.steps = 13
        assert ended.result(60) == ""
