"""Where a worker writes its trace."""

import os
from pathlib import Path

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
