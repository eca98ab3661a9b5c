"""Wrong command lines and what is said to each, in `wrong.txt`: its status if that is not 2, the error, the hint."""

from __future__ import annotations

import os
import shlex
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.typed import said

TABLE = Path(__file__).parent / "wrong.txt"


def entries() -> Iterator[tuple[str, str]]:
    """Each command line with its answer."""
    for block in TABLE.read_text(encoding="utf-8").split("\n\n"):
        if block.startswith("$ "):
            line, _, answer = block.removeprefix("$ ").partition("\n")
            yield line, answer.rstrip("\n")


ENTRIES = list(entries())


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with what people take for a script in it, and an environment that sets no option."""
    for name, text in [
        ("train.py", "pass\n"),
        ("notebook.ipynb", '{"cells": []}\n'),
        ("config.yaml", "lr: 0.1\n"),
        ("config.json", '{"lr": 0.1}\n'),
        ("run.sh", "python train.py\n"),
        ("job.sbatch", "#!/bin/bash\n#SBATCH --nodes=2\npython train.py\n"),
        ("data.csv", "step,loss\n1,2\n"),
        ("README", "How to train\n"),
        ("hosts.txt", "a\nb\n"),
        ("a.out", "\x7fELF\0"),
        ("scripts/main.py", "pass\n"),
        ("empty/nothing", ""),
        ("my train.py", "pass\n"),
        ("venv/bin/python", "#!/bin/sh\n"),
    ]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "empty/nothing").unlink()
    (tmp_path / "venv/bin/python").chmod(0o755)
    (tmp_path / "dangling.py").symlink_to("gone.py")
    os.mkfifo(tmp_path / "pipe")
    for name in ("bad.zip", "model.pt"):
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            archive.writestr("data.pkl", "")
    for name in os.environ:
        if name.startswith(("PET_", "DDPLAUNCH_", "SLURM_", "PBS_", "TORCH_ELASTIC_")) or name == "PYTHON_EXEC":
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("line", "answer"), ENTRIES, ids=[line for line, _ in ENTRIES])
def test_a_wrong_command_line_starts_nothing_and_says_what_to_type(folder: Path, line: str, answer: str) -> None:
    words = shlex.split(line)
    env = dict(word.split("=", 1) for word in words[: words.index("ddplaunch")])
    status, err = said(*words[words.index("ddplaunch") + 1 :], **env)
    text = err.replace(str(folder), "FOLDER").replace(sys.executable, "PYTHON").replace("\n\n", "\n").rstrip("\n")
    assert (f"= {status}\n{text}" if status != 2 else text) == answer
    assert not (folder / "state").exists()


def test_the_table_is_long() -> None:
    assert len({line for line, _ in ENTRIES}) >= 200
