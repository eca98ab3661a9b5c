"""Files that may be pipes."""

from __future__ import annotations

import io
import os
import sys
import threading
from pathlib import Path

import pytest

from ddplaunch.system.process import files


def read(path: object) -> str:
    return files.read_text(str(path), 10)


@pytest.mark.parametrize("text", ["A=1\n", ""])
def test_what_a_shell_substitutes_is_read_to_its_end_even_if_that_has_come(text: str) -> None:
    ours, theirs = os.pipe()
    os.write(theirs, text.encode())
    os.close(theirs)
    assert read(f"/dev/fd/{ours}") == text
    os.close(ours)


def test_a_pipe_that_nobody_writes_to_is_named_and_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, said = tmp_path / "train.env", list[str]()
    os.mkfifo(path)

    class Terminal(io.StringIO):
        """Writes to the pipe when it is said that nobody does."""

        def write(self, text: str) -> int:
            said.append(text)
            threading.Thread(target=path.write_text, args=("A=1\n",)).start()
            return len(text)

    monkeypatch.setattr(files, "_SLOW", 0.01)
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert read(path) == "A=1\n"
    assert said == [f"ddplaunch: waiting for {path}: it is a pipe, and nothing was written to it yet\n"]


def test_a_file_is_a_file_and_what_is_none_an_error(tmp_path: Path) -> None:
    (tmp_path / "train.env").write_text("A=1\n")
    assert read(tmp_path / "train.env") == "A=1\n"
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "nowhere")
    with pytest.raises(IsADirectoryError):
        read(tmp_path)
    (tmp_path / "train.env").write_text("A=123456789\n")
    with pytest.raises(OSError, match="it is larger than 10 B"):
        read(tmp_path / "train.env")
